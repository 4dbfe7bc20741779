"""How sure a bound is: probabilities from repeats, headroom, confidence, and what an infeasible SLA would need."""

from __future__ import annotations

import json
import math
from statistics import NormalDist, fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_points import bare_point as make

from sweep.decide.certainty import NO_SPREAD, Demand, Judge
from sweep.decide.pick import pick
from sweep.decide.sla import Bound, Sla, parse_sla
from sweep.errors import SlaError
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint

COST, TTFT, KL, TOP1 = "cost_usd_per_mtok", "ttft_p99_ms", "quality_kl", "quality_top1_agreement"


def repeated(name: str, cost: float, ttfts: list[float], **changes: Any) -> OperatingPoint:
    metrics = {COST: cost, TTFT: fmean(ttfts)}
    return make(name, metrics, n_repeats=len(ttfts), sd={TTFT: stdev(ttfts)}, **changes)


# ---------------------------------------------------------------- probability


def sure(point: OperatingPoint, metric: str, op: str, value: float) -> float | None:
    """The probability as a study of this point alone knows it."""
    return Judge([point]).probability(point, Bound(metric, op, value))


def test_probability_is_the_t_of_the_repeats_on_the_scale_of_factors():
    # Mean 490, sd 10. A study of one repeated point pools its own spread: 2 degrees of its own, 2 of the pool.
    point = repeated("p", 1.0, [480.0, 490.0, 500.0])
    t, degrees = math.log(500 / 490) * 490 / (10 / math.sqrt(3)), 4
    expected = 0.5 + t * (6 + t * t / 4 * 4) / (2 * (degrees + t * t) ** 1.5)  # T of 4 degrees in closed form
    assert sure(point, TTFT, "<=", 500) == pytest.approx(expected)
    assert sure(point, TTFT, "<=", 490) == pytest.approx(0.5)
    assert sure(point, TTFT, "<=", 490**2 / 500) == pytest.approx(1 - expected)
    assert sure(point, TTFT, "<=", 0) == 0.0


def test_a_point_measured_once_has_the_spread_of_the_others():
    once, other = make("once", {TTFT: 400.0}), repeated("other", 1.0, [480.0, 490.0, 500.0])
    judge = Judge([once, other])
    assert judge.spread(once, TTFT).source == "study"
    assert 0.5 < judge.probability(once, Bound(TTFT, "<=", 410)) < judge.probability(once, Bound(TTFT, "<=", 450)) < 1


def test_requests_of_one_run_say_something_too():
    point = make("p", {TTFT: 400.0}, run_se={TTFT: 20.0})
    assert Judge([point]).spread(point, TTFT).source == "requests"
    assert sure(point, TTFT, "<=", 420) == pytest.approx(NormalDist().cdf(math.log(1.05) * 20))


def test_a_maximized_metric_counts_from_the_other_side():
    point = make("p", {"goodput_rps": 10.0}, n_repeats=2, sd={"goodput_rps": 1.0})
    assert sure(point, "goodput_rps", ">=", 8) > 0.5 > sure(point, "goodput_rps", ">=", 11)


def test_quality_uses_its_own_standard_error():
    point = make("p", {KL: 0.01}, quality_se={KL: 0.002})
    assert sure(point, KL, "<=", 0.012) == pytest.approx(NormalDist().cdf(1))


def test_no_spread_is_no_probability():
    once = make("p", {TTFT: 400.0, KL: 0.01})
    assert sure(once, TTFT, "<=", 500) is None
    assert sure(once, KL, "<=", 0.02) is None
    launched_once = make("p", {"startup_s": 30.0}, n_repeats=3, sd={"startup_s": 0.0})
    assert Judge([launched_once]).spread(launched_once, "startup_s") is None, "three loads of one launch are one start"


def test_repeats_that_agree_leave_no_doubt():
    point = make("p", {"requests_failed": 0.0}, n_repeats=3, sd={"requests_failed": 0.0})
    assert sure(point, "requests_failed", "<=", 0) == 1.0


def test_all_bounds_together_assume_no_independence():
    point = make("p", {TTFT: 400.0, KL: 0.01}, run_se={TTFT: 20.0}, quality_se={KL: 0.002})
    judge, bounds = Judge([point]), [Bound(TTFT, "<=", 420), Bound(KL, "<=", 0.012)]
    p, q = (judge.probability(point, b) for b in bounds)
    assert judge.all_at_least(point, bounds) == pytest.approx(p + q - 1)


def test_which_of_two_is_truly_better():
    a, b = (make(n, {COST: v}, run_se={COST: 0.1}) for n, v in (("a", 1.0), ("b", 1.2)))
    judge = Judge([a, b])
    assert judge.better(a, b, COST) == pytest.approx(1 - judge.better(b, a, COST))
    assert judge.better(a, b, COST) > 0.5
    assert judge.better(a, make("c", {COST: 2.0}), COST) is None


# ---------------------------------------------------------------- headroom and confidence


def test_headroom_asks_for_a_margin():
    points = [make("tight", {COST: 1.0, TTFT: 460.0}), make("loose", {COST: 2.0, TTFT: 440.0})]
    sla = parse_sla("ttft_p99_ms<=500")
    assert pick(points, sla, minimize=COST).chosen.point_id == "tight"
    result = pick(points, sla, minimize=COST, demand=Demand(headroom=0.1))
    assert result.chosen.point_id == "loose"
    assert "1 point of 2 measured meet every bound with 10 % headroom" in result.text()
    assert "1 more point would meet the bounds as measured" in result.text()


@pytest.mark.parametrize(
    ("bound", "value", "meets"),
    [
        (Bound(TTFT, "<=", 500), 450.0, True),
        (Bound(TTFT, "<=", 500), 450.1, False),
        (Bound("goodput_rps", ">=", 10), 11.0, True),
        (Bound("goodput_rps", ">=", 10), 10.9, False),
        (Bound(TOP1, ">=", 0.98), 0.9821, True),  # a tenth of the two percent that may be lost
        (Bound(TOP1, ">=", 0.98), 0.9819, False),
        (Bound("kv_cache_usage_max", "<=", 0.9), 0.81, True),
        (Bound("kv_cache_usage_max", "<=", 0.9), 0.82, False),
        (Bound("requests_failed", "<=", 0), 0.0, True),
    ],
)
def test_headroom_of_a_tenth(bound, value, meets):
    assert Judge((), Demand(headroom=0.1)).meets(make("p", {bound.metric: value}), bound) is meets


def test_confidence_wants_evidence():
    points = [
        make("near", {COST: 1.0, TTFT: 470.0}),
        repeated("shaky", 2.0, [380.0, 480.0, 580.0]),
        make("far", {COST: 3.0, TTFT: 300.0}),
    ]
    sla = parse_sla("ttft_p99_ms<=500")
    assert pick(points, sla, minimize=COST).chosen.point_id == "near"
    sure = pick(points, sla, minimize=COST, demand=Demand(confidence=0.9))
    assert sure.chosen.point_id == "far", "measured once, and as uncertain as the study's repeats are"
    assert sure.bounds[0].probability > 0.9 and sure.bounds[0].evidence == "from the spread of other points' repeats"
    assert "2 more points would meet the bounds as measured, but not with confidence 0.9" in " ".join(sure.why)


@given(
    st.lists(st.floats(100, 900), min_size=2, max_size=6),
    st.floats(100, 900),
    st.sampled_from([0.5, 0.8, 0.9, 0.99]),
)
def test_confidence_and_probability_agree(ttfts, limit, confidence):
    point, bound = repeated("p", 1.0, ttfts), Bound(TTFT, "<=", limit)
    judge = Judge([point], Demand(confidence=confidence))
    p = judge.probability(point, bound)
    if abs(p - confidence) > 1e-6:
        assert judge.meets(point, bound) == (p > confidence)


def test_no_point_sure_enough_says_how_many_could_not_be_judged():
    points = [make("once", {COST: 1.0, KL: 0.01}), make("shaky", {COST: 2.0, KL: 0.019}, quality_se={KL: 0.004})]
    result = pick(points, parse_sla("quality_kl<=0.02"), minimize=COST, demand=Demand(confidence=0.9))
    assert not result.feasible
    assert [p.point_id for p in result.unsure] == ["once", "shaky"]
    assert result.nearest.point_id == "shaky"
    text = result.text()
    assert "none meets quality_kl<=0.02 with confidence 0.9" in text
    assert "2 points would as measured" in text
    assert f"1 point could not be judged: {NO_SPREAD}" in text
    assert "holds with probability 0.599" in text


def test_nothing_was_repeated_and_confidence_is_asked():
    points = [make("near", {COST: 2.0, TTFT: 510.0}), make("good", {COST: 1.0, TTFT: 300.0})]
    result = pick(points, parse_sla("ttft_p99_ms<=500"), minimize=COST, demand=Demand(confidence=0.9))
    assert not result.feasible
    assert result.nearest.point_id == "good", "the measured values still tell points apart"
    assert result.relaxations == result.joint_relaxation == ()
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize("demand", [{"headroom": 1.0}, {"headroom": -0.1}, {"confidence": 0.3}, {"confidence": 1.0}])
def test_demands_that_make_no_sense(demand):
    with pytest.raises(SlaError, match="is not from"):
        Demand(**demand)


def test_json_carries_the_demand_and_the_probability():
    result = pick([repeated("p", 1.0, [480.0, 490.0, 500.0])], parse_sla("ttft_p99_ms<=600"), minimize=COST,
                  demand=Demand(0.1, 0.9))  # fmt: skip
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (data["headroom"], data["confidence"]) == (0.1, 0.9)
    assert data["bounds"][0]["probability"] == result.bounds[0].probability


# ---------------------------------------------------------------- the smallest relaxation

POINTS = [
    make("fast", {COST: 3.0, TTFT: 400.0, KL: 0.05}),
    make("exact", {COST: 2.0, TTFT: 900.0, KL: 0.001}),
    make("middle", {COST: 1.0, TTFT: 512.345, KL: 0.0212}),
]


def test_each_bound_alone_and_all_together():
    result = pick(POINTS, parse_sla("ttft_p99_ms<=450 quality_kl<=0.02"), minimize=COST)
    assert [(str(r.bound), str(r.to), r.point.point_id) for r in result.relaxations] == [
        ("ttft_p99_ms<=450", "ttft_p99_ms<=900", "exact"),
        ("quality_kl<=0.02", "quality_kl<=0.05", "fast"),
    ]
    assert [str(r.to) for r in result.joint_relaxation] == ["ttft_p99_ms<=512.4", "quality_kl<=0.0212"]
    assert result.nearest.point_id == "middle"
    text = result.text()
    assert "ttft_p99_ms<=450 -> ttft_p99_ms<=900 (100 % looser)" in text
    assert "together: ttft_p99_ms<=512.4 quality_kl<=0.0212 (at most 14 % looser)" in text


def test_one_bound_may_not_be_enough():
    result = pick(POINTS, parse_sla("ttft_p99_ms<=100 quality_kl<=0.0001"), minimize=COST)
    assert result.relaxations == ()
    assert len(result.joint_relaxation) == 2
    assert result.text().count("loosening it alone is not enough") == 2


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(10, 1000), st.floats(0.5, 1)), min_size=1, max_size=20),
    st.floats(10, 1000),
    st.floats(0.5, 1),
    st.sampled_from([0.0, 0.1]),
)
def test_every_relaxation_named_is_enough_and_none_smaller_is(rows, ttft, top1, headroom):
    points = [make(f"p{i}", {COST: c, TTFT: t, TOP1: a}) for i, (c, t, a) in enumerate(rows)]
    sla = Sla((Bound(TTFT, "<=", ttft), Bound(TOP1, ">=", top1)))
    demand = Demand(headroom)
    result = pick(points, sla, minimize=COST, demand=demand)
    if result.feasible:
        return

    def with_bounds(changes: dict[str, Bound]) -> bool:
        bounds = tuple(changes.get(b.metric, b) for b in sla.bounds)
        return pick(points, Sla(bounds), minimize=COST, demand=demand).feasible

    assert with_bounds({r.bound.metric: r.to for r in result.joint_relaxation})
    for r in result.relaxations:
        assert with_bounds({r.bound.metric: r.to})
        step = get_metric(r.bound.metric).sign * 2e-3 * abs(r.to.value)  # beyond the rounding to four digits
        assert not with_bounds({r.bound.metric: Bound(r.to.metric, r.to.op, r.to.value - step)})
