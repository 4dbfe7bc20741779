"""The terminal dashboard: what one frame says, at any width, of a study that runs, died, ended or has not begun."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sweep.decide.watch import Watched, _ranges, frame, watch
from sweep.results.records import RecordStore, from_json
from sweep.results.status import process_started

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)


@pytest.fixture
def folder(study_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(study_dir, tmp_path / "demo")


def write_status(folder: Path, state: str = "running", **changes: Any) -> None:
    """What a sweep in this very process would have written ten seconds ago."""
    status = {
        "state": state, "node": platform.node(), "pid": os.getpid(), "process_started": process_started(os.getpid()),
        "started_at": "2026-05-04T10:00:00+00:00",
        "updated_at": (NOW - timedelta(seconds=10)).isoformat(timespec="seconds"),
        "counts": {"settled": 30, "measured": 36, "failed": 12, "quarantined": 1, "launches": 13, "configs": 12},
        "jobs": [
            {"launch_id": "0014-abc", "phase": "starting", "config": "max_num_seqs=8 quantization=" + "int8" * 30,
             "device_ids": [0, 1, 2, 3], "running_s": 90.0},
        ],
        "hours_spent": 0.125, "usd_spent": 0.5, "eta_s": 70.0, "best": {}, "controller_s": 1.0, "stop_reason": None,
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps(status | changes))


def with_devices(folder: Path, devices: int) -> None:
    meta = json.loads((folder / "study.json").read_text())
    meta["config"]["hardware"] |= {"devices": devices, "device": "gpu"}
    (folder / "study.json").write_text(json.dumps(meta))


def shown(folder: Path, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(frame(Watched(folder), NOW))
    return console.export_text()


def test_one_frame_says_everything(folder: Path) -> None:
    with_devices(folder, 8)
    write_status(folder)
    launch = folder / "launches" / "0014-abc"
    launch.mkdir(parents=True)
    (launch / "events.jsonl").write_text('{"event": "phase", "phase": "load c8"}\n')
    text = shown(folder)
    assert "running" in text and "36 measured, 12 failed, 1 quarantined" in text
    assert "0.125 of 0.25" in text and "50%" in text and "30 of 36" in text and "no limit" in text
    assert "about 1 min 00 s left" in text, "the status is ten seconds old"
    assert "0-3" in text and "load c8" in text and "1 min 40 s" in text
    assert "4-7" in text and "idle" in text
    assert "front so far" in text and "KL nats/tok" in text
    assert "invalid_argument" in text and "bitsandbytes quantization is currently" in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(folder: Path, width: int) -> None:
    with_devices(folder, 8)
    write_status(folder)
    lines = shown(folder, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 40, "one screen"
    assert any("max_num_seqs" in line for line in lines) or width < 80


def test_a_sweep_that_ended_and_one_that_died(folder: Path) -> None:
    write_status(folder, "finished", jobs=[], eta_s=None, stop_reason="budget.trials=36 reached")
    assert "finished" in shown(folder) and "budget.trials=36 reached" in shown(folder)
    write_status(folder, pid=2**22 + 1)
    assert "died" in shown(folder) and "running now" not in shown(folder)


def test_a_study_that_has_not_begun(empty_study_dir: Path) -> None:
    assert "nothing was run yet" in shown(empty_study_dir)


def test_records_are_read_when_they_have_grown(folder: Path) -> None:
    write_status(folder)
    watched = Watched(folder)
    before = watched.study
    watched.refresh()
    assert watched.study is before
    record = from_json((folder / "records.jsonl").read_text().splitlines()[0])
    RecordStore(folder).append(record)
    watched.refresh()
    assert len(watched.study.records) == len(before.records) + 1


def test_once_prints_one_frame_without_control_codes(folder: Path) -> None:
    write_status(folder)
    out = io.StringIO()
    watch(folder, once=True, console=Console(file=out, width=80))
    assert "\x1b" not in out.getvalue() and out.getvalue().count("running now") == 1


def test_watching_ends_with_the_sweep(folder: Path) -> None:
    write_status(folder, "interrupted", jobs=[], eta_s=None, stop_reason="interrupted; the same command continues it")
    out = io.StringIO()
    watch(folder, console=Console(file=out, width=80, force_terminal=True))
    assert "interrupted" in out.getvalue()


@pytest.mark.parametrize(("ids", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2,5")])
def test_ranges(ids: list[int], text: str) -> None:
    assert _ranges(ids) == text
