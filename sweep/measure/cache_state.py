"""In which state a load finds the prefix cache: workload.cache.

The engine is idle and its cache empty before every load. Then, by the state asked for:

    cold     the warm-up leaves nothing that a measured prompt begins with: its prompts are the frozen ones, begun in
             their middle. Hits come from the measured requests among themselves.
    warmed   the load's own warm-up requests, and nothing else (the default).
    steady   each beginning that several requests share (system prompts, documents) is asked once before the warm-up,
             as it would be resident after hours of the same traffic. What only one conversation repeats is not.

A trace with prompts or blocks of its own has no steady state to make up: its rows before the measured ones are it, as
many as workload.warmup_requests.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.requests import RequestSet

STATES = ("cold", "warmed", "steady")
# No block of a prefix cache is smaller: vLLM's default on GPUs.
_BLOCK_TOKENS = 16
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Prompt = npt.NDArray[np.int32 | np.uint8]


def with_cold_warmup(requests: RequestSet) -> RequestSet:
    """The same requests, each prompt of the warm-up pool beginning in its middle: same text, same length."""
    prompts = [_begun_in_the_middle(prompt) for prompt in _prompts(requests)[requests.num_measured :]]
    measured = requests.token_ids[: requests.starts[requests.num_measured]]
    return replace(requests, token_ids=np.concatenate([measured, *prompts]))


def shared_beginnings(requests: RequestSet) -> list[Prompt]:
    """The longest beginnings that two or more requests share, of at least 16 tokens, none the beginning of another.

    Later turns of a conversation are left out: they share with their own conversation alone.
    """
    heads = range(len(requests)) if requests.after is None else np.flatnonzero(requests.after < 0)
    prompts = _prompts(requests)
    ordered = sorted((prompts[i] for i in heads), key=_order)
    shared = sorted((a[:n] for a, b in pairwise(ordered) if (n := _common(a, b)) >= _BLOCK_TOKENS), key=_order)
    return [a for a, b in pairwise(shared) if _common(a, b) < len(a)] + shared[-1:]


def ask_once(base_url: str, model: str, prompts: Sequence[Prompt], timeout_s: float) -> None:
    """One token of answer to each prompt of token ids, in turn. Raises LaunchFailure when one is not answered."""
    for prompt in prompts:
        body = json.dumps({"model": model, "prompt": prompt.tolist(), "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(f"{base_url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with _NO_PROXY.open(request, timeout=timeout_s) as answer:
                answer.read()
        except OSError as error:
            raise LaunchFailure(
                FailureCause.request_errors, f"a shared prefix of {len(prompt)} tokens was not answered: {error}"
            ) from error


def _prompts(requests: RequestSet) -> list[Prompt]:
    return np.split(requests.token_ids, requests.starts[1:-1])


def _order(prompt: Prompt) -> bytes:
    """Sorts prompts as their elements do, so that those with a common beginning are neighbours."""
    return prompt.astype(">i4").tobytes()


def _begun_in_the_middle(prompt: Prompt) -> Prompt:
    if prompt.dtype != np.uint8:
        return np.roll(prompt, -(len(prompt) // 2))
    text = prompt.tobytes().decode()
    half = len(text) // 2
    return np.frombuffer((text[half:] + text[:half]).encode(), dtype=np.uint8)


def _common(a: Prompt, b: Prompt) -> int:
    """How many elements two prompts share from their beginning on."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
