"""Greedy completions: what a gap means, and a server of our own that answers differently when it is busy."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.quality import QualitySpec
from sweep.measure.quality.completions import NEAR_TIE_NATS, GreedyCheck, check_greedy, judge, share_identical
from sweep.measure.quality.under_load import measure_under_load
from sweep.measure.requests import RequestSet

VOCABULARY = 50
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
SPEC = QualitySpec(num_prompts=3, prompt_tokens=4, top_logprobs=2, concurrency=3, request_timeout_s=20)


def test_mismatches_are_judged_by_their_gap() -> None:
    exact = judge([np.zeros(4), np.zeros(3)])
    assert (exact.identical, exact.tokens, exact.largest_gap_nats, exact.lossless) == (1.0, 7, 0.0, True)
    near = judge([np.array([0.0, 0.125, 0.0, 0.2]), np.zeros(3)])
    assert (near.identical, near.first_divergences_nats, near.lossless) == (0.5, (0.125,), True)
    lossy = judge([np.array([0.0, 0.125, 0.0, 2.0]), np.zeros(3)])
    assert (lossy.first_divergences_nats, lossy.largest_gap_nats, lossy.lossless) == ((0.125,), 2.0, False)
    assert GreedyCheck.from_dict(lossy.to_dict()) == lossy
    assert lossy.to_dict()["near_tie_nats"] == NEAR_TIE_NATS


def test_identical_means_token_by_token() -> None:
    assert share_identical([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.5


class Engine:
    """The likeliest next token of t is t + 1, with 0.9; the second likeliest t + 2. wrong: what it chooses instead.

    busy_from: with that many requests in flight its scores change; a score waits half a second for that to happen, so
    that a machine with other work still shows it.
    """

    def __init__(self, wrong: int = 0, busy_from: int = 10**9) -> None:
        self.wrong, self.busy_from = wrong, busy_from
        self.in_flight = 0
        self.broken = False

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.in_flight += 1
        busy = False
        for _ in range(50 if self.busy_from < 10**9 and "prompt_logprobs" in body else 1):
            busy = busy or self.in_flight >= self.busy_from
            await asyncio.sleep(0.0 if busy else 0.01)
        self.in_flight -= 1
        if self.broken and "prompt_logprobs" not in body:
            return web.json_response({"error": "no"}, status=500)
        choice: dict[str, Any] = {"text": ""}
        prompt = body["prompt"]
        if "prompt_logprobs" in body:
            k, best = body["prompt_logprobs"], np.log(0.5 if busy else 0.9)
            positions: list[Any] = [None]
            for before, token in itertools.pairwise(prompt):
                listed = {(before + 1) % VOCABULARY: best, (before + 2) % VOCABULARY: np.log(0.05)}
                top = dict(sorted(listed.items(), key=lambda item: -item[1])[:k])
                top.setdefault(token, listed.get(token, np.log(0.001)))
                positions.append({str(t): {"logprob": float(p)} for t, p in top.items()})
            choice["prompt_logprobs"] = positions
        if body.get("return_token_ids"):
            tokens = [prompt[-1]]
            for i in range(body["max_tokens"]):
                tokens.append((tokens[-1] + 1 + (self.wrong if i == 2 else 0)) % VOCABULARY)
            choice["token_ids"] = tokens[1:]
        return web.json_response({"choices": [choice]})


@pytest.fixture
def engine() -> Iterator[tuple[Engine, str]]:
    found, address, stop = Engine(), [], threading.Event()
    ready = threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", found.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield found, address[0]
    stop.set()
    thread.join()


def test_a_server_whose_completions_are_its_own_first_choice_is_lossless(engine: tuple[Engine, str]) -> None:
    _, url = engine
    check = check_greedy(url, "m", PROMPTS, SPEC, max_tokens=6)
    assert (check.completions, check.tokens, check.identical, check.lossless) == (3, 18, 1.0, True)


@pytest.mark.parametrize(("wrong", "gap"), [(1, np.log(0.9 / 0.05)), (5, np.log(0.9 / 0.001))])
def test_a_server_that_accepts_other_tokens_is_caught(engine: tuple[Engine, str], wrong: int, gap: float) -> None:
    engine[0].wrong = wrong
    check = check_greedy(engine[1], "m", PROMPTS, SPEC, max_tokens=6)
    assert (check.identical, check.lossless) == (0.0, False)
    assert check.first_divergences_nats == pytest.approx([gap] * 3)


def requests() -> RequestSet:
    tokens = np.arange(12, dtype=np.int32)
    return RequestSet(tokens, np.array([0, 4, 8, 12]), np.full(3, 4), num_measured=3)


def under_load(url: str, concurrency: int = 4) -> Any:
    return measure_under_load(
        url, "m", PROMPTS, SPEC, requests(),
        concurrency=concurrency, greedy_tokens=4, greedy_prompt_tokens=3, max_kl=0.01,
    )  # fmt: skip


def test_an_engine_that_answers_the_same_when_busy(engine: tuple[Engine, str]) -> None:
    found = under_load(engine[1])
    assert (found.kl, found.top1_agreement, found.greedy_identical, found.unchanged) == (0.0, 1.0, 1.0, True)
    assert found.answered > 0 and found.concurrency == 4
    assert found.to_dict()["max_kl"] == 0.01


def test_an_engine_whose_answers_change_when_busy_is_caught(engine: tuple[Engine, str]) -> None:
    engine[0].busy_from = 5  # three prompts at a time are quiet, with four more requests it is busy
    found = under_load(engine[1])
    assert found.kl > 0.1 and not found.unchanged


def test_a_load_that_fails_ends_the_check_with_its_cause(engine: tuple[Engine, str]) -> None:
    engine[0].broken = True
    with pytest.raises(LaunchFailure, match="HTTP 500") as failure:
        under_load(engine[1])
    assert failure.value.cause is FailureCause.request_errors
