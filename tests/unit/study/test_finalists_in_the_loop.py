"""After the budget, configs of the front are launched fresh on held-out requests: once, and never as trials."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_launches import Event, Script, Session, good, labels, make_config, point, press_ctrl_c, vanishes

from sweep.launch.spec import LaunchSpec
from sweep.measure.workload import HELD_OUT_DRAW
from sweep.results.records import PointRecord
from sweep.results.validation import validations
from sweep.study import loop as loop_module
from sweep.study.proposals import MAX_FRUITLESS_ASKS

SETTLED = "every configuration of the space is settled"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)


def session(tmp_path: Path, script: Script, finalists: int = 1, **budget: float) -> Session:
    config = make_config(tmp_path, **budget)
    config.validation.finalists = finalists
    return Session(config, script, limit=16)


def held_out(of: Session) -> list[PointRecord]:
    return [r for r in of.points() if r.purpose == "validation"]


def test_a_finalist_is_measured_again_on_other_requests_and_is_no_trial(tmp_path: Path) -> None:
    done = session(tmp_path, good)
    assert done.run() == SETTLED
    (last,) = [s for s in done.specs if s.purpose == "validation"]
    assert last is done.specs[-1] and last.repeat == HELD_OUT_DRAW and last.params is None
    front = [v.point for v in validations(done.loop.ledger.records, done.config.objectives.metrics)]
    assert {p.load_label for p in front} == set(labels(last)) and {p.config_hash for p in front} == {
        last.engine_config.hash
    }
    assert len(done.study.trials) <= 9 + MAX_FRUITLESS_ASKS
    assert len(done.loop.ledger.operating_points()) == 9


@pytest.mark.parametrize("finalists", [0, 1, 2, 9])
def test_no_more_finalists_than_asked_for_and_than_there_are(tmp_path: Path, finalists: int) -> None:
    """Load c1 has the lowest TTFT and c8 the highest throughput of vLLM's defaults: no other config is on the front."""
    done = session(tmp_path, good, finalists)
    assert done.run() == SETTLED
    assert len([s for s in done.specs if s.purpose == "validation"]) == min(finalists, 1)


def test_validation_comes_on_top_of_a_budget_of_trials(tmp_path: Path) -> None:
    done = session(tmp_path, good, trials=3)
    assert done.run() == "budget.trials=3 reached"
    assert [s.purpose for s in done.specs] == ["baseline", "validation"]


def test_a_validation_that_is_interrupted_is_continued_and_a_finished_one_is_not_repeated(tmp_path: Path) -> None:
    def interrupted(spec: LaunchSpec) -> Iterator[list[Event]]:
        if spec.purpose != "validation":
            yield from good(spec)
            return
        yield [point(spec, labels(spec)[0])]
        press_ctrl_c()
        yield []

    first = session(tmp_path, interrupted)
    assert first.run().startswith("interrupted")
    assert len(held_out(first)) == 1
    second = session(tmp_path, good)
    assert second.run() == SETTLED
    (again,) = second.specs
    assert set(labels(again)).isdisjoint({r.load_label for r in held_out(first)})
    third = session(tmp_path, good)
    assert third.run() == SETTLED and third.specs == []


def test_a_validation_whose_worker_dies_ends_and_leaves_the_front_as_it_is(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return vanishes(spec) if spec.purpose == "validation" else good(spec)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    assert len([s for s in done.specs if s.purpose == "validation"]) == 1 and held_out(done) == []
    assert {p.state for p in done.loop.ledger.operating_points()} == {"measured"}
