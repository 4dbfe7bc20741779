"""Costs as on the invoice: the formulas of sweep.measure.cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.measure.cost import (
    Usage,
    cost_usd_per_mtok,
    effective_cost_usd_per_mtok,
    energy_j_per_token,
    highest_load,
    token_prices,
)
from sweep.results.points import OperatingPoint

SOME = st.floats(0.01, 1e4)


def test_one_device_hour_at_1000_tokens_a_second_makes_3_6_million_tokens() -> None:
    assert cost_usd_per_mtok(3.6, 1, 1000.0) == pytest.approx(1.0)
    assert cost_usd_per_mtok(3.6, 8, 1000.0) == pytest.approx(8.0)


def test_no_throughput_has_no_cost() -> None:
    assert cost_usd_per_mtok(3.6, 1, None) is None
    assert cost_usd_per_mtok(3.6, 1, 0.0) is None


def test_watts_per_token_rate_are_joules_per_token() -> None:
    assert energy_j_per_token(700.0, 3500.0) == pytest.approx(0.2)
    for unknown in ((None, 10.0), (700.0, None), (700.0, 0.0)):
        assert energy_j_per_token(*unknown) is None


def test_idle_capacity_and_starts_are_paid_too() -> None:
    day_and_night = Usage(utilization=0.5, peak_to_mean=3.0)
    assert effective_cost_usd_per_mtok(2.0, day_and_night, None) == pytest.approx(12.0)
    scaled_out = replace(day_and_night, starts_per_day=24)
    assert effective_cost_usd_per_mtok(2.0, scaled_out, 360.0) == pytest.approx(12.0 * 1.1)
    assert effective_cost_usd_per_mtok(2.0, scaled_out, None) is None
    assert effective_cost_usd_per_mtok(None, Usage(), 1.0) is None
    assert effective_cost_usd_per_mtok(2.0, Usage(), None) == 2.0


@given(SOME, SOME, SOME, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 3))
def test_prices_earn_what_the_devices_cost_and_the_margin(
    usd_per_hour: float, input_s: float, output_s: float, hits: float, a: float, b: float, margin: float
) -> None:
    prices = token_prices(
        usd_per_hour, input_s, output_s, hits, input_ratio=a, cached_ratio=b, margin=margin
    )  # fmt: skip
    assert prices is not None
    earned = 3600e-6 * (
        output_s * prices.output_usd_per_mtok
        + input_s * (1 - hits) * prices.input_usd_per_mtok
        + input_s * hits * prices.cached_input_usd_per_mtok
    )
    assert earned == pytest.approx(usd_per_hour * (1 + margin))
    assert prices.input_usd_per_mtok == pytest.approx(a * prices.output_usd_per_mtok)


def test_output_alone_carries_all_where_input_is_free() -> None:
    prices = token_prices(3.6, 5000.0, 1000.0, 0.5, input_ratio=0, cached_ratio=0)
    assert prices is not None and prices.output_usd_per_mtok == pytest.approx(1.0)
    assert token_prices(3.6, 5000.0, 0.0, 0.5, input_ratio=0, cached_ratio=0) is None


def point(load: int, rps: float | None, ttft_ms: float, state: str = "measured") -> OperatingPoint:
    metrics = {"ttft_p99_ms": ttft_ms} | ({} if rps is None else {"request_throughput_rps": rps})
    return OperatingPoint(
        f"p{load}", "c", "f", "l", {"model": "m"}, {"concurrency": load}, f"c{load}", None, "trial", 1, "measured",
        state, metrics=metrics,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_highest_load_within_the_sla_is_a_measured_one() -> None:
    ladder = [point(1, 1.0, 50), point(8, 6.0, 200), point(32, 20.0, 900), point(64, None, 100)]

    def within(limit_ms: float) -> str | None:
        found = highest_load(ladder, lambda p: p.metrics["ttft_p99_ms"] <= limit_ms)
        return None if found is None else found.load_label

    assert [within(ms) for ms in (900, 899, 100, 10)] == ["c32", "c8", "c1", None]
    assert highest_load([point(8, 6.0, 200, "quarantined")], lambda p: True) is None
