"""Levels beyond the ladder and loads that were cut, as the study loop sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_launches import OBJECTIVES, SEQS, Event, Session, ended, make_config, make_space, point, vanishes

import sweep
from sweep.config import LadderConfig, LoadsConfig, RepeatsConfig
from sweep.decide.plots.failures import failure_figure
from sweep.decide.report.summary import learned
from sweep.decide.sla import parse_sla
from sweep.decide.tables import front_text
from sweep.engine.failures import FailureCause
from sweep.launch.ladder import LadderRules, LoadPoint, cut_records, next_load
from sweep.launch.spec import LaunchSpec
from sweep.measure.workload import Load
from sweep.results.front import front, ineligible
from sweep.results.points import failures
from sweep.results.records import PointRecord, record_from_dict, to_dict
from sweep.study import loop as loop_module
from sweep.study.plan import make_plan
from sweep.study.revalidate import _add_levels
from sweep.study.tell import OptunaMirror

LADDER = (64, 4, 1)
GRID = tuple(Load(c) for c in LADDER)
# TTFT is 100 ms per request in flight over max_num_seqs (16 by default): see fake_launches.point.
BOUND = parse_sla("ttft_p99_ms<=150").bounds


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)


def point_at(spec: LaunchSpec, load: Load, cause: FailureCause | None = None) -> Event:
    """fake_launches.point, also at a load that the spec does not name."""
    return point(LaunchSpec(**{**spec.__dict__, "loads": (load.to_dict(),)}), load.label, cause)


def measured(spec: LaunchSpec, load: Load) -> Event:
    """As fake_launches.point, at any load, a little off with each launch; four at a time are hopeless."""
    event = point_at(spec, load)
    drift = 1.0 + 0.001 * int(spec.launch_id[:4])
    metrics = {name: value * drift for name, value in event["record"]["metrics"].items()}
    if spec.engine["args"].get("max_num_seqs") == 4:
        metrics["output_throughput_tok_s"] /= 10
    event["record"]["metrics"] = metrics
    return event


def walks(spec: LaunchSpec, dies_after: int | None = None) -> Iterator[list[Event]]:
    """A launch that goes by its rules as a real one does. dies_after: points, then the engine is lost."""
    rules, points = LadderRules.of(spec), list[LoadPoint]()
    asked = [Load.from_dict(load) for load in spec.loads]
    while (load := next_load(points, asked, rules, GRID)) is not None:
        if len(points) == dies_after:
            yield [ended(spec, FailureCause.device_lost)]
            return
        event = measured(spec, load)
        yield [event]
        record = record_from_dict(event["record"])
        assert isinstance(record, PointRecord)
        points.append(LoadPoint.of(record))
    cut = cut_records(spec, points, rules, "2026-01-01T00:00:00+00:00")
    yield [*({"event": "record", "record": to_dict(r)} for r in cut), ended(spec)]


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mirror has the bound, as `sweep run` gives it."""
    original = OptunaMirror.__init__

    def with_bound(self: OptunaMirror, *args: object) -> None:
        original(self, *args[:4], BOUND, *args[5:])  # type: ignore[arg-type]

    monkeypatch.setattr(OptunaMirror, "__init__", with_bound)


def session(home: Path, script=walks, *, ladder: LadderConfig, sampler: str = "grid", repeats: float = 0.0, **budget):
    config = make_config(home, params=SEQS, loads=LADDER, sampler=sampler, **budget)
    config.ladder, config.repeats = ladder, RepeatsConfig(share=repeats, control_every=1)
    return Session(config, script)


ADAPTIVE = LadderConfig(extra_levels=3)
CUTTING = LadderConfig(cut_confidence=0.9)


def by_config(done: Session) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for p in done.points():
        found.setdefault(str(p.engine["args"].get("max_num_seqs")), []).append(p.load_label)
    return found


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("sampler", ["grid", "random", "tpe", "nsga2", "sweep"])
def test_levels_are_points_that_every_sampler_and_a_second_session_live_with(tmp_path: Path, sampler: str) -> None:
    done = session(tmp_path, ladder=ADAPTIVE, sampler=sampler)
    done.run()
    assert by_config(done)["None"] == ["c64", "c4", "c1", "c16", "c32", "c23"]  # 24 in flight have 150 ms
    told = Counter(t.params["load"] for t in done.study.trials if t.values)
    assert set(told) == {"c64", "c4", "c1"}
    on_front = front(done.loop.ledger.operating_points(), done.config.objectives.metrics)
    assert {p.load_label for p in on_front} - {"c64", "c4", "c1"}
    again = session(tmp_path, ladder=ADAPTIVE, sampler=sampler)
    again.run()
    assert not again.specs


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("trials", [3, 4, 5, 7, 10])
def test_levels_count_as_trials_and_never_exceed_them(tmp_path: Path, trials: int) -> None:
    done = session(tmp_path, ladder=ADAPTIVE, trials=trials)
    assert done.run() == f"budget.trials={trials} reached"
    assert len(done.points()) == trials


@pytest.mark.usefixtures("bounded")
def test_levels_that_a_lost_launch_left_open_are_placed_by_the_next(tmp_path: Path) -> None:
    def first_is_lost(spec: LaunchSpec) -> Iterator[list[Event]]:
        return walks(spec, dies_after=4 if spec.launch_id.startswith("0001") else None)

    done = session(tmp_path, first_is_lost, ladder=ADAPTIVE)
    done.run()
    assert by_config(done)["None"] == ["c64", "c4", "c1", "c16", "c32", "c23"]
    second = next(s for s in done.specs if s.attempt == 1)
    assert [Load.from_dict(x).label for x in second.loads] == ["c32"]


@pytest.mark.usefixtures("bounded")
def test_an_engine_that_dies_at_a_level_is_not_started_again_to_look_for_the_edge(tmp_path: Path) -> None:
    def dies(spec: LaunchSpec) -> Iterator[list[Event]]:
        for events in walks(spec):
            if "record" in events[0] and events[0]["record"].get("load_label") == "c16":
                yield [point_at(spec, Load(16), FailureCause.engine_died), ended(spec, FailureCause.engine_died)]
                return
            yield events

    done = session(tmp_path, dies, ladder=ADAPTIVE)
    done.run()
    assert by_config(done)["None"] == ["c64", "c4", "c1", "c16"]
    assert max(Counter(s.engine_config.hash for s in done.specs).values()) == 1
    again = session(tmp_path, ladder=ADAPTIVE)
    again.run()
    assert not again.specs


@pytest.mark.usefixtures("bounded")
def test_a_second_session_places_what_an_interrupted_one_left_open(tmp_path: Path) -> None:
    def stopped(spec: LaunchSpec) -> Iterator[list[Event]]:
        for events, _ in zip(walks(spec), range(4), strict=False):
            yield events
        loop_module.signal.raise_signal(loop_module.signal.SIGINT)
        yield []

    first = session(tmp_path, stopped, ladder=ADAPTIVE)
    assert first.run().startswith("interrupted")
    assert by_config(first)["None"] == ["c64", "c4", "c1", "c16"]
    second = session(tmp_path, ladder=ADAPTIVE)
    second.run()
    assert by_config(second)["None"] == ["c64", "c4", "c1", "c16", "c32", "c23"]


@pytest.mark.usefixtures("bounded")
def test_the_levels_of_a_configuration_are_counted_over_its_launches(tmp_path: Path) -> None:
    def always_lost(spec: LaunchSpec) -> Iterator[list[Event]]:
        return walks(spec, dies_after=1) if spec.attempt else vanishes(spec, after=0)

    done = session(tmp_path, always_lost, ladder=LadderConfig(extra_levels=1))
    done.run()
    assert all(len({*labels} - {"c64", "c4", "c1"}) <= 1 for labels in by_config(done).values())


@pytest.mark.usefixtures("bounded")
def test_a_level_is_repeated_like_any_other_point(tmp_path: Path) -> None:
    done = session(tmp_path, ladder=ADAPTIVE, repeats=0.6)
    done.run()
    repeated = [p for p in done.points() if p.repeat and p.load_label not in ("c64", "c4", "c1")]
    assert repeated and all(s.ladder == {} for s in done.specs if s.repeat)
    points = {p.point_id: p for p in done.loop.ledger.operating_points()}
    assert any(p.n_repeats > 1 for p in points.values() if p.load_label not in ("c64", "c4", "c1"))


def test_cut_loads_cost_no_trial_are_on_record_and_stay_cut(tmp_path: Path) -> None:
    done = session(tmp_path, ladder=CUTTING, repeats=0.5)
    done.run()
    cut = done.points("cut")
    assert {(p.engine["args"].get("max_num_seqs"), p.load_label) for p in cut} == {(4, "c1")}
    assert all(p.cause == "dominated" for p in cut)
    ledger = done.loop.ledger
    assert ledger.settled_points == len({(p.config_hash, p.load_label) for p in done.points("measured")})
    outcome = ledger.outcome(cut[0].config_hash, "c1")
    assert outcome is not None and outcome.values is None and not outcome.infeasible
    study = sweep.open(done.folder)
    assert "cut       1 point not measured: every busier load is dominated" in front_text(study, OBJECTIVES)
    assert not failures(study.records), "it did not fail"
    assert "nothing failed" in str(failure_figure(study.operating_points).to_dict())
    assert "1 more were not measured" in learned(study, [], {})[0]
    (reason,) = (why for p, why in ineligible(study.operating_points, OBJECTIVES) if p.state == "cut")
    assert reason == "cut: dominated"
    again = session(tmp_path, ladder=CUTTING)
    again.run()
    assert not again.specs


def test_a_plan_says_what_launches_may_do_and_what_that_needs(tmp_path: Path) -> None:
    config = make_config(tmp_path, params=SEQS, loads=LADDER)
    assert "ladder  " not in make_plan(config, make_space(config), tmp_path).text()
    config.engine.kind, config.ladder = "simulated", LadderConfig(4, 0.95)
    text = make_plan(config, make_space(config), tmp_path).text()
    assert "up to 4 more levels where the bounds and the knee lie, lighter loads left out" in text
    assert "no bound to look for" in text and "nothing is cut" in text


def test_a_revalidation_measures_the_levels_of_the_old_front(tmp_path: Path) -> None:
    loads = LoadsConfig(concurrency=[64, 1], request_rate_rps=[2.0])
    placed = [{"concurrency": 23}, {"concurrency": 1}, {"request_rate_rps": 1.4, "burstiness": 1.0},
              {"request_rate_rps": 3.0, "rate_scale": 1.0}]  # fmt: skip
    _add_levels(loads, placed)
    assert (loads.concurrency, loads.request_rate_rps) == ([64, 1, 23], [2.0, 1.4])


def test_a_fixed_ladder_leaves_no_trace_in_the_specs(tmp_path: Path) -> None:
    done = session(tmp_path, ladder=LadderConfig())
    done.run()
    assert all(spec.ladder == {} for spec in done.specs)
    assert all(labels == ["c64", "c4", "c1"] for labels in by_config(done).values())
