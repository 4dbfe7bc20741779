"""What a running sweep says: on the console, in status.json, and how long it will still take."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_launches import Event, Session, dies_at_startup, engine_text, good, make_config
from rich.console import Console

from sweep.decide.opened import open_study
from sweep.decide.tables import status_text
from sweep.engine.failures import FailureCause
from sweep.launch.spec import LaunchSpec
from sweep.results.status import STATUS_FILE, read_status
from sweep.study import loop as loop_module
from sweep.study import progress as progress_module
from sweep.study.loop import StudyLoop
from sweep.study.progress import Progress


class ReportingSession(Session):
    """Reports through a real Progress and keeps the status after every look of the loop."""

    console: Console
    statuses: list[dict[str, object]]
    reporter: Progress | None = None

    def _changed(self, loop: StudyLoop, message: str | None) -> None:
        if self.reporter is None:
            self.statuses = []
            self.output = io.StringIO()
            console = Console(file=self.output, width=10_000)
            self.reporter = Progress(self.folder, self.space.size().launchable, console)
        self.reporter.changed(loop, message)
        self.statuses.append(json.loads((self.folder / STATUS_FILE).read_text()))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)
    monkeypatch.setattr(progress_module, "_REFRESH_S", 0.0)


def script(spec: LaunchSpec) -> Iterator[list[Event]]:
    bad = engine_text(spec) == "max_num_seqs=4"
    return dies_at_startup(spec, FailureCause.out_of_memory) if bad else good(spec)


def test_status_counts_names_the_best_and_ends_finished(tmp_path: Path) -> None:
    session = ReportingSession(make_config(tmp_path), script)
    reason = session.run()
    assert session.reporter is not None
    last = session.statuses[-1]
    assert last["state"] == "running" and last["counts"] == {
        "settled": 9, "measured": 6, "failed": 3, "quarantined": 0, "cut": 0, "launches": 3, "configs": 3,
    }  # fmt: skip
    assert last["best"] == {
        "output_throughput_tok_s": {"value": 80.0, "config": "vLLM's defaults", "load": "c8"},
        "ttft_p99_ms": {"value": 6.25, "config": "vLLM's defaults", "load": "c1"},
    }
    session.reporter.finished(session.loop, reason)
    status = read_status(session.folder)
    assert status is not None and (status["state"], status["stop_reason"], status["jobs"]) == ("finished", reason, [])
    text = status_text(open_study(session.folder), status)
    assert "6 measured, 3 failed, 0 quarantined; 3 configurations in 3 launches" in text
    assert "out_of_memory: 3 points: scripted out_of_memory" in text
    assert not list(session.folder.glob("*.tmp"))


def test_jobs_are_shown_while_they_run(tmp_path: Path) -> None:
    session = ReportingSession(make_config(tmp_path, devices=2), lambda spec: good(spec, ticks=3))
    session.run()
    shown = [s["jobs"] for s in session.statuses]
    assert max(len(jobs) for jobs in shown) == 2  # type: ignore[arg-type]
    phases = {job["phase"] for jobs in shown for job in jobs}  # type: ignore[attr-defined]
    assert {"starting", "load c8", "load c1"} <= phases


def test_every_line_on_the_console_has_the_count_and_the_eta(tmp_path: Path) -> None:
    session = ReportingSession(make_config(tmp_path, trials=6), good)
    session.run()
    lines = session.output.getvalue().splitlines()
    assert "[0/6 points, ETA unknown] launch 0001-" in lines[0] and "(baseline): vLLM's defaults" in lines[0]
    assert any("[6/6 points" in line and "measured: " in line for line in lines)


def test_eta_is_unknown_then_shrinks_to_nothing(tmp_path: Path) -> None:
    """Nine points are three launches of a minute; they run one after the other."""
    session = ReportingSession(make_config(tmp_path, trials=9), good)
    session.run()
    by_launches = {s["counts"]["launches"]: s["eta_s"] for s in session.statuses}  # type: ignore[index]
    assert by_launches[0] is None
    assert by_launches[1] == pytest.approx(60.0 + 60.0, abs=5.0)  # the second runs, the third is still to come
    etas = [s["eta_s"] for s in session.statuses if s["eta_s"] is not None]
    assert etas == sorted(etas, reverse=True) and etas[-1] == pytest.approx(0.0, abs=1.0)  # type: ignore[type-var]


def test_eta_counts_launches_that_wait_for_devices(tmp_path: Path) -> None:
    session = Session(make_config(tmp_path, devices=2), good)
    session.run()
    loop = session.loop
    assert loop.eta_s(configs_left=4) == pytest.approx(4 * 60.0)
    loop.queue.append(loop_module.Work(loop.reference, {}, "trial", loop.ladder))
    assert loop.eta_s(configs_left=4) == pytest.approx(5 * 60.0)
    assert loop.eta_s(configs_left=None) is None


def test_eta_is_no_longer_than_the_hours_left(tmp_path: Path) -> None:
    session = Session(make_config(tmp_path, hours=0.1), lambda spec: good(spec, duration_s=100.0))
    session.run()
    assert session.loop.eta_s(configs_left=1000) == pytest.approx(360.0, abs=40.0)


def test_an_interrupted_session_says_so(tmp_path: Path) -> None:
    session = ReportingSession(make_config(tmp_path, trials=3), good)
    session.run()
    assert session.reporter is not None
    session.reporter.finished(session.loop, "interrupted; the same command continues it")
    status = read_status(session.folder)
    assert status is not None and status["state"] == "interrupted" and status["eta_s"] is None
