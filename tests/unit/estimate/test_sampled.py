"""Requests drawn around estimated means: their tails, their rates, and what noise does to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.estimate import Estimate
from sweep.estimate.sampled import Requests, SampledLoad, Slowdown, sample_load
from sweep.measure.lengths import LengthDistribution
from sweep.measure.workload import Load, WorkloadSpec

LOAD = Load(concurrency=16)
SPEC = WorkloadSpec(
    "w",
    LengthDistribution(value=512),
    LengthDistribution(value=101),
    num_requests=400,
    loads=(LOAD,),
    slo_ttft_ms=200.0,
)
# 16 requests of 100 + 100 x 20 ms each.
MEANS = Estimate(
    100.0, 20.0, 16 * 101 / 2.1, 50.0, True, waiting_ms=40.0, decode_step_ms=18.0, mixed_step_ms=38.0, mixed_share=0.1
)


def sample(estimate: Estimate = MEANS, load: Load = LOAD, slow: Slowdown | None = None, draw: int = 0) -> SampledLoad:
    found = sample_load(
        estimate, SPEC, load, Requests.of(SPEC, draw), devices=2, price_usd_per_device_hour=3.0, slowdown=slow
    )
    assert found is not None
    return found


def value(found: SampledLoad, name: str) -> float:
    number = found.metrics[name]
    assert number is not None
    return number


def test_the_means_are_the_estimates() -> None:
    found = sample()
    assert value(found, "ttft_mean_ms") == pytest.approx(100.0, rel=0.1)
    assert value(found, "tpot_mean_ms") == pytest.approx(20.0, rel=0.02)
    assert value(found, "request_throughput_rps") == pytest.approx(16 / 2.1)
    expected = 3.0 * 2 / 3600 / (16 * 101 / 2.1) * 1e6
    assert value(found, "cost_usd_per_mtok") == pytest.approx(expected)


def test_the_tail_is_the_waiting_and_the_steps_that_read_prompts() -> None:
    found = sample()
    assert value(found, "ttft_p50_ms") < value(found, "ttft_p90_ms") < value(found, "ttft_p99_ms")
    assert value(found, "ttft_p99_ms") == pytest.approx(60 + 40 * np.log(100), rel=0.25)  # of an exponential
    assert (value(found, "itl_p50_ms"), value(found, "itl_p99_ms")) == (18.0, 38.0)
    assert 0.9 < value(found, "slo_attainment") < 1.0


def test_a_percentile_that_the_requests_do_not_support_is_none() -> None:
    slow = replace(
        MEANS, output_throughput_tok_s=MEANS.output_throughput_tok_s / 40 if MEANS.output_throughput_tok_s else None
    )
    found = sample(slow)
    assert value(found, "requests_completed") < 100
    assert found.metrics["ttft_p99_ms"] is None and found.metrics["ttft_p50_ms"] is not None
    assert found.duration_s <= SPEC.max_load_s + 1.0


def test_a_load_on_which_nothing_ends_in_time_is_none() -> None:
    stuck = replace(MEANS, output_throughput_tok_s=1e-3)
    found = sample_load(stuck, SPEC, LOAD, Requests.of(SPEC, 0), devices=1, price_usd_per_device_hour=0.0)
    assert found is None


@given(st.floats(0.5, 3.0), st.floats(0.5, 3.0))
def test_slower_steps_slow_everything_by_their_factor(steps: float, first: float) -> None:
    plain, slow = sample(), sample(slow=Slowdown(steps, first))
    assert value(slow, "tpot_p50_ms") == pytest.approx(steps * value(plain, "tpot_p50_ms"))
    assert value(slow, "ttft_p99_ms") == pytest.approx(steps * first * value(plain, "ttft_p99_ms"))
    took = steps * (100 * first + 2000)
    assert value(slow, "request_throughput_rps") == pytest.approx(16e3 / took)


def test_an_open_loop_keeps_its_rate_and_bursts_lengthen_the_wait() -> None:
    at_rate = replace(MEANS, output_throughput_tok_s=4 * 101.0)
    even, bursty = (sample(at_rate, Load(None, 4.0, b), Slowdown(2.0)) for b in (1.0, 0.25))
    assert value(even, "request_throughput_rps") == value(bursty, "request_throughput_rps") == pytest.approx(4.0)
    assert value(bursty, "ttft_mean_ms") > 1.3 * value(even, "ttft_mean_ms")


def test_all_configurations_see_the_same_luck_and_each_draw_another() -> None:
    same, again, other = (Requests.of(SPEC, draw) for draw in (0, 0, 1))
    assert np.array_equal(same.luck, again.luck) and not np.array_equal(same.luck, other.luck)
