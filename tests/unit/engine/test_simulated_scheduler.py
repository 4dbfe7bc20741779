"""Continuous batching in virtual time: limits that hold at every step, and work that always ends."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config import HardwareConfig, ModelConfig
from sweep.engine.simulated_scheduler import BLOCK_TOKENS, Request, Scheduler, lognormal
from sweep.estimate import Lengths
from sweep.estimate.knobs import Scheduling, scheduling
from sweep.estimate.roofline import roofline
from sweep.estimate.steady import steady_state
from sweep.measure.workload import Load

H100 = HardwareConfig(name="h100", memory_gib=79.6)
MODEL = ModelConfig(
    name="m", path="m", num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32, weights_gib=15.0
)
STEPS = roofline(MODEL, H100, {})
LIMITS = scheduling({}, H100)

requests = st.lists(st.builds(Request, st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=25)
limits = st.builds(
    replace,
    st.just(LIMITS),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 512),
    draft_tokens=st.integers(0, 3),
    prefix_caching=st.booleans(),
)


class Watched(Scheduler):
    """Remembers what the last step computed."""

    plan: list[tuple[Request, int]]

    def _duration_s(self, plan: list[tuple[Request, int]]) -> float:  # type: ignore[override]
        self.plan = plan
        return super()._duration_s(plan)


def scheduler(allowed: Scheduling = LIMITS, blocks: int = 4096, acceptance: float = 0.5) -> Watched:
    return Watched(STEPS, allowed, blocks, acceptance, np.random.default_rng(0))


def finish(engine: Scheduler) -> dict[Request, int]:
    """Step until idle; tokens emitted by request."""
    emitted: dict[Request, int] = {}
    now = 0.0
    for _ in range(100_000):
        step = engine.step(now)
        if step is None:
            return emitted
        assert step.duration_s > 0
        now += step.duration_s
        for request, new in step.emitted:
            emitted[request] = emitted.get(request, 0) + new
    raise AssertionError("the scheduler does not come to an end")


@given(requests, limits, st.integers(23, 200))
def test_every_request_gets_exactly_its_tokens_within_all_limits(
    asked: list[Request], allowed: Scheduling, blocks: int
) -> None:
    asked = [replace(request) for request in asked]
    engine = scheduler(allowed, blocks)
    for request in asked:
        engine.add(request)
    emitted: dict[Request, int] = dict.fromkeys(asked, 0)
    now = 0.0
    while (step := engine.step(now)) is not None:
        now += step.duration_s
        assert sum(tokens for _, tokens in engine.plan) <= allowed.max_num_batched_tokens
        assert len(engine.running) <= allowed.max_num_seqs and len(engine.plan) <= allowed.max_num_seqs
        assert engine.used_blocks == sum(request.blocks for request in engine.running) <= blocks
        assert all(request.computed <= request.blocks * BLOCK_TOKENS for request in engine.running)
        for request, new in step.emitted:
            assert not request.finished or request not in engine.running
            emitted[request] += new
    assert emitted == {request: request.max_tokens for request in asked}
    assert engine.used_blocks == 0 and engine.load == 0
    assert engine.counters.generation_tokens == sum(request.max_tokens for request in asked)
    assert engine.counters.prompt_tokens == sum(request.prompt_tokens for request in asked)
    assert engine.counters.started == len(asked)


def test_a_cache_that_overflows_preempts_the_newest_and_still_serves_everyone() -> None:
    engine = scheduler(blocks=20)
    asked = [Request(100, 100) for _ in range(3)]
    for request in asked:
        engine.add(request)
    assert finish(engine) == dict.fromkeys(asked, 100)
    assert engine.counters.preemptions > 0


def test_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    engine = scheduler(replace(LIMITS, max_num_batched_tokens=64))
    engine.add(first := Request(32, 50))
    engine.step(0.0)
    engine.add(long := Request(630, 1))
    plans = []
    while long.emitted == 0:
        engine.step(0.0)
        plans.append([tokens for request, tokens in engine.plan if request is long])
        assert first in [request for request, _ in engine.plan]
    assert plans == [[63]] * 10


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step_of_its_own_size() -> None:
    engine = scheduler(replace(LIMITS, max_num_batched_tokens=64, chunked_prefill=False))
    engine.add(Request(40, 20))
    engine.add(second := Request(50, 1))
    engine.step(0.0)
    assert second.emitted == 0 and second.computed == 0
    with pytest.raises(ValueError, match="without chunked prefill"):
        engine.add(Request(60, 10))


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="KV cache"):
        scheduler(blocks=10).add(Request(150, 11))


def test_a_shared_prefix_is_found_until_the_cache_is_reset() -> None:
    engine = scheduler()
    keys = list(range(10))
    for hits in (0, 160):
        before = engine.counters.prefix_hits
        engine.add(Request(165, 2, keys))
        finish(engine)
        assert engine.counters.prefix_hits - before == hits
    engine.reset_prefix_cache()
    engine.add(Request(165, 2, keys))
    finish(engine)
    assert engine.counters.prefix_hits == 160 and engine.counters.prefix_queries == 3 * 165


def test_a_request_that_is_given_up_leaves_nothing_behind() -> None:
    engine = scheduler()
    engine.add(running := Request(100, 50))
    engine.step(0.0)
    engine.add(waiting := Request(100, 50))
    engine.abort(running)
    engine.abort(waiting)
    assert engine.load == 0 and engine.used_blocks == 0 and engine.step(0.0) is None


def test_drafts_are_accepted_at_the_given_rate() -> None:
    engine = scheduler(replace(LIMITS, draft_tokens=3), acceptance=0.4)
    for _ in range(8):
        engine.add(Request(20, 1000))
    finish(engine)
    assert engine.counters.accepted_tokens / engine.counters.draft_tokens == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_a_closed_loop_agrees_with_the_steady_state(concurrency: int) -> None:
    """The estimate and the simulation are two views of the same steps: TPOT and throughput within 12 %."""
    prompt, output, total = 512, 128, 6 * concurrency + 8
    engine = scheduler()
    born: dict[Request, float] = {}
    first: dict[Request, float] = {}
    tpot, now, left = [], 0.0, total
    while left or engine.load:
        while left and engine.load < concurrency:
            request = Request(prompt, output)
            engine.add(request)
            born[request], left = now, left - 1
        step = engine.step(now)
        assert step is not None
        now += step.duration_s
        for request, _ in step.emitted:
            first.setdefault(request, now)
            if request.finished:
                tpot.append((now - first[request]) / (output - 1) * 1e3)
    expected = steady_state(STEPS, LIMITS, Lengths(prompt, output), Load(concurrency), 79.6, 8192, 0.0)
    assert fmean(tpot) == pytest.approx(expected.tpot_ms, rel=0.12)
    assert total * output / now == pytest.approx(expected.output_throughput_tok_s, rel=0.2)


@given(st.floats(0.0, 0.3))
def test_noise_has_mean_one_and_the_stated_spread(cv: float) -> None:
    rng = np.random.default_rng(1)
    draws = np.array([lognormal(rng, cv) for _ in range(4000)])
    assert draws.mean() == pytest.approx(1.0, abs=4 * max(cv, 1e-9) / math.sqrt(len(draws)))
    assert draws.std() == pytest.approx(cv, rel=0.1, abs=1e-9)
