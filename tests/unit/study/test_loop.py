"""The study loop over scripted launches: what is launched, recorded, told and repeated, and that it always ends."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_launches import (
    Event,
    Session,
    dies_at_first_load,
    dies_at_startup,
    ended,
    engine_text,
    good,
    labels,
    make_config,
    point,
    press_ctrl_c,
    vanishes,
)
from optuna.trial import TrialState

from sweep.config import ParamConfig
from sweep.engine.failures import FailureCause
from sweep.errors import ConfigError
from sweep.launch.spec import LaunchSpec, devices_needed
from sweep.results.records import LaunchRecord, PointRecord, RecordStore
from sweep.study import loop as loop_module
from sweep.study import proposals as proposals_module
from sweep.study.proposals import MAX_FRUITLESS_ASKS

LADDER = ("c8", "c2", "c1")
SETTLED = "every configuration of the space is settled"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)
    monkeypatch.setattr(proposals_module, "GRID_BLOCK", 1)  # scripts count on a grid's declared order


def told(session: Session) -> Counter[tuple[Any, str, TrialState]]:
    """How often Optuna was told of (max_num_seqs, load) and with which state."""
    return Counter((t.params["max_num_seqs"], t.params["load"], t.state) for t in session.study.trials)


def launches(session: Session) -> list[LaunchRecord]:
    return [r for r in session.loop.ledger.records if isinstance(r, LaunchRecord)]


# ---------------------------------------------------------------- the ordinary course


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsga2", "grid"])
def test_a_finite_space_is_measured_once_baseline_first_and_the_whole_ladder_is_told(
    tmp_path: Path, sampler: str
) -> None:
    session = Session(make_config(tmp_path, sampler=sampler), good)
    assert session.run() == SETTLED
    assert session.launched()[0] == ("defaults", LADDER)
    assert sorted(session.launched()) == [("defaults", LADDER), ("max_num_seqs=4", LADDER), ("max_num_seqs=8", LADDER)]
    assert [s.purpose for s in session.specs] == ["baseline", "trial", "trial"]
    assert len(session.points("measured")) == 9
    complete = {key[:2] for key in told(session) if key[2] is TrialState.COMPLETE}
    assert complete == {(seqs, load) for seqs in (None, 4, 8) for load in LADDER}
    assert TrialState.RUNNING not in {key[2] for key in told(session)}


def test_grid_walks_the_space_in_random_order_and_tells_every_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposals_module, "GRID_BLOCK", 100)
    params = {"max_num_seqs": ParamConfig(choices=[8, None, 4]), "seed": ParamConfig(choices=[2, None])}
    declared = ["max_num_seqs=8 seed=2", "max_num_seqs=8", "seed=2", "max_num_seqs=4 seed=2", "max_num_seqs=4"]
    orders = []
    for seed in (0, 0, 1, 2):
        config = make_config(tmp_path / str(len(orders)), params=params, sampler="grid")
        config.sampler.seed = seed
        session = Session(config, good)
        assert session.run() == SETTLED
        baseline, *others = [text for text, _ in session.launched()]
        assert baseline == "defaults" and sorted(others) == sorted(declared)
        orders.append(others)
    assert orders[0] == orders[1] and declared not in (orders[0], orders[2], orders[3])
    points = Counter((t.params["max_num_seqs"], t.params["seed"], t.params["load"]) for t in session.study.trials)
    assert set(points.values()) == {1} and len(points) == 18


def test_a_config_that_leaves_out_what_the_baseline_sets_is_not_called_the_defaults(tmp_path: Path) -> None:
    config = make_config(tmp_path, engine_args={"enforce_eager": True})
    session = Session(config, good)
    session.run()
    loop = session.loop
    assert loop.describe(loop.reference.to_dict()) == "vLLM's defaults"
    assert loop.describe({"model": "org/m", "args": {}, "env": {}}) == "enforce_eager=default"


def test_facts_of_a_launch_reach_study_json(tmp_path: Path) -> None:
    session = Session(make_config(tmp_path, trials=3), good)
    session.run()
    assert '"workload_checksum": "abc"' in (session.folder / "study.json").read_text()


def test_an_exhausted_space_is_not_asked_again_while_launches_run(tmp_path: Path) -> None:
    session = Session(make_config(tmp_path, devices=8), lambda spec: good(spec, ticks=100))
    assert session.run() == SETTLED
    assert len(session.study.trials) <= 9 + MAX_FRUITLESS_ASKS


# ---------------------------------------------------------------- failures


def test_an_infeasible_configuration_is_told_and_never_repeated(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        bad = "max_num_seqs=4" in engine_text(spec)
        return dies_at_startup(spec, FailureCause.out_of_memory) if bad else good(spec)

    session = Session(make_config(tmp_path), script)
    assert session.run() == SETTLED
    assert Counter(text for text, _ in session.launched()) == {"defaults": 1, "max_num_seqs=4": 1, "max_num_seqs=8": 1}
    assert {(p.load_label, p.cause) for p in session.points("failed")} == {(x, "out_of_memory") for x in LADDER}
    bad = [t for t in session.study.trials if t.params["max_num_seqs"] == 4]
    assert {t.params["load"] for t in bad} == set(LADDER)
    assert all(t.state is TrialState.PRUNED and t.constraints["runs"] > 0 and t.values is None for t in bad)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_transient_failure_is_repeated_exactly_retries_times(tmp_path: Path, retries: int) -> None:
    config = make_config(tmp_path, params={}, retries=retries)
    session = Session(config, lambda spec: dies_at_startup(spec, FailureCause.startup_timeout))
    assert session.run() == SETTLED
    assert [s.attempt for s in session.specs] == list(range(retries + 1))
    assert all(tuple(labels(s)) == LADDER for s in session.specs)
    assert Counter(p.load_label for p in session.points("failed")) == dict.fromkeys(LADDER, retries + 1)
    assert {t.state for t in session.study.trials} == {TrialState.FAIL}


def test_a_retry_that_works_is_told_as_measured_under_the_trial_that_asked(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return good(spec) if spec.attempt else dies_at_startup(spec, FailureCause.startup_timeout)

    session = Session(make_config(tmp_path, trials=9), script)
    assert session.run() == "budget.trials=9 reached"
    assert len(session.points("measured")) == 9 and len(session.points("failed")) == 9
    assert {key[2] for key in told(session)} == {TrialState.COMPLETE}
    assert set(told(session).values()) == {1}


def test_an_engine_that_dies_at_the_busiest_load_is_launched_again_for_the_others_only(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return dies_at_first_load(spec, FailureCause.engine_died) if spec.attempt == 0 else good(spec)

    session = Session(make_config(tmp_path, params={}, sampler="grid"), script)
    assert session.run() == SETTLED
    assert [load for _, load in session.launched()] == [LADDER, ("c2", "c1")]
    assert [(p.load_label, p.state) for p in session.points()] == [
        ("c8", "failed"),
        ("c2", "measured"),
        ("c1", "measured"),
    ]
    assert Counter(t.params["load"] for t in session.study.trials) == dict.fromkeys(LADDER, 1)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_worker_that_vanishes_counts_as_a_transient_failure(tmp_path: Path, after: int) -> None:
    session = Session(make_config(tmp_path, params={}), lambda spec: vanishes(spec, after))
    assert session.run() == SETTLED
    assert {(r.state, r.cause, r.transient) for r in launches(session)} == {("failed", "unknown", True)}
    assert all("launch process died" in (p.detail or "") for p in session.points("failed"))
    assert {p.load_label for p in session.points()} == set(LADDER)
    assert len(session.points("measured")) == {0: 0, 1: 2, 2: 3}[after]


def test_a_launch_that_ends_without_a_word_on_its_loads_is_not_repeated_for_ever(tmp_path: Path) -> None:
    """For example when somebody else ends every worker."""

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        yield [ended(spec, FailureCause.interrupted)]

    session = Session(make_config(tmp_path, params={}), script)
    assert session.run() == SETTLED
    assert len(session.specs) == 2
    assert Counter((p.cause, p.state) for p in session.points()) == {("interrupted", "failed"): 6}


def test_a_mistake_that_shows_in_a_launch_ends_the_sweep_with_its_message(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        yield [{"event": "phase", "phase": "preparing requests"}]
        if spec.purpose == "baseline":
            yield [{"event": "mistake", "message": "the corpus is too short", "hint": "ask for less"}]
        yield from good(spec, ticks=1000)

    session = Session(make_config(tmp_path, devices=2), script)
    with pytest.raises(ConfigError, match="the corpus is too short") as error:
        session.run()
    assert error.value.hint == "ask for less"
    assert len(session.executor.jobs) == 2 and not any(job.running for job in session.executor.jobs)


# ---------------------------------------------------------------- budgets


def test_a_budget_of_trials_cuts_the_last_ladder(tmp_path: Path) -> None:
    session = Session(make_config(tmp_path, trials=4), good)
    assert session.run() == "budget.trials=4 reached"
    assert [load for _, load in session.launched()] == [LADDER, ("c8",)]
    assert len(session.points("measured")) == 4


def test_launches_side_by_side_do_not_overspend_the_trials(tmp_path: Path) -> None:
    params = {"max_num_seqs": ParamConfig(choices=[None, *range(2, 40)])}
    session = Session(make_config(tmp_path, params=params, devices=8, trials=10), lambda s: good(s, ticks=9))
    assert session.run() == "budget.trials=10 reached"
    assert sorted(len(load) for _, load in session.launched()) == [1, 3, 3, 3]


def test_a_transient_failure_in_the_last_launch_of_a_budget_is_still_repeated(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return good(spec) if spec.attempt else dies_at_startup(spec, FailureCause.port_in_use)

    session = Session(make_config(tmp_path, trials=3), script)
    assert session.run() == "budget.trials=3 reached"
    assert len(session.points("measured")) == 3


@pytest.mark.parametrize("budget", [{"hours": 0.5}, {"usd": 1.0}])
def test_a_launch_that_cannot_finish_in_the_hours_or_money_left_is_not_begun(
    tmp_path: Path, budget: dict[str, float]
) -> None:
    """The first launch shows that they take an hour; at 2 USD per hour 1 USD is half an hour."""
    session = Session(make_config(tmp_path, **budget), lambda spec: good(spec, duration_s=3600.0))
    ((name, amount),) = budget.items()
    assert session.run() == f"budget.{name}={amount} reached: no time for another launch of 60.0 min"
    assert session.launched() == [("defaults", LADDER)]


def test_hours_of_earlier_sessions_count_also_of_one_that_was_killed(tmp_path: Path) -> None:
    config = make_config(tmp_path, trials=3)
    Session(config, good).run()
    later = Session(replace(config, budget=replace(config.budget, trials=6)), good)
    later.run()
    assert later.loop.budget.hours_before == pytest.approx(30 / 3600)


# ---------------------------------------------------------------- devices


def wide_or_narrow(order: str) -> dict[str, ParamConfig]:
    """One configuration for each letter, in order: w needs all eight devices, n one."""
    bundles = {
        f"{i}{kind}": {"seed": i + 1, **({"tensor_parallel_size": 8} if kind == "w" else {})}
        for i, kind in enumerate(order)
    }
    return {"kind": ParamConfig(bundles=bundles)}


class WatchedSession(Session):
    """Checks after every look of the loop that no device idles while a queued launch fits and need not wait."""

    def run(self) -> str:
        original = loop_module.StudyLoop._fill
        self.longest_queue = 0

        def fill(loop: loop_module.StudyLoop) -> None:
            original(loop)
            self.longest_queue = max(self.longest_queue, len(loop.queue))
            head_waits = bool(loop.queue) and loop.queue[0].overtaken >= loop_module.MAX_OVERTAKEN
            fetching = any(active.phase == "starting" for active in loop.active) and not loop.ledger.launches
            if loop.stop_reason is None and not head_waits and not fetching:
                widths = [devices_needed(loop.config, work.engine) for work in loop.queue]
                assert not any(loop.executor.has_room(width) for width in widths)

        loop_module.StudyLoop._fill = fill  # type: ignore[method-assign]
        try:
            return super().run()
        finally:
            loop_module.StudyLoop._fill = original  # type: ignore[method-assign]


@pytest.mark.parametrize("order", ["nnwnnnnnnnnnnnn", "wnwnwn", "nnnnnnnnnnwnnnnnnnnnnnnw", "wwwwwwwwnnnn"])
def test_wide_and_narrow_launches_share_the_node_and_none_starves(tmp_path: Path, order: str) -> None:
    config = make_config(tmp_path, params=wide_or_narrow(order), devices=8, sampler="grid", loads=(1,))
    durations = iter([7, 3, 11, 5, 2, 13, 4] * 10)
    session = WatchedSession(config, lambda spec: good(spec, ticks=next(durations)))
    assert session.run() == SETTLED
    assert len(session.specs) == len(order) + 1  # and vLLM's defaults, which are no member
    started = [spec.params["kind"] for spec in session.specs if spec.params is not None]
    for place, kind in enumerate(started):
        number = int(kind[:-1])
        if kind.endswith("w"):  # it waits behind the wide ones before it, and each is overtaken only so often
            overtakers = [k for k in started[:place] if int(k[:-1]) > number]
            assert len(overtakers) <= loop_module.MAX_OVERTAKEN * order[: number + 1].count("w")
    assert session.longest_queue <= loop_module.MAX_WAITING


def test_side_by_side_launches_use_disjoint_devices_and_all_of_them(tmp_path: Path) -> None:
    config = make_config(tmp_path, params=wide_or_narrow("n" * 16), devices=8, sampler="grid", loads=(1,))
    in_use: list[set[int]] = []
    busiest = 0

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        nonlocal busiest
        mine = set(spec.device_ids)
        assert not any(mine & other for other in in_use)
        in_use.append(mine)
        busiest = max(busiest, sum(len(other) for other in in_use))
        yield from good(spec, ticks=5)
        in_use.remove(mine)

    assert Session(config, script).run() == SETTLED
    assert busiest == 8


def test_a_space_of_wide_configurations_is_not_asked_for_in_advance(tmp_path: Path) -> None:
    params = {
        "tensor_parallel_size": ParamConfig(choices=[8]),
        "max_num_seqs": ParamConfig(low=1, high=512),
    }
    config = make_config(tmp_path, params=params, devices=8, loads=(1,), trials=4, sampler="tpe")
    session = WatchedSession(config, lambda spec: good(spec, ticks=30))
    assert session.run() == "budget.trials=4 reached"
    assert session.longest_queue <= loop_module.MAX_WAITING
    assert len(session.study.trials) <= 4 + loop_module.MAX_WAITING
    assert TrialState.RUNNING not in {t.state for t in session.study.trials}


def test_what_engine_args_make_too_wide_for_the_node_is_never_launched(tmp_path: Path) -> None:
    params = {"tensor_parallel_size": ParamConfig(choices=[1, 2, 4])}
    config = make_config(tmp_path, params=params, devices=4, engine_args={"data_parallel_size": 2})
    session = Session(config, good)
    assert session.run() == SETTLED
    assert sorted(s.devices for s in session.specs) == [2, 4]
    rejected = [t for t in session.study.trials if "rejected" in t.user_attrs]
    assert all(t.user_attrs["rejected"] == "needs 8 devices, the node has 4" for t in rejected)


# ---------------------------------------------------------------- interrupts and resume


def interrupting(after: int) -> Any:
    """Ctrl-C once `after` points are measured, in the middle of the next load."""
    measured = 0

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        nonlocal measured
        for label in labels(spec):
            if measured == after:
                press_ctrl_c()
                yield from ([] for _ in range(100))
            measured += 1
            yield [point(spec, label)]
        yield [ended(spec)]

    return script


def all_measured(folder: Path) -> Counter[tuple[str, str]]:
    records = RecordStore(folder).read()
    return Counter(
        (r.config_hash, r.load_label) for r in records if isinstance(r, PointRecord) and r.state == "measured"
    )


@pytest.mark.parametrize("after", range(9))
def test_ctrl_c_anywhere_then_the_same_command_repeats_nothing_and_loses_nothing(tmp_path: Path, after: int) -> None:
    config = make_config(tmp_path)
    first = Session(config, interrupting(after))
    assert first.run().startswith("interrupted")
    assert not any(job.running for job in first.executor.jobs)
    assert sum(all_measured(first.folder).values()) == after
    second = Session(config, good)
    assert second.run() == SETTLED
    assert set(all_measured(second.folder).values()) == {1} and len(all_measured(second.folder)) == 9
    assert len({s.launch_id for s in [*first.specs, *second.specs]}) == len(first.specs) + len(second.specs)
    complete = {key[:2] for key in told(second) if key[2] is TrialState.COMPLETE}
    assert len(complete) == 9


def test_ctrl_c_while_a_launch_is_being_started_reaches_that_launch_too(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        press_ctrl_c()  # the job is not in the loop's list yet
        return good(spec, ticks=10_000)

    session = Session(make_config(tmp_path), script)
    assert session.run().startswith("interrupted")
    assert [job.cancelled for job in session.executor.jobs] == [True]


def test_a_larger_budget_continues_where_the_smaller_one_ended(tmp_path: Path) -> None:
    config = make_config(tmp_path, trials=4)
    Session(config, good).run()
    more = Session(make_config(tmp_path, trials=9), good)
    assert more.run() == "budget.trials=9 reached"
    assert more.launched()[0][1] == ("c2", "c1")
    assert set(all_measured(more.folder).values()) == {1} and len(all_measured(more.folder)) == 9


def test_a_finished_study_launches_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    Session(config, good).run()
    again = Session(config, good)
    assert again.run() == SETTLED and again.specs == []


def test_records_alone_are_enough_to_continue(tmp_path: Path) -> None:
    """Logs and raw data may be deleted to save space."""
    config = make_config(tmp_path, trials=4)
    first = Session(config, good)
    first.run()
    shutil.rmtree(first.folder / "launches")
    second = Session(make_config(tmp_path), good)
    assert second.run() == SETTLED
    assert set(all_measured(second.folder).values()) == {1} and len(all_measured(second.folder)) == 9
    assert not {s.launch_id for s in first.specs} & {s.launch_id for s in second.specs}


def test_the_next_session_suggests_from_what_this_one_recorded(tmp_path: Path) -> None:
    config = make_config(tmp_path, trials=6)
    first = Session(config, good)
    first.run()
    second = Session(config, good)
    second.run()
    values = [
        {(t.params["max_num_seqs"], t.params["load"], *t.values) for t in s.study.trials} for s in (first, second)
    ]
    assert values[0] == values[1] and len(values[1]) == 6
