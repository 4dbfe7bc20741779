"""The course of one launch: what is recorded, and what ends it, for every way a station can fail."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_launches import logprobs, make_config

from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.errors import ConfigError
from sweep.launch import launch as launch_module
from sweep.launch import quality as quality_module
from sweep.launch import worker as worker_module
from sweep.launch.launch import run_launch
from sweep.launch.spec import CONTROL, EVENTS_FILE, QUALITY_DIR, REPEAT, LaunchSpec, make_spec
from sweep.launch.worker import Events
from sweep.measure.load import LoadResult
from sweep.measure.telemetry import EngineReport
from sweep.results.records import LaunchRecord, PointRecord, record_from_dict
from sweep.study.proposals import load_ladder


class StubServer:
    """Starts, and dies when told to."""

    base_url = "http://127.0.0.1:9"
    served_model = "m"
    vllm_version = "9.9"
    startup_s: float | None = 12.0
    first_request_ms: float | None = 80.0
    pid = 4711
    device_ids: tuple[str, ...] = ()

    def __init__(self, start_failure: LaunchFailure | None = None) -> None:
        self.death: LaunchFailure | None = None
        self.resets = 0
        self.stopped = False
        self._start_failure = start_failure

    def start(self) -> None:
        if self._start_failure is not None:
            raise self._start_failure

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    def foreign_owner(self) -> str | None:
        return None

    def reports_model(self) -> str:
        return self.served_model

    def died(self) -> LaunchFailure | None:
        return self.death

    def stop(self) -> None:
        self.stopped = True


class Course:
    """Runs one launch with scripted measurements. loads: label -> a failure to raise or a result; good otherwise."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = make_config(tmp_path, quality=True)
        self.spec = make_spec(
            config, tmp_path / "s", launch_id="0001-x", engine=EngineConfig("org/m", {}, {}), params={},
            purpose="trial", attempt=0, loads=load_ladder(config), repeat=0, quality_runs=(),
        )  # fmt: skip
        self.server: Any = StubServer()
        self.loads: dict[str, LaunchFailure | LoadResult] = {}
        self.deaths: dict[str, LaunchFailure] = {}
        self.scoring: Callable[[], Any] = lambda: logprobs(0.0)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(launch_module, "fetch_resolved", lambda url: None)
        monkeypatch.setattr(launch_module, "tokenize_corpus", lambda url, model: np.arange(60_000))
        monkeypatch.setattr(quality_module, "bos_token_id", lambda url, model: 1)
        monkeypatch.setattr(quality_module, "measure_logprobs", lambda *_: self.scoring())
        monkeypatch.setattr(launch_module, "measure_load", self._measure)

    def _measure(
        self, url: str, model: str, workload: Any, load: Any, requests: Any, raw: Path, **_: Any
    ) -> LoadResult:
        self.server.death = self.deaths.get(load.label)
        scripted = self.loads.get(load.label)
        if isinstance(scripted, LaunchFailure):
            raise scripted
        return scripted or result(raw)

    def run(self, spec: LaunchSpec | None = None) -> LaunchFailure | None:
        spec = spec or self.spec
        spec.write()
        events = Events(spec.folder / EVENTS_FILE)
        try:
            return run_launch(spec, self.server, events)
        finally:
            text = (spec.folder / EVENTS_FILE).read_text()
            self.events = [json.loads(line) for line in text.splitlines()]

    def points(self) -> list[tuple[str, str, str | None]]:
        records = [record_from_dict(e["record"]) for e in self.events if e["event"] == "record"]
        return [(r.load_label, r.state, r.cause) for r in records if isinstance(r, PointRecord)]

    def kinds(self) -> list[str]:
        return [e["event"] for e in self.events if e["event"] != "phase"]


def result(raw: Path, failed: int = 0) -> LoadResult:
    nothing = EngineReport({}, None, None, None, None)
    metrics: dict[str, float | None] = {"ttft_p99_ms": 10.0, "itl_p99_ms": None}
    return LoadResult(metrics, {"ttft_p99_ms": (9.0, 12.0)}, 100, failed, 0, ("3 x HTTP 500",), nothing, {}, 0.0, raw)


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    return Course(tmp_path, monkeypatch)


def failure(cause: FailureCause) -> LaunchFailure:
    return LaunchFailure(cause, f"scripted {cause}")


def test_all_loads_in_order_each_after_a_cache_reset(course: Course) -> None:
    assert course.run() is None
    assert course.points() == [(x, "measured", None) for x in ("c8", "c2", "c1")]
    assert course.server.resets == 3
    phases = [e["phase"] for e in course.events if e["event"] == "phase"]
    assert phases == ["starting", "preparing requests", "load c8", "load c2", "load c1"]
    facts = next(e["facts"] for e in course.events if e["event"] == "facts")
    assert facts["vllm_version"] == "9.9" and facts["workload_checksum"]
    point = course.events[-1]["record"]
    assert point["metrics"] == {"ttft_p99_ms": 10.0, "itl_p99_ms": None, "startup_s": 12.0, "first_request_ms": 80.0}
    assert point["proof"]["cache"]["state"] == "warmed" and point["proof"]["devices"] is None
    assert point["intervals"] == {"ttft_p99_ms": [9.0, 12.0]}
    assert point["raw"] == "launches/0001-x/c1-r0.parquet" and point["started_at"] <= point["finished_at"]


@pytest.mark.parametrize("cause", [FailureCause.out_of_memory, FailureCause.startup_timeout])
def test_a_failed_start_fails_every_load_with_its_cause(course: Course, cause: FailureCause) -> None:
    course.server = StubServer(failure(cause))
    ended = course.run()
    assert ended is not None and ended.cause is cause
    assert course.points() == [(x, "failed", cause.value) for x in ("c8", "c2", "c1")]
    assert {e["record"]["transient"] for e in course.events if e["event"] == "record"} == {cause.transient}


def test_a_load_that_fails_on_a_living_server_is_followed_by_the_others(course: Course) -> None:
    course.loads["c8"] = failure(FailureCause.request_errors)
    assert course.run() is None
    assert course.points() == [("c8", "failed", "request_errors"), ("c2", "measured", None), ("c1", "measured", None)]


@pytest.mark.parametrize("noticed", ["by the client", "afterwards"])
def test_a_dead_engine_ends_the_launch_at_its_load(course: Course, noticed: str) -> None:
    course.deaths["c2"] = failure(FailureCause.engine_died)
    if noticed == "by the client":
        course.loads["c2"] = failure(FailureCause.request_errors)
    ended = course.run()
    assert ended is not None and ended.cause is FailureCause.engine_died
    assert course.points() == [("c8", "measured", None), ("c2", "failed", "engine_died")]


def test_a_load_that_hangs_ends_the_launch_as_the_server_may_be_stuck(course: Course) -> None:
    course.loads["c8"] = failure(FailureCause.load_timeout)
    ended = course.run()
    assert ended is not None and ended.cause is FailureCause.load_timeout
    assert course.points() == [("c8", "failed", "load_timeout")]


def test_a_broken_proof_quarantines_the_point_with_its_numbers(course: Course) -> None:
    course.loads["c2"] = result(course.spec.folder / "c2-r0.parquet", failed=3)
    assert course.run() is None
    assert course.points() == [
        ("c8", "measured", None),
        ("c2", "quarantined", "request_errors"),
        ("c1", "measured", None),
    ]
    record = [e["record"] for e in course.events if e["event"] == "record"][1]
    assert record["metrics"]["ttft_p99_ms"] == 10.0 and "3 of 103 requests failed" in record["detail"]


# ---------------------------------------------------------------- quality


def test_quality_is_left_in_the_study_and_kept_for_all_studies(course: Course) -> None:
    scored = []
    course.scoring = lambda: scored.append(1) or logprobs(0.0)  # type: ignore[func-returns-value]
    spec = replace(course.spec, quality_runs=("", REPEAT))
    assert course.run(spec) is None
    assert course.kinds() == ["facts", "quality", "record", "record", "record"]
    fingerprint = spec.engine_config.fingerprint
    folder = Path(spec.study_dir) / QUALITY_DIR
    assert {p.name for p in folder.iterdir()} == {f"{fingerprint}.npz", f"{fingerprint}-{REPEAT}.npz"}
    course.run(replace(spec, launch_id="0002-x", study_dir=spec.study_dir + "2"))
    assert len(scored) == 2


def test_a_control_is_another_engine_and_never_the_cached_reference(course: Course) -> None:
    scored = []
    course.scoring = lambda: scored.append(1) or logprobs(0.0)  # type: ignore[func-returns-value]
    course.run(replace(course.spec, quality_runs=("",)))
    other = EngineConfig("org/m", {"max_num_seqs": 4}, {}).to_dict()
    course.run(replace(course.spec, launch_id="0002-x", engine=other, quality_runs=(CONTROL,)))
    assert len(scored) == 2


def test_a_failed_quality_measurement_is_told_and_the_loads_go_on(course: Course) -> None:
    def refuse() -> Any:
        raise failure(FailureCause.request_errors)

    course.scoring = refuse
    assert course.run(replace(course.spec, quality_runs=("", REPEAT))) is None
    assert course.kinds() == ["facts", "quality_failed", "record", "record", "record"]
    told = course.events[[e["event"] for e in course.events].index("quality_failed")]
    assert (told["run"], told["cause"]) == ("", "request_errors")


def test_an_engine_that_dies_in_the_quality_measurement_ends_the_launch_without_points(course: Course) -> None:
    def die() -> Any:
        course.server.death = failure(FailureCause.engine_died)
        raise failure(FailureCause.request_errors)

    course.scoring = die
    ended = course.run(replace(course.spec, quality_runs=("",)))
    assert ended is not None and ended.cause is FailureCause.engine_died
    assert course.kinds() == ["facts", "quality_failed"]


# ---------------------------------------------------------------- the worker around it


def run_worker(course: Course, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """worker.main in this process, on the stub server."""
    monkeypatch.setattr(worker_module, "Server", lambda *_, **__: course.server)
    monkeypatch.setattr(worker_module, "_end_with_the_controller", lambda: None)
    monkeypatch.setattr(worker_module.signal, "signal", lambda *_: None)
    worker_module.main(course.spec.write())
    return [json.loads(line) for line in (course.spec.folder / EVENTS_FILE).read_text().splitlines()]


def test_the_worker_closes_a_launch_with_its_record(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    events = run_worker(course, monkeypatch)
    launch = record_from_dict(events[-1]["record"])
    assert isinstance(launch, LaunchRecord) and course.server.stopped
    assert (launch.state, launch.startup_s, launch.vllm_version, launch.log) == (
        "ok", 12.0, "9.9", "launches/0001-x/server.log",
    )  # fmt: skip


def test_a_mistake_of_the_user_leaves_the_worker_as_its_message(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("the corpus is too short", "ask for less")

    monkeypatch.setattr(launch_module, "build_requests", refuse)
    events = run_worker(course, monkeypatch)
    mistake = next(e for e in events if e["event"] == "mistake")
    assert (mistake["message"], mistake["hint"]) == ("the corpus is too short", "ask for less")
    launch = record_from_dict(events[-1]["record"])
    assert isinstance(launch, LaunchRecord) and (launch.state, launch.transient) == ("failed", True)


def test_a_stop_in_the_middle_keeps_what_is_done(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = course._measure

    def interrupted(url: str, model: str, workload: Any, load: Any, *args: Any, **options: Any) -> LoadResult:
        if load.label == "c2":
            raise worker_module.Interrupted
        return measure(url, model, workload, load, *args, **options)

    monkeypatch.setattr(launch_module, "measure_load", interrupted)
    events = run_worker(course, monkeypatch)
    found = [record_from_dict(e["record"]) for e in events if e["event"] == "record"]
    assert [(r.kind, r.state, r.cause) for r in found] == [
        ("point", "measured", None),
        ("launch", "failed", "interrupted"),
    ]
    assert course.server.stopped


def test_an_unknown_worker_error_stops_the_server_and_is_loud(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any, **__: Any) -> Any:
        raise subprocess.SubprocessError("a bug")

    monkeypatch.setattr(launch_module, "measure_load", bug)
    with pytest.raises(subprocess.SubprocessError, match="a bug"):
        run_worker(course, monkeypatch)
    assert course.server.stopped


def test_nan_never_leaves_a_launch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Events(tmp_path / EVENTS_FILE).write("facts", facts={"x": float("nan")})
    assert (tmp_path / EVENTS_FILE).read_text() == ""
