"""The steady state on a roofline: laws that hold for any model of steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config import HardwareConfig, ModelConfig
from sweep.estimate.knobs import Scheduling, scheduling
from sweep.estimate.roofline import roofline
from sweep.estimate.steady import Estimate, Lengths, Unknown, room, steady_state
from sweep.estimate.steps import Memory
from sweep.measure.workload import Load, WorkloadSpec

H100 = HardwareConfig(name="h100", memory_gib=79.6)
MODEL = ModelConfig(
    name="m", path="m", num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32, weights_gib=15.0
)
STEPS = roofline(MODEL, H100, {})
LIMITS = scheduling({"max_model_len": 8192}, H100)

lengths = st.builds(Lengths, st.integers(8, 4000), st.integers(1, 1000))
limits = st.builds(
    replace,
    st.just(LIMITS),
    replicas=st.integers(1, 4),
    pipeline=st.sampled_from([1, 2]),
    max_num_seqs=st.integers(2, 512),
    max_num_batched_tokens=st.integers(256, 32768),
    chunked_prefill=st.booleans(),
)


def at(load: Load, asked: Lengths, allowed: Scheduling = LIMITS, device_gib: float = 79.6) -> Estimate:
    return steady_state(STEPS, allowed, asked, load, device_gib, 8192, 0.0)


@given(st.integers(1, 2000), lengths, limits)
def test_littles_law(concurrency: int, asked: Lengths, allowed: Scheduling) -> None:
    """Requests in flight = completion rate x mean time in the system, queueing included."""
    found = at(Load(concurrency), asked, allowed)
    assert found.ttft_ms is not None and found.tpot_ms is not None and found.output_throughput_tok_s is not None
    rate_per_ms = found.output_throughput_tok_s / asked.output_tokens / 1e3
    in_system = rate_per_ms * (found.ttft_ms + found.tpot_ms * (asked.output_tokens - 1))
    assert in_system == pytest.approx(concurrency, rel=1e-6)


@given(lengths, limits)
def test_more_requests_in_flight_never_wait_less(asked: Lengths, allowed: Scheduling) -> None:
    """By less than one token: a batch splits its prefill into whole steps."""
    found = [at(Load(c), asked, allowed) for c in (1, 4, 16, 64, 256, 1024)]
    e2e = [(f.ttft_ms or 0) + (f.tpot_ms or 0) * (asked.output_tokens - 1) for f in found]
    assert all(later >= 0.98 * earlier for earlier, later in itertools.pairwise(e2e))


@given(st.floats(0.01, 200.0), lengths)
def test_an_open_loop_is_served_at_its_rate_or_has_no_ttft(rate: float, asked: Lengths) -> None:
    found = at(Load(None, rate), asked)
    assert found.output_throughput_tok_s is not None
    if found.ttft_ms is None:
        assert found.output_throughput_tok_s < rate * asked.output_tokens
    else:
        assert found.output_throughput_tok_s == pytest.approx(rate * asked.output_tokens)


def test_beyond_max_num_seqs_throughput_stays_and_requests_queue() -> None:
    small = replace(LIMITS, max_num_seqs=16)
    full, beyond = (at(Load(c), Lengths(500, 200), small) for c in (16, 64))
    assert beyond.output_throughput_tok_s == pytest.approx(full.output_throughput_tok_s)
    assert beyond.tpot_ms == full.tpot_ms
    assert beyond.ttft_ms is not None and full.ttft_ms is not None and beyond.ttft_ms > 2 * full.ttft_ms


def test_a_cached_prefix_is_not_prefilled_again() -> None:
    shared = Lengths(4000, 100, shared_prefix_tokens=3500)
    cached, computed = at(Load(8), shared), at(Load(8), shared, replace(LIMITS, prefix_caching=False))
    assert cached.ttft_ms is not None and computed.ttft_ms is not None and cached.ttft_ms < 0.7 * computed.ttft_ms


def test_accepted_drafts_shorten_the_time_per_token() -> None:
    drafting = replace(LIMITS, draft_tokens=3)
    times = [
        steady_state(STEPS, drafting, Lengths(500, 200), Load(4), 79.6, 8192, acceptance).tpot_ms
        for acceptance in (0.0, 0.5, 1.0)
    ]
    assert times == sorted(times, reverse=True) and times[0] / times[2] == pytest.approx(4.0, rel=0.05)  # type: ignore


def test_fitting_is_true_false_or_too_close_to_call() -> None:
    memory = Memory(weights_gib=10.0, fixed_gib=14.0, caution_gib=3.0, kv_gib_per_token=1e-3)
    assert room(memory, 20.0, 1000) == (True, 6.0)
    assert room(memory, 14.5, 1000) == (None, 1.0)
    assert room(memory, 11.0, 1000) == (False, 0.0)


def test_what_does_not_start_has_no_times() -> None:
    found = at(Load(8), Lengths(100, 100), device_gib=12.0)
    assert found.fits is False and found.ttft_ms is None and found.output_throughput_tok_s is None
    assert found.memory_gib > 12.0


def workload(**more: object) -> WorkloadSpec:
    spec = {
        "name": "w",
        "prompt_tokens": {"kind": "uniform", "low": 100, "high": 300},
        "output_tokens": {"kind": "fixed", "value": 20},
        "loads": {"concurrency": [4]},
        "num_requests": 2000,
    }
    return WorkloadSpec.from_dict({**spec, **more})


def test_lengths_are_the_means_of_the_workload() -> None:
    found = Lengths.of(workload(shared_prefix_tokens=50))
    assert isinstance(found, Lengths) and found.output_tokens == 20 and found.shared_prefix_tokens == 50
    assert found.prompt_tokens == pytest.approx(250, abs=5)


def test_later_turns_of_a_conversation_find_the_earlier_ones_cached() -> None:
    found = Lengths.of(workload(conversation={"turns": {"kind": "fixed", "value": 3}, "max_tokens": 4000}))
    assert isinstance(found, Lengths) and found.prompt_tokens == pytest.approx(200 + 220, abs=15)
    assert found.shared_prefix_tokens == pytest.approx((0 + 200 + 420) / 3, abs=15)


def test_lengths_that_nobody_knows_are_unknown() -> None:
    assert isinstance(Lengths.of(workload(ignore_eos=False)), Unknown)
