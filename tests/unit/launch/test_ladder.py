"""Which load comes next on a server that is up, and when a configuration is given up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.launch.ladder import (
    HOPELESS_LOADS,
    LadderRules,
    Limit,
    LoadPoint,
    Rival,
    busiest_first,
    cut_records,
    hopeless,
    next_load,
)
from sweep.launch.spec import LaunchSpec
from sweep.measure.workload import Load
from sweep.results.metrics import get_metric

LADDER = tuple(Load(c) for c in (256, 64, 16, 4, 1))
OBJECTIVES = ("cost_usd_per_mtok", "ttft_p99_ms")
NOISE = dict.fromkeys(OBJECTIVES, (0.02, 4))
SLOW_START = Limit("ttft_p99_ms", 200.0)


def level(load: Load) -> float:
    return float(load.concurrency or load.request_rate_rps or 0.0)


def server(most: float, slow: float = 1.0):
    """Throughput saturates at `most` requests in flight; latency grows from there."""

    def measure(load: Load) -> LoadPoint:
        busy = level(load)
        tokens = 50.0 * min(busy, most)
        return LoadPoint(
            load,
            metrics={
                "output_throughput_tok_s": tokens,
                "ttft_p99_ms": slow * (50.0 + 20.0 * max(0.0, busy - most)),
                "cost_usd_per_mtok": 100.0 * slow / tokens,
            },
        )

    return measure


def rivals(*rows: tuple[float, float], error: float = 0.0) -> LadderRules:
    """Rules of a cut at 95 % over known points of (cost, TTFT), each with this relative error."""
    found = [dict(zip(OBJECTIVES, row, strict=True)) for row in rows]
    known = (Rival(f"rival{i}", row, {n: error * v for n, v in row.items()}) for i, row in enumerate(found))
    return LadderRules(confidence=0.95, objectives=OBJECTIVES, rivals=tuple(known), spreads=NOISE)


def walk(measure, rules: LadderRules, asked=LADDER, grid=LADDER) -> list[LoadPoint]:
    points: list[LoadPoint] = []
    while (load := next_load(points, asked, rules, grid)) is not None:
        points.append(measure(load))
    return points


def spec(**changes) -> LaunchSpec:
    made = LaunchSpec(
        launch_id="0001-abc", study_dir="/none", purpose="trial", attempt=0, params={"k": 1},
        engine={"model": "m", "args": {}, "env": {}}, loads=tuple(x.to_dict() for x in LADDER), repeat=0,
        python="python", startup_timeout_s=1.0, stop_timeout_s=1.0, workload={}, quality={},
        quality_runs=(), proof={}, devices=1, device_name="d", niceness=0, price_usd_per_device_hour=1.0,
    )  # fmt: skip
    return replace(made, **changes)


# ------------------------------------------------------------ levels


def test_without_rules_every_load_is_measured_and_no_other() -> None:
    assert [p.load for p in walk(server(32), LadderRules())] == list(LADDER)


@given(st.integers(2, 250), st.integers(3, 6))
def test_the_highest_load_within_the_bound_is_bracketed_closely(most: int, extra: int) -> None:
    points = walk(server(most), LadderRules(extra=extra, limits=(SLOW_START,)))
    met = [level(p.load) for p in points if SLOW_START.met(p)]
    missed = [level(p.load) for p in points if not SLOW_START.met(p)]
    assert len(points) <= len(LADDER) + extra
    assert max(met) <= most + 7.5
    assert not missed or min(missed) / max(met) < 1.5 or min(missed) - max(met) < 2  # a factor of 4, halved thrice


def test_the_busiest_load_that_keeps_the_bound_counts_even_where_a_lighter_one_missed_it() -> None:
    def measure(load: Load) -> LoadPoint:
        bad = level(load) in (4, 256) or level(load) > 100
        return LoadPoint(load, metrics={"ttft_p99_ms": 900.0 if bad else 100.0})

    points = walk(measure, LadderRules(extra=3, limits=(SLOW_START,)))
    assert all(64 < level(p.load) < 256 for p in points[len(LADDER) :])


def test_the_knee_is_placed_between_two_levels() -> None:
    extra = walk(server(32), LadderRules(extra=9))[len(LADDER) :]
    assert [level(p.load) for p in extra] == [32.0] or all(16 < level(p.load) < 256 for p in extra)
    assert extra and len(extra) < 9


def test_a_level_of_the_studys_ladder_comes_before_a_middle_of_our_own() -> None:
    asked = (LADDER[0], LADDER[-1])
    rules = LadderRules(extra=2, limits=(SLOW_START,))
    assert [p.load.concurrency for p in walk(server(80), rules, asked)] == [256, 1, 16, 64]


def test_middles_are_the_same_for_every_configuration() -> None:
    rules = LadderRules(extra=1, limits=(SLOW_START,))
    assert {walk(server(most), rules)[-1].load.label for most in (60, 90, 200)} == {"c128"}


def test_open_loops_are_bisected_in_requests_per_second_apart_from_closed_ones() -> None:
    ladder = (Load(16), Load(1), Load(None, 8.0), Load(None, 1.0))
    points = walk(server(3.0), LadderRules(extra=6, limits=(Limit("ttft_p99_ms", 100.0),)), ladder, ladder)
    extra = [p.load for p in points[4:]]
    assert {x.concurrency is None for x in extra} == {True, False}
    assert all(x.request_rate_rps is None or 1.0 < x.request_rate_rps < 8.0 for x in extra)


def test_nothing_lies_between_replays_of_a_trace() -> None:
    ladder = (Load(None, 8.0, rate_scale=2.0), Load(None, 4.0, rate_scale=1.0))
    assert len(walk(server(5.0), LadderRules(extra=4, limits=(Limit("ttft_p99_ms", 60.0),)), ladder, ladder)) == 2


def test_a_quarantined_level_or_one_without_the_metric_is_not_asked_again_and_says_nothing() -> None:
    def measure(load: Load) -> LoadPoint:
        point = server(70)(load)
        return replace(point, state="quarantined") if load.label == "c128" else point

    points = walk(measure, LadderRules(extra=4, limits=(SLOW_START,)))
    assert [p.load.label for p in points].count("c128") == 1

    def mute(load: Load) -> LoadPoint:
        return LoadPoint(load, metrics={"ttft_p99_ms": None})

    assert len(walk(mute, LadderRules(extra=4, limits=(SLOW_START,)))) == len(LADDER)


def test_what_an_earlier_launch_measured_is_not_measured_again() -> None:
    whole = walk(server(90), LadderRules(extra=4, limits=(SLOW_START,)))
    rules = LadderRules(extra=4, limits=(SLOW_START,), known=tuple(whole[:6]))
    rest = walk(server(90), rules, asked=())
    assert [p.load for p in rest] == [p.load for p in whole[6:]]


# ------------------------------------------------------------ giving up


def test_a_hopeless_configuration_is_cut_after_two_loads_with_the_reason_on_record() -> None:
    rules = rivals((0.001, 10.0))
    points = walk(server(32, slow=3.0), rules)
    assert len(points) == HOPELESS_LOADS
    records = cut_records(spec(), points, rules, "2026-01-01T00:00:00+00:00")
    assert [(r.load_label, r.state, r.cause) for r in records] == [(x, "cut", "dominated") for x in ("c16", "c4", "c1")]
    assert not any(r.metrics or r.transient for r in records)
    assert records[0].detail == ("every busier load is dominated at 95% confidence (c256 by rival0, c64 by rival0)")
    evidence = records[0].proof["cut"]
    assert evidence["confidence"] == 0.95 and [x["load"] for x in evidence["dominated"]] == ["c256", "c64"]


def test_one_load_that_nobody_dominates_keeps_the_configuration() -> None:
    busiest = server(32)(LADDER[0]).metrics
    rules = rivals((float(busiest["cost_usd_per_mtok"] or 0) * 0.5, 1000.0))  # c64 has 690 ms
    points = walk(server(32), rules)
    assert len(points) == len(LADDER)
    assert not cut_records(spec(), points, rules, "")


def test_what_may_still_win_within_its_errors_goes_on() -> None:
    measured = server(32)(LADDER[0])
    row = tuple(0.95 * float(measured.metrics[n] or 0) for n in OBJECTIVES)
    exact = rivals(row)  # type: ignore[arg-type]
    sure = replace(exact, spreads=dict.fromkeys(OBJECTIVES, (0.005, 4)))
    two = [measured, replace(measured, load=LADDER[1])]
    assert hopeless(two, sure)
    assert not hopeless(two, exact)  # 5 % is within 2.8 standard errors of 2 %
    wide = [replace(p, run_se={n: 0.1 * float(p.metrics[n] or 0) for n in OBJECTIVES}) for p in two]
    assert not hopeless(wide, sure)
    assert not hopeless(two, replace(sure, rivals=rivals(row, error=0.1).rivals))  # type: ignore[arg-type]


@given(st.floats(0.51, 0.99), st.floats(0.51, 0.99), st.floats(1.0, 3.0))
def test_more_confidence_never_cuts_more(one: float, other: float, slow: float) -> None:
    points = [server(32, slow)(load) for load in LADDER[:2]]
    low, high = (
        hopeless(points, replace(rivals((0.05, 40.0), error=0.02), confidence=c)) for c in sorted((one, other))
    )
    assert low or not high


def test_without_a_known_spread_nothing_is_cut() -> None:
    rules = replace(rivals((0.001, 10.0)), spreads={"ttft_p99_ms": (0.02, 4)})
    assert len(walk(server(32, slow=3.0), rules)) == len(LADDER)


def test_a_failed_load_is_no_evidence_against_lighter_ones() -> None:
    rules = rivals((0.001, 10.0))

    def measure(load: Load) -> LoadPoint:
        return LoadPoint(load, "failed") if level(load) > 16 else server(32)(load)

    assert [p.load.label for p in walk(measure, rules)] == ["c256", "c64", "c16", "c4"]


def test_the_quality_of_the_same_numerics_is_a_tie_and_unknown_quality_a_hope() -> None:
    objectives = (*OBJECTIVES, "quality_kl")
    base = replace(rivals((0.001, 10.0)), objectives=objectives)
    (rival,) = base.rivals
    better = replace(rival, values={**rival.values, "quality_kl": 0.001}, errors={**rival.errors, "quality_kl": 0.0001})
    points = [server(32)(load) for load in LADDER[:2]]
    unknown = replace(base, rivals=(better,))
    assert not hopeless(points, unknown)
    assert hopeless(points, replace(base, rivals=(replace(better, tied=("quality_kl",)),)))
    assert hopeless(points, replace(unknown, quality={"quality_kl": (0.01, 0.001)}))
    assert not hopeless(points, replace(unknown, quality={"quality_kl": (0.0011, 0.001)}))
    assert not hopeless(
        points, replace(unknown, objectives=("quality_kl",), rivals=(replace(better, tied=("quality_kl",)),))
    )


def test_higher_is_better_where_the_metric_says_so() -> None:
    assert get_metric("output_throughput_tok_s").sign < 0
    rules = LadderRules(
        confidence=0.95, objectives=("output_throughput_tok_s",), spreads={"output_throughput_tok_s": (0.02, 4)},
        rivals=(Rival("r", {"output_throughput_tok_s": 1e6}, {"output_throughput_tok_s": 0.0}),),
    )  # fmt: skip
    points = [server(32)(load) for load in LADDER[:2]]
    assert hopeless(points, rules)
    worse = Rival("r", {"output_throughput_tok_s": 1.0}, {"output_throughput_tok_s": 0.0})
    assert not hopeless(points, replace(rules, rivals=(worse,)))


def test_no_level_is_placed_between_two_dominated_loads() -> None:
    rules = replace(rivals((0.001, 10.0)), extra=4, limits=(SLOW_START,))
    assert [p.load for p in walk(server(32), rules, LADDER[-1:])] == [LADDER[-1]]
    known = tuple(server(32)(load) for load in LADDER)
    assert next_load([], [], replace(rules, known=known), LADDER) is None
    assert next_load([], [], replace(rules, known=known, rivals=()), LADDER) is not None


# ------------------------------------------------------------ on paper


def test_rules_survive_the_launchs_spec() -> None:
    rules = replace(
        rivals((0.1, 10.0)), extra=2, limits=(SLOW_START,), known=(server(32)(Load(None, 2.5, 0.25)),),
        quality={"quality_kl": (0.01, 0.001)},
    )  # fmt: skip
    read = LadderRules.of(spec(ladder=json.loads(json.dumps(asdict(rules)))))
    points = [server(32, 3.0)(load) for load in LADDER[:2]]
    assert json.dumps(asdict(read)) == json.dumps(asdict(rules))
    assert hopeless(points, replace(read, known=()))
    assert LadderRules.of(spec()) == LadderRules()


def test_numerics_of_its_own_are_compared_with_nobody() -> None:
    ladder = asdict(rivals((0.1, 10.0)))
    assert not LadderRules.of(spec(ladder=ladder, distinct_numerics=True)).rivals


@pytest.mark.parametrize("seed", range(3))
def test_loads_are_sorted_as_a_ladder_is(seed: int) -> None:
    import random

    ladder = [Load(64), Load(8), Load(None, 4.0), Load(None, 1.0), Load(None, 8.0, rate_scale=2.0)]
    shuffled = random.Random(seed).sample(ladder, len(ladder))
    assert list(busiest_first(shuffled)) == ladder
