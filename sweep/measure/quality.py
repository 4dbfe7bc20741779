"""Quality of a numerics fingerprint: how far its next-token distributions are from the reference engine's.

Both engines score the same fixed text; the server returns the log-probabilities of the top-k prompt tokens at
every position, and `compare` turns two such measurements into KL divergence and top-1 agreement. KL
divergence is what llama.cpp's perplexity tool reports for quantized models (pull request 5076) and what
"Accuracy is not all you need" (arXiv 2407.09141) recommends beside flips: it sees differences that perplexity
and task accuracy average away.

Scoring a prompt runs an engine's prefill. What only decoding does (speculation that accepts other tokens than
the target's) leaves no trace here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import aiohttp
import numpy as np
import numpy.typing as npt

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.errors import ConfigError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Sums of 20 float32 probabilities are good to about this; smaller masses are rounding, not information.
_MASS_FLOOR = 1e-6


@dataclass(frozen=True)
class QualitySpec:
    """What is asked of an engine: num_prompts x prompt_tokens tokens of text, top_logprobs per position.

    top_logprobs must not exceed the server's max_logprobs (20 by default). concurrency: requests in flight.
    request_timeout_s: for one request, in seconds.
    """

    num_prompts: int = 16
    prompt_tokens: int = 256
    top_logprobs: int = 20
    concurrency: int = 8
    seed: int = 0
    request_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "top_logprobs", "concurrency", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"quality.{name} is {getattr(self, name)}", "give a number above 0")
        if self.prompt_tokens < 2:
            raise ConfigError(f"quality.prompt_tokens is {self.prompt_tokens}", "give at least 2 tokens")


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities (nats) one engine gives to the n positions of fixed prompts (all but their first).

    token_ids, logprobs: (n, k), the k most likely tokens, most likely first. actual_ids, actual_logprobs:
    (n,), the token of the text. prompt_index: (n,), which prompt a position belongs to.
    """

    token_ids: IntArray
    logprobs: FloatArray
    actual_ids: IntArray
    actual_logprobs: FloatArray
    prompt_index: IntArray


@dataclass(frozen=True)
class QualityResult:
    """Agreement with the reference. quality_kl: nats per token; quality_top1_agreement: fraction.

    Standard errors are over prompts (see _clustered_se), None when there is only one prompt. quality_kl is as
    measured; whoever reports it takes max(quality_kl, noise floor), because below the floor engines are tied.
    """

    quality_kl: float
    quality_top1_agreement: float
    quality_kl_se: float | None
    quality_top1_agreement_se: float | None
    positions: int


def quality_prompts(
    corpus_token_ids: Sequence[int] | npt.NDArray[np.integer], spec: QualitySpec, *, bos_token_id: int | None = None
) -> list[list[int]]:
    """Disjoint stretches of the corpus, each of prompt_tokens tokens: fixed by corpus and spec.

    bos_token_id takes the place of each first token: models trained with a start token behave oddly without
    one. Raises ConfigError when the corpus is too short.
    """
    blocks = len(corpus_token_ids) // spec.prompt_tokens
    if blocks < spec.num_prompts:
        raise ConfigError(
            f"quality.num_prompts={spec.num_prompts} x prompt_tokens={spec.prompt_tokens} needs more text"
            f" than the corpus has ({len(corpus_token_ids)} tokens)",
            f"use at most quality.num_prompts={blocks}" if blocks else "use a smaller quality.prompt_tokens",
        )
    starts = [b * spec.prompt_tokens for b in sorted(random.Random(spec.seed).sample(range(blocks), spec.num_prompts))]
    prompts = [[int(t) for t in corpus_token_ids[start : start + spec.prompt_tokens]] for start in starts]
    return prompts if bos_token_id is None else [[bos_token_id, *prompt[1:]] for prompt in prompts]


def measure_logprobs(base_url: str, model: str, prompts: Sequence[Sequence[int]], spec: QualitySpec) -> PromptLogprobs:
    """Score the prompts on a running server (/v1/completions, prompt_logprobs), spec.concurrency at a time.

    Raises LaunchFailure: engine_died when the connection breaks, load_timeout, request_errors otherwise.
    """
    return asyncio.run(_score_all(base_url, model, prompts, spec))


async def _score_all(base_url: str, model: str, prompts: Sequence[Sequence[int]], spec: QualitySpec) -> PromptLogprobs:
    slots = asyncio.Semaphore(spec.concurrency)
    timeout = aiohttp.ClientTimeout(total=spec.request_timeout_s)

    async def score(session: aiohttp.ClientSession, index: int, prompt: Sequence[int]) -> PromptLogprobs:
        async with slots:
            return _parse(await _request(session, model, prompt, spec), index, prompt, spec)

    async with aiohttp.ClientSession(base_url, timeout=timeout) as session:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score(session, i, p)) for i, p in enumerate(prompts)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904  the others are the same fault, or were cancelled by it
    parts = [task.result() for task in tasks]
    return PromptLogprobs(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in _FIELDS})


async def _request(session: aiohttp.ClientSession, model: str, prompt: Sequence[int], spec: QualitySpec) -> str:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": spec.top_logprobs,
    }
    try:
        async with session.post("/v1/completions", json=body) as response:
            text = await response.text()
    except TimeoutError as error:
        detail = f"no answer to a prompt_logprobs request within {spec.request_timeout_s:g} s"
        raise LaunchFailure(FailureCause.load_timeout, detail) from error
    except aiohttp.ClientError as error:
        raise LaunchFailure(FailureCause.engine_died, f"{type(error).__name__}: {error}") from error
    if response.status != 200:
        died = re.search(r"EngineDead|EngineCore", text) is not None
        cause = FailureCause.engine_died if died else FailureCause.request_errors
        raise LaunchFailure(cause, f"HTTP {response.status}: {' '.join(text.split())[:300]}")
    return text


def _parse(answer: str, index: int, prompt: Sequence[int], spec: QualitySpec) -> PromptLogprobs:
    """Read prompt_logprobs: per position {token id: {"logprob": ..., ...}}, the first position being null.

    vLLM lists the top-k tokens and, when it is not among them, the token of the text.
    """
    n, k = len(prompt) - 1, spec.top_logprobs
    token_ids, logprobs, actual = np.empty((n, k), np.int64), np.empty((n, k)), np.empty(n)
    try:
        positions = json.loads(answer)["choices"][0]["prompt_logprobs"][1:]
        if len(positions) != n:
            raise ValueError(f"{len(positions)} positions for {n} tokens")
        for i, (position, text_id) in enumerate(zip(positions, prompt[1:], strict=True)):
            listed = {int(token): float(entry["logprob"]) for token, entry in position.items()}
            actual[i] = listed[text_id]
            if len(listed) > k:
                del listed[text_id]
            order = sorted(listed, key=lambda token: (-listed[token], token))
            if len(order) != k:
                raise ValueError(f"{len(order)} tokens listed where {k} were asked for")
            token_ids[i], logprobs[i] = order, [listed[token] for token in order]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        detail = f"unusable prompt_logprobs in the response: {type(error).__name__}: {error}"
        raise LaunchFailure(FailureCause.request_errors, detail) from error
    if not (np.isfinite(logprobs).all() and np.isfinite(actual).all()):
        raise LaunchFailure(FailureCause.request_errors, "the engine returned log-probabilities that are not finite")
    return PromptLogprobs(token_ids, logprobs, np.array(prompt[1:], np.int64), actual, np.full(n, index, np.int64))


def compare(reference: PromptLogprobs, candidate: PromptLogprobs) -> QualityResult:
    """Mean KL(reference || candidate) and top-1 agreement over positions of the same prompts.

    KL at one position, with p the reference's distribution and q the candidate's, over a partition of the
    vocabulary:

        sum over v in L of p(v) ln(p(v)/q(v))  +  p(A) ln(p(A)/q(A))  +  p(R) ln(p(R)/q(R))

    L: tokens both engines list (top-k plus the token of the text). A: tokens only the reference lists. R: the
    rest. p(A) is known; q(A) is not, but no token the candidate leaves out is likelier than its k-th, and all
    of them together have what its list leaves, so q(A) <= min(|A| q_k, 1 - q(listed)). The q(A) that makes
    the expression smallest within that bound is used: the KL that the lists prove, and no more.

    Lumping tokens together never increases KL (data-processing inequality; Cover & Thomas, Elements of
    Information Theory, log-sum inequality), so this is a lower bound of the full KL. Measured against it with
    k = 20 on SmolLM2-135M: 22 to 32 % low from bf16 through int8 to int4, 45 % at int3, in the same order. It
    is 0 for identical distributions.

    Top-1 agreement: the engines' sets of most likely tokens intersect. Sets, because bf16 logits tie (the
    first two at 4 % of positions), and which of two tied tokens is listed first says nothing.
    """
    if not (
        np.array_equal(reference.actual_ids, candidate.actual_ids)
        and np.array_equal(reference.prompt_index, candidate.prompt_index)
    ):
        raise ValueError("reference and candidate scored different prompts")
    p_ids, p_log = _listed(reference)
    q_ids, q_log = _listed(candidate)
    same = (p_ids[:, :, None] == q_ids[:, None, :]) & (p_ids >= 0)[:, :, None]
    kl = _position_kl(p_ids, p_log, q_log, same, candidate.logprobs[:, -1])
    p_top, q_top = p_log == p_log.max(axis=1, keepdims=True), q_log == q_log.max(axis=1, keepdims=True)
    agree = (same & p_top[:, :, None] & q_top[:, None, :]).any(axis=(1, 2)).astype(np.float64)
    return QualityResult(
        quality_kl=float(kl.mean()),
        quality_top1_agreement=float(agree.mean()),
        quality_kl_se=_clustered_se(kl, reference.prompt_index),
        quality_top1_agreement_se=_clustered_se(agree, reference.prompt_index),
        positions=len(kl),
    )


def noise_floor(reference: PromptLogprobs, equals: Sequence[PromptLogprobs]) -> float:
    """The KL (nats/token) between engines of equal quality: the largest KL of the reference to its equals.

    equals: repeats of the reference (measure one with concurrency 1 and one batched: batching changes
    rounding), and controls of the same fingerprint under other settings, such as compiled instead of eager.
    Repeats alone can give 0.0 where a control gives 0.0015. Candidates below the floor are tied with the
    reference and with one another.
    """
    if not equals:
        raise ValueError("a noise floor needs at least one repeat or control of the reference")
    return max(compare(reference, other).quality_kl for other in equals)


def _listed(x: PromptLogprobs) -> tuple[IntArray, FloatArray]:
    """Top-k and the token of the text, (n, k+1). Where that is in the top-k already: id -1, logprob -inf."""
    repeated = (x.token_ids == x.actual_ids[:, None]).any(axis=1)
    ids = np.column_stack([x.token_ids, np.where(repeated, -1, x.actual_ids)])
    return ids, np.column_stack([x.logprobs, np.where(repeated, -np.inf, x.actual_logprobs)])


def _position_kl(
    p_ids: IntArray, p_log: FloatArray, q_log: FloatArray, same: npt.NDArray[np.bool_], q_kth_log: FloatArray
) -> FloatArray:
    """The formula of `compare`, (n,). same[i, a, b]: reference's a-th and candidate's b-th token are one."""
    common = same.any(axis=2)
    p = np.exp(p_log)
    q_log_at_p = np.take_along_axis(q_log, same.argmax(axis=2), axis=1)
    log_ratio = np.subtract(p_log, q_log_at_p, where=common, out=np.zeros_like(p_log))
    kl_common = (p * log_ratio).sum(axis=1)

    p_missing = np.where(common, 0.0, p).sum(axis=1)
    p_rest = np.maximum(1.0 - p.sum(axis=1), 0.0)
    q_outside = np.maximum(1.0 - np.exp(np.where(common, q_log_at_p, -np.inf)).sum(axis=1), _MASS_FLOOR)
    n_missing = ((p_ids >= 0) & ~common).sum(axis=1)
    q_bound = np.minimum(n_missing * np.exp(q_kth_log), 1.0 - np.exp(q_log).sum(axis=1))
    p_outside = p_missing + p_rest
    share = np.divide(p_missing, p_outside, where=p_outside > 0, out=np.zeros_like(p_outside))
    # Unbounded, the smallest KL splits q's mass as p's is split: A and R are then one bucket.
    q_missing = np.minimum(np.maximum(q_bound, _MASS_FLOOR), share * q_outside)
    kl = kl_common + _term(p_missing, q_missing) + _term(p_rest, q_outside - q_missing)
    return np.asarray(np.maximum(kl, 0.0))


def _term(p: FloatArray, q: FloatArray) -> FloatArray:
    """p ln(p/q), and 0 where p is 0."""
    ratio = np.divide(p, np.maximum(q, _MASS_FLOOR), where=p > 0, out=np.ones_like(p))
    return np.asarray(p * np.log(ratio))


def _clustered_se(values: FloatArray, prompt_index: IntArray) -> float | None:
    """Standard error of the mean of values (n,), with prompts as clusters.

    Positions of one prompt are correlated, so the usual sd/sqrt(n) is too small. With G prompts and residuals
    summed within each: sqrt(G/(G-1) sum_g (sum_{i in g} (x_i - mean))^2) / n ("Adding error bars to evals",
    arXiv 2411.00640).
    """
    _, cluster = np.unique(prompt_index, return_inverse=True)
    sums = np.bincount(cluster, weights=values - values.mean())
    groups = len(sums)
    if groups < 2:
        return None
    return float(np.sqrt(groups / (groups - 1) * (sums**2).sum()) / len(values))


_FIELDS = ("token_ids", "logprobs", "actual_ids", "actual_logprobs", "prompt_index")


def cache_path(
    prompts: Sequence[Sequence[int]],
    spec: QualitySpec,
    *,
    model: str,
    fingerprint: str,
    engine_version: str,
    device: str,
) -> Path:
    """Where a measurement is kept for all studies: .../<checksum>/<fingerprint>-<version>-<device>.npz.

    device (a GPU's name, or "cpu") is part of the name because kernels of one fingerprint differ between
    devices; the checksum covers top_logprobs and, for a local checkpoint, the sizes and times of its files,
    so that another model saved to the same folder is measured anew. XDG_CACHE_HOME is respected.
    """
    key = json.dumps([[list(p) for p in prompts], spec.top_logprobs, _checkpoint_stamp(Path(model))])
    checksum = hashlib.sha256(key.encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", f"{fingerprint}-{engine_version}-{device}")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "sweep" / "quality" / checksum / f"{name}.npz"


def _checkpoint_stamp(model: Path) -> list[tuple[str, int, int]]:
    if not model.is_dir():
        return []
    files = sorted(p for p in model.iterdir() if p.suffix in (".safetensors", ".bin", ".json", ".gguf"))
    return [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]


def save_logprobs(path: Path, measured: PromptLogprobs) -> None:
    """Write a measurement as .npz; readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".npz", delete=False) as f:
        try:
            np.savez_compressed(f, **{name: getattr(measured, name) for name in _FIELDS})
            Path(f.name).replace(path)
        except BaseException:
            Path(f.name).unlink(missing_ok=True)
            raise


def load_logprobs(path: Path) -> PromptLogprobs | None:
    """Read a measurement; None when there is none or the file is damaged, so that it is measured again."""
    try:
        with np.load(path) as data:
            return PromptLogprobs(**{name: data[name] for name in _FIELDS})
    except (FileNotFoundError, KeyError, ValueError, EOFError, BadZipFile):
        return None
