"""What a killed sweep left in launches/ is taken in exactly once, and the rest of it is work to do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fake_launches import Event, Session, ended, good, make_config, make_space, point

from sweep.engine.failures import FailureCause
from sweep.launch.spec import EVENTS_FILE, LAUNCHES_DIR, LaunchSpec, build_engine, make_spec
from sweep.results.records import LaunchRecord, PointRecord, RecordStore
from sweep.study import loop as loop_module
from sweep.study.ledger import Ledger
from sweep.study.proposals import load_ladder
from sweep.study.recover import read_specs, recover_records


def begun(storage: Path, launch_id: str = "0001-x") -> LaunchSpec:
    """The baseline, as the controller writes it down before it starts a worker."""
    config = make_config(storage)
    space = make_space(config)
    params, settings = space.baseline()
    spec = make_spec(
        config,
        storage / "s",
        launch_id=launch_id,
        engine=build_engine(config, settings),
        params=params,
        purpose="baseline",
        attempt=0,
        loads=load_ladder(config),
        repeat=0,
        quality_runs=(),
    ).on_devices((0,), {})
    spec.write()
    return spec


def write_events(spec: LaunchSpec, events: list[Event], torn: str = "") -> None:
    text = "".join(json.dumps(event) + "\n" for event in events)
    (spec.folder / EVENTS_FILE).write_text(text + torn)


def recovered(storage: Path) -> list[PointRecord | LaunchRecord]:
    """One recovery, made durable as the loop does it."""
    store = RecordStore(storage / "s")
    found = recover_records(storage / "s", Ledger(store.read(), ["ttft_p99_ms"], 1, False))
    for record in found:
        store.append(record)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("torn", ["", "{", '{"event": "record", "record": {"schema": 1, "kind": "poi'])
def test_finished_points_are_taken_in_once_and_the_launch_is_closed(tmp_path: Path, torn: str) -> None:
    spec = begun(tmp_path)
    write_events(spec, [{"event": "phase", "phase": "starting"}, point(spec, "c8"), point(spec, "c2")], torn)
    *points, launch = recovered(tmp_path)
    assert [(p.load_label, p.state) for p in points if isinstance(p, PointRecord)] == [
        ("c8", "measured"),
        ("c2", "measured"),
    ]
    assert isinstance(launch, LaunchRecord)
    assert (launch.launch_id, launch.state, launch.cause, launch.transient) == ("0001-x", "failed", "interrupted", True)
    assert launch.duration_s >= 0 and launch.device_ids == (0,)
    assert recovered(tmp_path) == []


def test_what_the_controller_had_recorded_already_is_not_taken_in_again(tmp_path: Path) -> None:
    """Killed between two events of one launch, or in the middle of a recovery."""
    spec = begun(tmp_path)
    write_events(spec, [point(spec, "c8"), point(spec, "c2"), ended(spec)])
    first, *rest = recovered(tmp_path)
    store = RecordStore(tmp_path / "s")
    store.path.unlink()
    store.append(first)
    assert recovered(tmp_path) == rest


def test_the_end_a_worker_wrote_itself_is_kept(tmp_path: Path) -> None:
    spec = begun(tmp_path)
    write_events(spec, [point(spec, "c8", FailureCause.engine_died), ended(spec, FailureCause.engine_died)])
    launch = recovered(tmp_path)[-1]
    assert (launch.cause, launch.detail) == ("engine_died", "scripted engine_died")


@pytest.mark.parametrize("events", [None, []])
def test_a_launch_that_never_got_to_say_anything_is_closed_too(tmp_path: Path, events: list[Event] | None) -> None:
    spec = begun(tmp_path)
    if events is not None:
        write_events(spec, events)
    (launch,) = recovered(tmp_path)
    assert launch.cause == "interrupted"


def test_a_folder_without_a_whole_spec_was_never_begun(tmp_path: Path) -> None:
    spec = begun(tmp_path)
    (spec.folder / "spec.json").rename(spec.folder / "spec.tmp")
    assert read_specs(tmp_path / "s") == [] and recovered(tmp_path) == []


def test_a_moved_study_is_recovered_where_it_is(tmp_path: Path) -> None:
    spec = begun(tmp_path / "old")
    write_events(spec, [point(spec, "c8")])
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert [type(r) for r in recovered(tmp_path / "new")] == [PointRecord, LaunchRecord]


def test_the_next_session_measures_the_remaining_loads_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)
    config = make_config(tmp_path, trials=3)
    first = Session(config, good)
    first.run()
    shutil.rmtree(first.folder / LAUNCHES_DIR)
    (first.folder / "records.jsonl").unlink()
    spec = begun(tmp_path)
    write_events(spec, [point(spec, "c8")], '{"event": "rec')
    session = Session(replace(config), good)
    assert session.run() == "budget.trials=3 reached"
    assert [(s.purpose, s.attempt) for s in session.specs] == [("baseline", 1)]
    assert session.launched() == [("defaults", ("c2", "c1"))]
    assert [p.load_label for p in session.points("measured")] == ["c8", "c2", "c1"]
    assert session.specs[0].launch_id.startswith("0002-")
    assert {t.params["load"] for t in session.study.trials} == {"c8", "c2", "c1"} and len(session.study.trials) == 3
