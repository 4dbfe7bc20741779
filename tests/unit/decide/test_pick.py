"""The choice: feasible, infeasible, ties, what a bound costs, and mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.decide.pick import pick
from sweep.decide.sla import Sla, parse_sla
from sweep.errors import ConfigError, SlaError, StudyError
from sweep.results.points import OperatingPoint

COST, TTFT, KL = "cost_usd_per_mtok", "ttft_p99_ms", "quality_kl"


def make(name: str, metrics: dict[str, float], *, args: dict[str, Any] | None = None, **changes) -> OperatingPoint:
    config, _, label = name.partition("-")
    fields = {
        "point_id": name, "config_hash": config, "fingerprint": "f", "launch_id": "l",
        "engine": {"model": "m", "args": args or {}, "env": {}}, "load": {"concurrency": 8},
        "load_label": label or "c8", "params": None, "purpose": "trial", "devices": 1, "provenance": "measured",
        "state": "measured", "n_repeats": 1, "metrics": metrics,
    }  # fmt: skip
    return OperatingPoint(**(fields | changes))


POINTS = [
    make("default", {COST: 1.0, TTFT: 400.0, KL: 0.001}, purpose="baseline"),
    make("cheap", {COST: 0.5, TTFT: 900.0, KL: 0.001}, args={"max_num_seqs": 64}),
    make("int8", {COST: 0.6, TTFT: 450.0, KL: 0.006}, args={"quantization": "int8"}),
    make("fp8", {COST: 0.55, TTFT: 480.0, KL: 0.05}, args={"quantization": "fp8"}),
    make("broken", {}, state="failed", cause="out_of_memory"),
]


def test_the_cheapest_point_that_meets_every_bound():
    result = pick(POINTS, parse_sla("ttft_p99_ms<=500 quality_kl<=0.02"), minimize=COST)
    assert result.feasible
    assert result.chosen.point_id == "int8"
    assert result.runner_up.point_id == "default"
    assert result.n_feasible == 2
    assert "-40.0%" in " ".join(result.why)


def test_what_each_bound_costs():
    result = pick(POINTS, parse_sla("ttft_p99_ms<=500 quality_kl<=0.02"), minimize=COST)
    by_metric = {b.bound.metric: b.relaxed for b in result.bounds}
    assert by_metric[TTFT].point_id == "cheap", "without the latency bound: 0.5"
    assert by_metric[KL].point_id == "fp8", "without the quality bound: 0.55"
    text = result.text()
    assert "would lower cost_usd_per_mtok from 0.6 USD/Mtok to 0.5 USD/Mtok" in text
    assert "would lower cost_usd_per_mtok from 0.6 USD/Mtok to 0.55 USD/Mtok" in text


def test_a_bound_that_costs_nothing_is_said_to_cost_nothing():
    result = pick(POINTS, parse_sla("ttft_p99_ms<=1000 quality_kl<=0.02"), minimize=COST)
    assert result.chosen.point_id == "cheap"
    assert [b.relaxed for b in result.bounds] == [None, None]
    assert result.text().count("costs nothing") == 2


def test_ties_within_one_percent_prefer_fewer_overrides():
    near = [
        make("many", {COST: 1.000}, args={"a": 1, "b": 2, "c": 3}),
        make("few", {COST: 1.009}, args={"a": 1}),
        make("far", {COST: 1.02}),
    ]
    result = pick(near, Sla(), minimize=COST)
    assert result.chosen.point_id == "few"
    assert [p.point_id for p in result.ties] == ["many"]
    assert "1 setting of its own instead of 3" in " ".join(result.why)
    assert pick(near[::2], Sla(), minimize=COST).chosen.point_id == "many"


def test_ties_of_a_maximized_metric_are_measured_from_the_highest():
    near = [
        make("high", {"goodput_rps": 10.0}, args={"a": 1}),
        make("just", {"goodput_rps": 9.91}),
        make("not", {"goodput_rps": 9.8}),
    ]
    assert pick(near, Sla(), maximize="goodput_rps").chosen.point_id == "just"
    assert pick([near[0], near[2]], Sla(), maximize="goodput_rps").chosen.point_id == "high"


def test_a_bound_is_not_said_to_cost_what_only_the_tie_rule_gives_up():
    near = [make("many", {COST: 1.0, TTFT: 1.0}, args={"a": 1}), make("few", {COST: 1.005, TTFT: 1.0})]
    result = pick(near, parse_sla("ttft_p99_ms<=5"), minimize=COST)
    assert result.chosen.point_id == "few"
    assert result.bounds[0].relaxed is None


def test_the_runner_up_is_another_engine_config():
    loads = [make("a-c8", {COST: 1.0}), make("a-c4", {COST: 1.1}), make("b-c8", {COST: 2.0})]
    assert pick(loads, Sla(), minimize=COST).runner_up.point_id == "b-c8"
    assert pick(loads[:2], Sla(), minimize=COST).runner_up is None


def test_infeasible_names_the_nearest_point_and_each_miss():
    result = pick(POINTS, parse_sla("ttft_p99_ms<=300 quality_kl<=0.0005"), minimize=COST)
    assert not result.feasible
    # default misses 33 % and 100 %; int8 50 % and 1100 %; cheap 200 % and 100 %.
    assert result.nearest.point_id == "default"
    assert [m.relative for m in result.misses] == pytest.approx([1 / 3, 1.0])
    assert [m.best for m in result.misses] == [400.0, 0.001]
    assert "missed by 33 %" in result.text()
    assert not result.enough_to_drop


def test_infeasible_says_which_bound_alone_makes_it_so():
    result = pick(POINTS, parse_sla("ttft_p99_ms<=300 quality_kl<=0.02"), minimize=COST)
    assert [b.metric for b in result.enough_to_drop] == [TTFT]
    assert "Dropping one of these is enough: ttft_p99_ms<=300" in result.text()


def test_defaults_are_compared_honestly():
    only = [POINTS[0], make("worse", {COST: 1.5, TTFT: 100.0, KL: 0.001}, args={"a": 1})]
    assert "These are vLLM's defaults" in " ".join(pick(only, Sla(), minimize=COST).why)
    fast = pick(only, parse_sla("ttft_p99_ms<=200"), minimize=COST)
    assert "defaults do not meet the SLA" in " ".join(fast.why)
    assert "not measured in this study" in " ".join(pick(only[1:], Sla(), minimize=COST).why)


def test_points_without_a_bounded_metric_take_no_part_and_are_counted():
    points = [*POINTS, make("unknown", {COST: 0.1})]
    result = pick(points, parse_sla("ttft_p99_ms<=500"), minimize=COST)
    assert result.chosen.point_id == "fp8"
    assert "1 measured point took no part" in " ".join(result.why)


def test_a_metric_that_no_point_has_says_how_many_lack_it_and_what_to_do():
    with pytest.raises(SlaError) as error:
        pick(POINTS, parse_sla("itl_p99_ms<=50"), minimize=COST)
    assert "of 4 measured points, itl_p99_ms is missing in 4" in error.value.message
    assert "num_requests" in error.value.hint
    assert "p90" in error.value.hint


def test_nothing_measured_is_a_study_error():
    with pytest.raises(StudyError, match="no operating point"):
        pick(POINTS[-1:], Sla(), minimize=COST)


@pytest.mark.parametrize(
    ("target", "error", "match"),
    [
        ({}, SlaError, "one metric"),
        ({"minimize": COST, "maximize": "goodput_rps"}, SlaError, "one metric"),
        ({"maximize": COST}, SlaError, "use --minimize cost_usd_per_mtok"),
        ({"minimize": "goodput_rps"}, SlaError, "use --maximize goodput_rps"),
        ({"minimize": "cots_usd_per_mtok"}, ConfigError, "did you mean 'cost_usd_per_mtok'"),
    ],
)
def test_a_wrong_target_is_a_user_error(target, error, match):
    with pytest.raises(error, match=match):
        pick(POINTS, Sla(), **target)


@pytest.mark.parametrize("sla", ["ttft_p99_ms<=500 quality_kl<=0.02", "ttft_p99_ms<=1"])
def test_json_is_plain_and_complete(sla):
    result = pick(POINTS, parse_sla(sla), minimize=COST)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["feasible"] == result.feasible
    assert data["sla"] == sla
    if data["feasible"]:
        assert data["command"] == result.command
        assert data["bounds"][0]["target_without_it"] == 0.5


def test_the_command_is_the_engines_own():
    command = pick(POINTS, parse_sla("quality_kl<=0.02 ttft_p99_ms<=500"), minimize=COST).command
    assert command.startswith("vllm serve m")
    assert "--quantization int8" in command


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(10, 1000), st.integers(0, 3)), min_size=1, max_size=30),
    st.floats(10, 1000),
)
def test_pick_never_breaks_a_bound_and_stays_within_the_tie_margin(rows, limit):
    points = [
        make(f"p{i}", {COST: cost, TTFT: ttft}, args={f"a{k}": k for k in range(n)})
        for i, (cost, ttft, n) in enumerate(rows)
    ]
    result = pick(points, parse_sla(f"ttft_p99_ms<={limit!r}"), minimize=COST)
    feasible = [cost for cost, ttft, _ in rows if ttft <= limit]
    assert result.feasible == bool(feasible)
    if result.feasible:
        assert result.chosen.metrics[TTFT] <= limit
        assert min(feasible) <= result.chosen.metrics[COST] <= 1.01 * min(feasible) * (1 + 1e-12)
    else:
        assert result.nearest.metrics[TTFT] == min(ttft for _, ttft, _ in rows)
