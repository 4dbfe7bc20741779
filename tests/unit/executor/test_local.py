"""Real worker processes on this node. The engine is a shell script: it dies, hangs or leaves children, as told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_launches import make_config

from sweep.engine.engine_args import EngineConfig
from sweep.engine.processes import carriers
from sweep.executor.local import LocalExecutor, LocalJob, read_events
from sweep.launch.spec import EVENTS_FILE, LaunchSpec, make_spec
from sweep.results.records import LaunchRecord, PointRecord, record_from_dict
from sweep.study.ledger import Ledger
from sweep.study.proposals import load_ladder
from sweep.study.recover import recover_records

DIES = "echo 'ValueError: no such thing' >&2; exit 1"
HANGS = "sleep 1000 & sleep 1000"
IGNORES_SIGTERM = "trap '' TERM; while true; do sleep 1; done"


@pytest.fixture
def make_launch(tmp_path: Path) -> Callable[..., LaunchSpec]:
    def make(script: str, launch_id: str = "0001-abc", **options: Any) -> LaunchSpec:
        engine = tmp_path / f"engine-{launch_id}"
        engine.write_text(f"#!/bin/sh\n{script}\n")
        engine.chmod(0o755)
        config = make_config(tmp_path)
        config.engine.python = str(engine)
        config.engine.startup_timeout_s = 120.0
        config.engine.stop_timeout_s = 1.0
        return make_spec(
            config,
            tmp_path / "study",
            launch_id=launch_id,
            engine=EngineConfig("org/m", {}, {}),
            params={},
            purpose="trial",
            attempt=0,
            loads=load_ladder(config),
            repeat=0,
            quality_runs=(),
        )

    return make


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalExecutor]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = LocalExecutor(make_config(tmp_path, devices=2).hardware, None)
    yield made
    for job in made._jobs:
        job.cancel()
        wait_for(lambda job=job: not job.running)  # type: ignore[misc]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90.0
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.05)


def finish(job: LocalJob) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    wait_for(lambda: events.extend(job.poll()) or not job.running)  # type: ignore[func-returns-value]
    return events + job.poll()


def records(events: list[dict[str, Any]]) -> list[Any]:
    return [record_from_dict(e["record"]) for e in events if e["event"] == "record"]


def is_starting(job: LocalJob) -> Callable[[], bool]:
    return lambda: bool(carriers(job.spec.mark))


def test_a_launch_that_dies_leaves_its_facts_and_frees_its_devices(
    executor: LocalExecutor, make_launch: Callable[..., LaunchSpec]
) -> None:
    job = executor.submit(make_launch(DIES))
    assert job.spec.device_ids == (0,) and job.spec.device_env == {"CUDA_VISIBLE_DEVICES": "0"}
    assert executor.has_room(1) and not executor.has_room(2)
    found = records(finish(job))
    assert executor.has_room(2)
    *points, launch = found
    assert isinstance(launch, LaunchRecord) and launch.state == "failed" and launch.startup_s is None
    assert [(p.load_label, p.state, p.cause) for p in points] == [
        (x, "failed", launch.cause) for x in ("c8", "c2", "c1")
    ]
    assert "no such thing" in (launch.detail or "") and (Path(job.spec.study_dir) / (launch.log or "")).is_file()


def test_devices_come_free_only_when_the_study_has_seen_the_end(
    executor: LocalExecutor, make_launch: Callable[..., LaunchSpec]
) -> None:
    """Else the next launch would be chosen before this one's results are read."""
    job = executor.submit(make_launch(DIES))
    job._process.wait(60)
    assert not executor.has_room(2)
    assert not job.running and executor.has_room(2)


def test_max_parallel_leaves_devices_free(tmp_path: Path, make_launch: Callable[..., LaunchSpec]) -> None:
    executor = LocalExecutor(make_config(tmp_path, devices=2).hardware, max_parallel=1)
    job = executor.submit(make_launch(DIES))
    assert not executor.has_room(1)
    finish(job)
    assert executor.has_room(1)


@pytest.mark.parametrize("script", [HANGS, IGNORES_SIGTERM])
def test_cancel_stops_the_server_with_all_its_children(
    executor: LocalExecutor, make_launch: Callable[..., LaunchSpec], script: str
) -> None:
    job = executor.submit(make_launch(script))
    wait_for(is_starting(job))
    job.cancel()
    launch = records(finish(job))[-1]
    assert (launch.state, launch.cause, launch.transient) == ("failed", "interrupted", True)
    assert carriers(job.spec.mark) == []


def test_a_killed_worker_leaves_no_server(executor: LocalExecutor, make_launch: Callable[..., LaunchSpec]) -> None:
    job = executor.submit(make_launch(HANGS))
    wait_for(is_starting(job))
    job._process.kill()
    assert records(finish(job)) == []
    assert carriers(job.spec.mark) == []
    assert executor.has_room(2)


def test_ending_a_launch_spares_the_one_of_the_same_name_in_another_study(
    tmp_path: Path, make_launch: Callable[..., LaunchSpec]
) -> None:
    """Launch ids repeat: two studies begin with the same baseline."""
    executor = LocalExecutor(make_config(tmp_path, devices=2).hardware, None)
    first = make_launch(HANGS)
    ours = executor.submit(first)
    theirs = executor.submit(LaunchSpec(**{**first.__dict__, "study_dir": str(tmp_path / "other")}))
    for job in (ours, theirs):
        wait_for(is_starting(job))
    ours.cancel()
    finish(ours)
    assert carriers(theirs.spec.mark)
    theirs.cancel()
    finish(theirs)


def test_when_the_controller_is_killed_its_launches_end_and_are_recovered(
    tmp_path: Path, make_launch: Callable[..., LaunchSpec]
) -> None:
    spec = make_launch(HANGS)
    spec.write()
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from sweep.config import HardwareConfig\nfrom sweep.executor.local import LocalExecutor\n"
        "from sweep.launch.spec import read_spec\n"
        "LocalExecutor(HardwareConfig('n', 'gpu', 1), None).submit(read_spec(Path(sys.argv[1])))\ntime.sleep(1000)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    controller = subprocess.Popen([sys.executable, "-c", code, str(spec.folder / "spec.json")], env=env)
    wait_for(lambda: bool(carriers(spec.mark)))
    workers = [p for p in psutil.Process(controller.pid).children() if "sweep.launch.worker" in p.cmdline()]
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    (launch,) = recover_records(tmp_path / "study", Ledger([], ["ttft_p99_ms"], 1, False))
    assert isinstance(launch, LaunchRecord)
    assert (launch.launch_id, launch.cause, launch.detail) == ("0001-abc", "interrupted", "stopped with the sweep")
    assert carriers(spec.mark) == []
    psutil.wait_procs(workers, timeout=30)
    assert not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers)


def test_a_worker_whose_controller_is_already_gone_does_nothing(make_launch: Callable[..., LaunchSpec]) -> None:
    spec = make_launch(DIES)
    path = spec.write()
    env = {**os.environ, "SWEEP_CONTROLLER_PID": "1"}
    done = subprocess.run([sys.executable, "-m", "sweep.launch.worker", str(path)], env=env, timeout=60, check=False)
    assert done.returncode == 1 and not (spec.folder / EVENTS_FILE).exists()


def test_only_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    assert read_events(path, 0) == ([], 0)
    path.write_bytes(b'{"event": "phase"}\n{"event": "rec')
    events, offset = read_events(path, 0)
    assert events == [{"event": "phase"}]
    with path.open("ab") as f:
        f.write(b'ord"}\n')
    assert read_events(path, offset) == ([{"event": "record"}], path.stat().st_size)


def test_points_of_one_launch_are_all_its_own(executor: LocalExecutor, make_launch: Callable[..., LaunchSpec]) -> None:
    """Two side by side write to their own folders and get their own devices."""
    jobs = [executor.submit(make_launch(DIES, f"000{i}-abc")) for i in (1, 2)]
    assert [job.spec.device_ids for job in jobs] == [(0,), (1,)]
    for job in jobs:
        points = [r for r in records(finish(job)) if isinstance(r, PointRecord)]
        assert {p.launch_id for p in points} == {job.spec.launch_id} and len(points) == 3
