"""Beyond the choice: the runner-up's chances, the devices there are, other prices, the nearest and what helps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.decide.capacity import Traffic
from sweep.decide.pick import TIE_FRACTION, pick
from sweep.decide.repricing import repriced
from sweep.decide.sla import Sla, parse_sla
from sweep.errors import SlaError
from sweep.results.points import OperatingPoint

COST, TTFT, RPS, TOKENS = "cost_usd_per_mtok", "ttft_p99_ms", "request_throughput_rps", "output_throughput_tok_s"


def make(name: str, metrics: dict[str, float], *, args: dict[str, Any] | None = None, **changes: Any) -> OperatingPoint:
    fields = {
        "point_id": name, "config_hash": name.partition("-")[0], "fingerprint": "f", "launch_id": "l",
        "engine": {"model": "m", "args": args or {}, "env": {}}, "load": {"concurrency": 8}, "load_label": "c8",
        "params": None, "purpose": "trial", "devices": 1, "provenance": "measured", "state": "measured",
        "n_repeats": 1, "metrics": metrics,
    }  # fmt: skip
    return OperatingPoint(**(fields | changes))


# ---------------------------------------------------------------- the runner-up


def test_what_the_runner_up_lacks_and_what_would_make_it_win() -> None:
    points = [make("cheap", {COST: 1.0, TTFT: 400.0}), make("fast", {COST: 1.5, TTFT: 200.0})]
    result = pick(points, parse_sla("ttft_p99_ms<=500"), minimize=COST)
    assert result.rival.point.point_id == "fast" and result.rival.change == pytest.approx(-1 / 3)
    assert [str(b) for b in result.rival.tighter] == ["ttft_p99_ms<=200"]
    assert "would win if ttft_p99_ms<=200 were asked" in result.text()
    assert result.clear_winner is None, "nothing says how far to trust the two costs"
    tightened = pick(points, Sla(result.rival.tighter), minimize=COST)
    assert tightened.chosen.point_id == "fast"


@pytest.mark.parametrize(("theirs", "clear"), [(1.05, False), (3.0, True)])
def test_a_runner_up_that_may_be_better_is_no_clear_loser(theirs: float, clear: bool) -> None:
    points = [make(n, {COST: v}, run_se={COST: 0.05 * v}) for n, v in (("a", 1.0), ("b", theirs))]
    result = pick(points, Sla(), minimize=COST)
    assert result.clear_winner is clear
    assert ("no clear winner" in result.text()) is not clear


@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 4)), min_size=2, max_size=8))
def test_the_value_the_runner_up_needs_is_enough(rows: list[tuple[float, int]]) -> None:
    points = [make(f"p{i}", {COST: c}, args=dict.fromkeys("abcd"[:n], 1)) for i, (c, n) in enumerate(rows)]
    rival = pick(points, Sla(), minimize=COST).rival
    improved = {COST: rival.needed * (1 - 1e-9) if rival.change else rival.point.metrics[COST]}
    better = [make(p.point_id, improved, args=dict(p.engine["args"])) if p is rival.point else p for p in points]
    again = pick(better, Sla(), minimize=COST)
    others = [p for p in points if p.overrides <= rival.point.overrides and p is not rival.point]
    tied = [p for p in others if abs(p.metrics[COST] - improved[COST]) <= 3 * TIE_FRACTION * improved[COST]]
    if rival.change and not tied:
        assert again.chosen.point_id == rival.point.point_id


# ---------------------------------------------------------------- devices

WIDE = [
    make("one", {COST: 1.0, TTFT: 900.0, RPS: 5.0}),
    make("four", {COST: 2.0, TTFT: 300.0, RPS: 8.0}, devices=4),
]


def test_a_rate_that_one_engine_misses_is_met_by_several() -> None:
    result = pick(WIDE, parse_sla("request_throughput_rps>=20 ttft_p99_ms<=1000"), minimize=COST)
    assert not result.feasible
    assert (result.fleet.point.point_id, result.fleet.replicas, result.fleet.devices) == ("one", 4, 4)
    text = result.text()
    assert "More devices: 4 replicas on 4 devices together would do" in text
    assert result.to_dict()["fleet"]["replicas"] == 4


def test_where_replicas_do_not_help_it_says_so() -> None:
    result = pick(WIDE, parse_sla("ttft_p99_ms<=100"), minimize=COST)
    assert result.fleet is None
    assert "More devices do not help: replicas leave ttft_p99_ms<=100 as it is" in result.text()


def test_only_points_whose_traffic_fits_on_the_devices_take_part() -> None:
    traffic = Traffic(7.0, peak_to_mean=1.0, growth=1.0, spare=0)
    sla = parse_sla("ttft_p99_ms<=1000")
    assert pick(WIDE, sla, minimize=TTFT, traffic=traffic).chosen.point_id == "four"
    fitting = pick(WIDE, sla, minimize=TTFT, traffic=traffic, devices=3)
    assert (fitting.chosen.point_id, fitting.capacity.devices) == ("one", 2)
    assert "1 more point would meet them, but not on the devices there are" in " ".join(fitting.why)
    none = pick(WIDE, sla, minimize=TTFT, traffic=traffic, devices=1)
    assert not none.feasible and none.fleet.extra == 1
    assert "none meets ttft_p99_ms<=1000 on 1 device" in none.text()
    assert "2 replicas on 2 devices together would do: 1 device more" in none.text()
    with pytest.raises(SlaError, match="devices=0"):
        pick(WIDE, sla, minimize=TTFT, devices=0)


def test_the_nearest_points_are_named_with_their_misses() -> None:
    points = [make(f"p{i}-c8", {COST: 1.0 + i, TTFT: 500.0 + 100 * i}) for i in range(5)]
    result = pick([*points, make("p0-c4", {COST: 9.0, TTFT: 550.0})], parse_sla("ttft_p99_ms<=400"), minimize=COST)
    assert result.nearest.point_id == "p0-c8"
    assert [p.point_id for p in result.others_near] == ["p1-c8", "p2-c8"]
    assert "p1-c8: ttft_p99_ms 600 ms (50 % off)" in result.text()
    json.dumps(result.to_dict(), allow_nan=False)


# ---------------------------------------------------------------- prices


def test_another_price_and_utilization_scale_the_measured_cost() -> None:
    point = make("p", {COST: 2.0, TOKENS: 100.0}, sd={COST: 0.2}, intervals={COST: (1.8, 2.2)}, n_repeats=2)
    (other,) = repriced([point], 4.0, 2.0, 0.5)
    assert other.metrics[COST] == pytest.approx(2.0)
    (half,) = repriced([point], 4.0, 2.0, None)
    assert (half.metrics[COST], half.sd[COST], *half.intervals[COST]) == pytest.approx((1.0, 0.1, 0.9, 1.1))
    assert repriced([point], 4.0, None, None) == [point]


def test_a_study_without_a_price_gets_its_cost_from_the_throughput() -> None:
    point = make("p", {TOKENS: 1000.0}, devices=2, run_se={TOKENS: 50.0}, intervals={TOKENS: (900.0, 1100.0)})
    (priced,) = repriced([point], None, 3.6, None)
    assert priced.metrics[COST] == pytest.approx(2.0)
    assert priced.run_se[COST] == pytest.approx(0.1)
    assert priced.intervals[COST] == pytest.approx((2 / 1.1, 2 / 0.9))


@pytest.mark.parametrize(("price", "utilization"), [(0.0, None), (-1.0, None), (None, 0.0), (None, 1.5)])
def test_prices_and_utilizations_that_cannot_be(price: float | None, utilization: float | None) -> None:
    with pytest.raises(SlaError):
        repriced([], 1.0, price, utilization)
