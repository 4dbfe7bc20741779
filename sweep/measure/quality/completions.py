"""Greedy decoding: what no scored prompt shows.

Two questions. Is speculation lossless: is every token of a greedy completion the one the target model itself finds
likeliest? And does a busy engine answer as a quiet one does? The first needs one engine only: its own prefill, which
knows no drafts, scores the completion. A mismatch is judged by its gap, the nats by which the target's likeliest token
beats the chosen one: decoding and prefill round differently, so that near-ties flip with no speculation at all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import aiohttp
import numpy as np

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.quality.asking import ask_all, complete, connect
from sweep.measure.quality.logprobs import QualitySpec, score

# Logits of bf16 models are 8 bits wide: at the usual 16 to 32 one step is 0.125, and two roundings can differ by two.
NEAR_TIE_NATS = 0.25


@dataclass(frozen=True)
class GreedyCheck:
    """How greedy completions compare with what the target model finds likeliest at each of their positions.

    identical: share of completions all of whose tokens are the target's first choice. first_divergences_nats: for each
    other one, by how much its first mismatch was beaten there. largest_gap_nats: over all tokens.
    """

    completions: int
    tokens: int
    identical: float
    first_divergences_nats: tuple[float, ...]
    largest_gap_nats: float

    @property
    def lossless(self) -> bool:
        """Every mismatch is a near-tie."""
        return self.largest_gap_nats <= NEAR_TIE_NATS

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lossless": self.lossless, "near_tie_nats": NEAR_TIE_NATS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GreedyCheck:
        values = {f.name: data[f.name] for f in fields(cls)}
        return cls(**{**values, "first_divergences_nats": tuple(values["first_divergences_nats"])})


def check_greedy(
    base_url: str, model: str, prompts: Sequence[Sequence[int]], spec: QualitySpec, max_tokens: int
) -> GreedyCheck:
    """How the server itself scores its greedy completions of the prompts, max_tokens each.

    Raises LaunchFailure as measure_logprobs does.
    """

    async def run() -> GreedyCheck:
        async with connect(base_url, spec.request_timeout_s) as session:
            completions = await greedy(session, model, prompts, spec, max_tokens)
            texts = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
            scored = await score(session, model, texts, replace(spec, top_logprobs=1))
        gaps = np.maximum(scored.logprobs[:, 0] - scored.actual_logprobs, 0.0)
        by_text = [gaps[scored.prompt_index == i] for i in range(len(texts))]
        return judge([g[len(g) - len(c) :] for g, c in zip(by_text, completions, strict=True)])

    return asyncio.run(run())


def judge(gaps: Sequence[np.ndarray[Any, np.dtype[np.float64]]]) -> GreedyCheck:
    """gaps: for each completion (tokens,), nats by which the likeliest token beats the chosen one; 0 where it is it."""
    first = tuple(float(g[g > 0][0]) for g in gaps if (g > 0).any())
    return GreedyCheck(
        completions=len(gaps),
        tokens=sum(len(g) for g in gaps),
        identical=1 - len(first) / len(gaps),
        first_divergences_nats=first,
        largest_gap_nats=max((float(g.max()) for g in gaps if len(g)), default=0.0),
    )


async def greedy(
    session: aiohttp.ClientSession, model: str, prompts: Sequence[Sequence[int]], spec: QualitySpec, max_tokens: int
) -> list[list[int]]:
    """Token ids of the greedy completions, all of max_tokens."""

    async def one(_: int, prompt: Sequence[int]) -> list[int]:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await complete(session, body)
        try:
            return [int(token) for token in json.loads(answer)["choices"][0]["token_ids"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            detail = f"no token_ids in a completion ({type(error).__name__}: {error})"
            raise LaunchFailure(FailureCause.request_errors, detail) from error

    return await ask_all(one, prompts, spec.concurrency)


def share_identical(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Share of completions that are the same, token by token."""
    return float(np.mean([list(a) == list(b) for a, b in zip(one, other, strict=True)]))
