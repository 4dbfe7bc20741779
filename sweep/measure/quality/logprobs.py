"""What an engine thinks of fixed text: the log-probabilities of the top-k prompt tokens at every position.

Scoring a prompt runs an engine's prefill. What only decoding does (speculation that accepts other tokens than the
target's) leaves no trace here: see completions.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import aiohttp
import numpy as np
import numpy.typing as npt

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.errors import ConfigError
from sweep.measure.quality.asking import ask_all, complete, connect
from sweep.measure.quality.cache import whole_file

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


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

    async def run() -> PromptLogprobs:
        async with connect(base_url, spec.request_timeout_s) as session:
            return await score(session, model, prompts, spec)

    return asyncio.run(run())


async def score(
    session: aiohttp.ClientSession, model: str, prompts: Sequence[Sequence[int]], spec: QualitySpec
) -> PromptLogprobs:
    """measure_logprobs within a session."""

    async def one(index: int, prompt: Sequence[int]) -> PromptLogprobs:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": spec.top_logprobs,
        }
        return _parse(await complete(session, body), index, prompt, spec)

    parts = await ask_all(one, prompts, spec.concurrency)
    return PromptLogprobs(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in _FIELDS})


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


_FIELDS = ("token_ids", "logprobs", "actual_ids", "actual_logprobs", "prompt_index")


def save_logprobs(path: Path, measured: PromptLogprobs) -> None:
    """Write a measurement as .npz; readers see all of it or nothing."""
    with whole_file(path) as f:
        np.savez_compressed(f, **{name: getattr(measured, name) for name in _FIELDS})


def load_logprobs(path: Path) -> PromptLogprobs | None:
    """Read a measurement; None when there is none or the file is damaged, so that it is measured again."""
    try:
        with np.load(path) as data:
            return PromptLogprobs(**{name: data[name] for name in _FIELDS})
    except (FileNotFoundError, KeyError, ValueError, EOFError, BadZipFile):
        return None
