"""Workloads: which requests are sent and how fast, frozen so that every configuration sees the same ones.

Prompts are slices of real text, tokenized once by the served model. Everything random comes from numpy Generators
seeded by (workload seed, draw), so a request set is the same in every process; its checksum shows when it is not.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.errors import ConfigError, did_you_mean

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]

# No two prompts share their first UNIQUE_TOKENS tokens; an engine caches prefixes in blocks of at least that many.
UNIQUE_TOKENS = 8

_LENGTH_NEEDS = {
    "fixed": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma", "high"),
    "empirical": ("values",),
}
# Well-known modules of the standard library, as code text beside the prose of the language reference.
_CODE_MODULES = ("argparse", "ast", "asyncio.base_events", "dataclasses", "datetime", "difflib", "doctest", "enum",
                 "inspect", "pathlib", "pickle", "statistics", "tarfile", "typing", "zipfile")  # fmt: skip
_TOKENIZE_CHARACTERS = 50_000
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class LengthDistribution:
    """Token counts. fixed: value. uniform: low..high inclusive. lognormal: median, sigma of the logarithm, rounded.

    empirical: drawn with replacement from values. low and high clip every kind (low is 1 if not given); lognormal
    needs high, because nothing else keeps a request within the model's context. Parameters of other kinds are ignored,
    so that one override (`kind=fixed value=128`) changes a configured distribution.
    """

    kind: str = "fixed"
    value: int | None = None
    median: float | None = None
    sigma: float | None = None
    low: int | None = None
    high: int | None = None
    values: tuple[int, ...] | None = None

    def validate(self, field: str) -> None:
        """Raises ConfigError naming field.parameter, its value and what to give."""
        if self.kind not in _LENGTH_NEEDS:
            raise ConfigError(f"{field}.kind={self.kind!r}", did_you_mean(str(self.kind), _LENGTH_NEEDS))
        for name in _LENGTH_NEEDS[self.kind]:
            if getattr(self, name) in (None, ()):
                raise ConfigError(f"{field}.{name} is not set", f"a {self.kind} length needs {field}.{name}=…")
        low = 1 if self.low is None else self.low
        _require(low >= 1, f"{field}.low", self.low, "give at least 1 token")
        if self.high is not None:
            _require(self.high >= low, f"{field}.high", self.high, f"give at least low, which is {low}")
        if self.kind == "fixed":
            assert self.value is not None
            inside = low <= self.value <= (self.value if self.high is None else self.high)
            _require(inside, f"{field}.value", self.value, f"give {low} to {self.high or 'any number of'} tokens")
        if self.kind == "lognormal":
            assert self.median is not None and self.sigma is not None
            _require(self.median > 0, f"{field}.median", self.median, "give a number above 0")
            _require(self.sigma >= 0, f"{field}.sigma", self.sigma, "give 0 or more")
        if self.kind == "empirical":
            _require(min(self.values or (0,)) >= 1, f"{field}.values", self.values, "give lengths of 1 token or more")

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """n lengths, (n,)."""
        if self.kind == "fixed":
            lengths = np.full(n, self.value)
        elif self.kind == "uniform":
            assert self.low is not None and self.high is not None
            lengths = rng.integers(self.low, self.high + 1, n)
        elif self.kind == "lognormal":
            assert self.median is not None and self.sigma is not None
            lengths = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(n)))
        else:
            lengths = rng.choice(np.asarray(self.values), n)
        return np.clip(lengths, self.low or 1, self.high).astype(np.int64)


@dataclass(frozen=True)
class Load:
    """How hard the client pushes: a closed loop of `concurrency` requests in flight, or an open loop.

    In the open loop requests arrive at request_rate_rps whether or not the server keeps up, with gamma-distributed
    gaps of shape `burstiness`: 1 is a Poisson process, less is burstier (coefficient of variation burstiness^-1/2).
    """

    concurrency: int | None
    request_rate_rps: float | None = None
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate_rps is None):
            raise ConfigError(
                f"a load has concurrency={self.concurrency} and request_rate_rps={self.request_rate_rps}",
                "set exactly one: concurrency for a closed loop, request_rate_rps for an open loop",
            )
        if self.concurrency is not None:
            _require(self.concurrency >= 1, "workload.loads.concurrency", self.concurrency, "give at least 1")
        if self.request_rate_rps is not None:
            rate = self.request_rate_rps
            _require(rate > 0, "workload.loads.request_rate_rps", rate, "give requests per second above 0")
        _require(self.burstiness > 0, "workload.loads.burstiness", self.burstiness, "give 1 for Poisson arrivals")

    @property
    def label(self) -> str:
        """Short and unique within a ladder: "c8", "r2", "r2b0.25"."""
        if self.concurrency is not None:
            return f"c{self.concurrency}"
        burst = "" if self.burstiness == 1 else f"b{self.burstiness:.12g}"
        return f"r{self.request_rate_rps:.12g}{burst}"

    def to_dict(self) -> dict[str, Any]:
        """{"concurrency": int} or {"request_rate_rps": float, "burstiness": float}."""
        if self.concurrency is not None:
            return {"concurrency": self.concurrency}
        return {"request_rate_rps": self.request_rate_rps, "burstiness": self.burstiness}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Load:
        return cls(data.get("concurrency"), data.get("request_rate_rps"), data.get("burstiness", 1.0))


@dataclass(frozen=True)
class WorkloadSpec:
    """What the clients ask. prompt_tokens is each request's own text; shared_prefix_tokens come on top of it.

    Output lengths are exact: end-of-sequence is ignored and max_tokens is the drawn length. max_load_s bounds one
    load, warm-up included; request_timeout_s one request. SLOs are per request and define goodput.
    """

    name: str
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    temperature: float = 0.0
    num_requests: int = 200
    warmup_requests: int = 8
    max_load_s: float = 300.0
    loads: tuple[Load, ...] = ()
    seed: int = 0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    request_timeout_s: float = 300.0
    shared_prefix_tokens: int = 0
    num_shared_prefixes: int = 1

    def __post_init__(self) -> None:
        self.prompt_tokens.validate("workload.prompt_tokens")
        self.output_tokens.validate("workload.output_tokens")
        at_least = {"num_requests": 1, "warmup_requests": 0, "seed": 0, "temperature": 0, "shared_prefix_tokens": 0,
                    "num_shared_prefixes": 1}  # fmt: skip
        for name, least in at_least.items():
            value = getattr(self, name)
            _require(value >= least, f"workload.{name}", value, f"give {least} or more")
        for name in ("max_load_s", "request_timeout_s", "slo_ttft_ms", "slo_tpot_ms"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"workload.{name}", value, "give a number above 0")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkloadSpec:
        """From the workload group of a config: {"prompt_tokens": {"kind": …}, "loads": {"concurrency": […]}, …}.

        The ladder is ordered busiest first, closed loops before open ones: what fails under load fails early.
        Raises ConfigError naming the field, its value and the fix.
        """
        _check_names(data, cls, "workload")
        values = dict(data)
        for name in ("name", "prompt_tokens", "output_tokens"):
            if name not in values:
                raise ConfigError(f"workload.{name} is not set", f"set workload.{name}=…")
        for name in ("prompt_tokens", "output_tokens"):
            _check_names(values[name], LengthDistribution, f"workload.{name}")
            lengths = dict(values[name])
            given = lengths.get("values")
            lengths["values"] = None if given is None else tuple(given)
            values[name] = LengthDistribution(**lengths)
        loads = values.get("loads") or {}
        rates = sorted(set(loads.get("request_rate_rps") or ()), reverse=True)
        closed = [Load(c) for c in sorted(set(loads.get("concurrency") or ()), reverse=True)]
        values["loads"] = (*closed, *(Load(None, rate, loads.get("burstiness", 1.0)) for rate in rates))
        try:
            return cls(**values)
        except TypeError as error:  # a comparison of a wrong type: JSON edited by hand
            raise ConfigError(f"workload '{values['name']}' has a value of a wrong type ({error})") from error


@dataclass(frozen=True)
class Request:
    """One request. prompt_token_ids: (n,) int32. max_tokens: exactly as many tokens are asked of the server."""

    prompt_token_ids: TokenArray
    max_tokens: int


@dataclass(frozen=True, eq=False)
class RequestSet:
    """Frozen requests: `num_measured` measured ones, then a pool for the warm-up.

    token_ids: all prompts end to end. starts: (n + 1,), prompt i is token_ids[starts[i]:starts[i + 1]].
    max_tokens: (n,). shared_prefix_share: share of the prompt tokens that repeat an earlier request's prefix,
    which is the highest prefix-cache hit rate the workload itself can cause.
    """

    token_ids: TokenArray
    starts: IntArray
    max_tokens: IntArray
    num_measured: int
    shared_prefix_share: float = 0.0

    def __len__(self) -> int:
        return len(self.max_tokens)

    def __getitem__(self, i: int) -> Request:
        return Request(self.token_ids[self.starts[i] : self.starts[i + 1]], int(self.max_tokens[i]))

    @property
    def num_warmup(self) -> int:
        return len(self) - self.num_measured

    @property
    def checksum(self) -> str:
        """sha256 over every prompt, length and the split into measured and warm-up requests."""
        digest = hashlib.sha256(np.int64(self.num_measured).astype("<i8").tobytes())
        for array, kind in ((self.starts, "<i8"), (self.max_tokens, "<i8"), (self.token_ids, "<i4")):
            digest.update(array.astype(kind).tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """As .npz."""
        with path.open("wb") as f:
            np.savez(f, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> RequestSet:
        with np.load(path) as data:
            arrays = data["token_ids"], data["starts"], data["max_tokens"]
            return cls(*arrays, int(data["num_measured"]), float(data["shared_prefix_share"]))


def build_requests(spec: WorkloadSpec, corpus_token_ids: npt.ArrayLike, *, draw: int) -> RequestSet:
    """Draw number `draw` of the workload: lengths from its distributions, prompts from the corpus.

    A prompt starts at a corpus position whose first UNIQUE_TOKENS tokens occur nowhere else in the corpus, and
    positions are dealt out without replacement over all draws. So no prompt shares its beginning with another of any
    draw, and a prefix cache cannot hit by accident; only the same draw sent twice, or shared_prefix_tokens, hits.
    A prompt that reaches the corpus's end continues at its beginning. The warm-up pool holds as many requests as the
    busiest load needs: its concurrency, or as many again as are measured in an open loop.
    Raises ConfigError when the corpus has too few positions for that many draws.
    """
    corpus = np.ascontiguousarray(corpus_token_ids, dtype=np.int32)
    warmup = max(
        spec.warmup_requests,
        *(load.concurrency if load.concurrency is not None else spec.num_requests for load in spec.loads),
        0,
    )
    n, prefixes = spec.num_requests + warmup, spec.num_shared_prefixes if spec.shared_prefix_tokens else 0
    starts = _unique_starts(corpus)
    needed = (draw + 1) * (n + prefixes)
    if needed > len(starts):
        raise ConfigError(
            f"workload.num_requests={spec.num_requests} with {warmup} warm-up requests needs {needed} distinct prompts"
            f" for draw {draw}; the corpus of {len(corpus)} tokens has {len(starts)}",
            "lower workload.num_requests or the number of repeats",
        )
    deal = np.random.default_rng(np.random.SeedSequence(spec.seed)).permutation(starts)
    mine = deal[draw * (n + prefixes) : needed]
    rng = np.random.default_rng(np.random.SeedSequence(spec.seed, spawn_key=(draw,)))
    own_lengths, max_tokens = spec.prompt_tokens.sample(rng, n), spec.output_tokens.sample(rng, n)
    prompts = [_slice(corpus, start, length) for start, length in zip(mine[:n], own_lengths, strict=True)]
    shared = 0
    if prefixes:
        texts = [_slice(corpus, start, spec.shared_prefix_tokens) for start in mine[n:]]
        chosen = rng.integers(prefixes, size=n)
        prompts = [np.concatenate([texts[c], prompt]) for c, prompt in zip(chosen, prompts, strict=True)]
        shared = (n - len(np.unique(chosen))) * spec.shared_prefix_tokens
    ends = np.cumsum([len(p) for p in prompts], dtype=np.int64)
    return RequestSet(
        np.concatenate(prompts), np.r_[np.int64(0), ends], max_tokens, spec.num_requests, shared / float(ends[-1])
    )


def corpus_text() -> str:
    """About 1.4 MB of English and Python that every installation has: the language reference and library sources.

    PSF licence. It differs between Python versions, which the checksum of the request set shows.
    """
    topics = import_module("pydoc_data.topics").topics
    prose = [topics[name] for name in sorted(topics)]
    return "\n\n".join([*prose, *(inspect.getsource(import_module(name)) for name in _CODE_MODULES)])


def tokenize_corpus(base_url: str, model: str, text: str | None = None, *, timeout_s: float = 120.0) -> TokenArray:
    """Token ids of the corpus by the served model's own tokenizer (POST /tokenize), without special tokens.

    timeout_s bounds each piece's request. Raises LaunchFailure(first_request_failed) with the server's answer.
    """
    lines = (corpus_text() if text is None else text).splitlines(keepends=True)
    pieces, size = [""], 0
    for line in lines:
        if size + len(line) > _TOKENIZE_CHARACTERS and pieces[-1]:
            pieces.append("")
            size = 0
        pieces[-1] += line
        size += len(line)
    tokens = [t for piece in pieces for t in _tokenize(base_url, model, piece, special=False, timeout_s=timeout_s)]
    return np.asarray(tokens, dtype=np.int32)


def bos_token_id(base_url: str, model: str, *, timeout_s: float = 120.0) -> int | None:
    """The token that the served model's tokenizer puts before a text, or None if it puts none."""
    plain, with_special = (
        _tokenize(base_url, model, "a", special=special, timeout_s=timeout_s) for special in (False, True)
    )
    return with_special[0] if with_special[:1] != plain[:1] else None


def _tokenize(base_url: str, model: str, text: str, *, special: bool, timeout_s: float) -> list[int]:
    body = json.dumps({"model": model, "prompt": text, "add_special_tokens": special}).encode()
    request = urllib.request.Request(f"{base_url}/tokenize", body, {"Content-Type": "application/json"})
    try:
        with _NO_PROXY.open(request, timeout=timeout_s) as response:
            tokens: list[int] = json.load(response)["tokens"]
            return tokens
    except urllib.error.HTTPError as error:
        answer = error.read(500).decode(errors="replace")
        detail = f"/tokenize answered {error.code}: {answer}"
        raise LaunchFailure(FailureCause.first_request_failed, detail) from error
    except (OSError, ValueError, KeyError) as error:
        raise LaunchFailure(FailureCause.first_request_failed, f"/tokenize failed: {error!r}") from error


def _unique_starts(corpus: TokenArray) -> IntArray:
    """Positions whose first UNIQUE_TOKENS tokens occur once. A hash collision only loses a position."""
    count = max(len(corpus) - UNIQUE_TOKENS + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(UNIQUE_TOKENS):
        hashes = (hashes + corpus[i : i + count].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    return np.sort(first[counts == 1]).astype(np.int64)


def _slice(corpus: TokenArray, start: int, length: int) -> TokenArray:
    return corpus.take(np.arange(start, start + length), mode="wrap")


def _require(condition: bool, field: str, value: object, fix: str) -> None:
    if not condition:
        raise ConfigError(f"{field}={value}", fix)


def _check_names(data: Mapping[str, Any], cls: type, field: str) -> None:
    known = [f.name for f in fields(cls)]
    for name in data:
        if name not in known:
            raise ConfigError(f"{field}.{name} is unknown", did_you_mean(name, known))
