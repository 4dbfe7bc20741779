"""status.json as another shell reads it: a sweep that runs, has finished, or is gone without a word."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweep.errors import StudyError
from sweep.results.status import STATUS_FILE, duration_text, process_started, read_status


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process
    process.kill()
    process.wait()


def write(folder: Path, **changes: Any) -> None:
    status = {
        "state": "running",
        "node": platform.node(),
        "pid": os.getpid(),
        "process_started": process_started(os.getpid()),
        "jobs": [{"launch_id": "0001-a"}],
        "eta_s": 60.0,
    }
    (folder / STATUS_FILE).write_text(json.dumps(status | changes))


def read(folder: Path) -> dict[str, Any]:
    status = read_status(folder)
    assert status is not None
    return status


def test_no_status_yet(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None


def test_a_running_process_runs_until_it_is_killed(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    write(tmp_path, pid=child.pid, process_started=process_started(child.pid))
    assert read(tmp_path)["state"] == "running" and read(tmp_path)["jobs"]
    child.kill()
    child.poll()
    while process_started(child.pid) is not None:
        pass
    died = read(tmp_path)  # still a zombie, or gone: both are dead
    assert (died["state"], died["jobs"], died["eta_s"]) == ("died", [], None)
    child.wait()
    assert read(tmp_path)["state"] == "died"


def test_a_pid_that_now_belongs_to_another_process_is_told_apart(tmp_path: Path) -> None:
    write(tmp_path, process_started=(process_started(os.getpid()) or 0.0) - 3600.0)
    assert read(tmp_path)["state"] == "died"


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_an_ended_sweep_stays_ended(tmp_path: Path, state: str) -> None:
    write(tmp_path, state=state, pid=2**22 + 1)
    assert read(tmp_path)["state"] == state


def test_another_node_is_taken_at_its_word(tmp_path: Path) -> None:
    write(tmp_path, node="elsewhere", pid=2**22 + 1)
    assert read(tmp_path)["state"] == "running"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"state": "running"}'])
def test_a_damaged_status_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / STATUS_FILE).write_text(text)
    with pytest.raises(StudyError, match=r"status\.json is corrupt") as error:
        read_status(tmp_path)
    assert "delete it" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (95, "1 min 35 s"),
        (3599.9, "1 h 00 min"),
        (3725, "1 h 02 min"),
    ],
)
def test_durations_are_read_by_people(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
