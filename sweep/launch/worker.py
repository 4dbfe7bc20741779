"""The process of one launch: `python -m sweep.launch.worker SPEC.json`.

Starts the server, measures quality if asked, walks the load ladder, stops the server, and writes every fact to
events.jsonl the moment it exists. Ends in order on SIGTERM, also when the controller dies (the kernel sends it).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.server import Server
from sweep.errors import SweepError
from sweep.launch.launch import resolved_differently, run_launch
from sweep.launch.spec import CONTROLLER_PID, EVENTS_FILE, SERVER_LOG, WORKER_LOCK, LaunchSpec, read_spec
from sweep.results.records import LaunchRecord, Record, to_dict

_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """SIGTERM: stop the server and end. Not an Exception, so that nothing on the way mistakes it for a failure."""


class Events:
    """Appends to events.jsonl, one durable line per event."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, event: str, **data: Any) -> None:
        self._file.write(json.dumps({"event": event, **data}, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def record(self, record: Record) -> None:
        self.write("record", record=to_dict(record))


def main(spec_path: Path) -> None:
    spec = read_spec(spec_path)
    _end_with_the_controller()
    signal.signal(signal.SIGTERM, _interrupt)
    with (spec.folder / WORKER_LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(spec, Events(spec.folder / EVENTS_FILE))


def _run(spec: LaunchSpec, events: Events) -> None:
    started_at, began = _now(), time.monotonic()
    server = Server(
        spec.engine_config,
        python=spec.python,
        log_path=spec.folder / SERVER_LOG,
        device_env=spec.device_env or {},
        startup_timeout_s=spec.startup_timeout_s,
        stop_timeout_s=spec.stop_timeout_s,
        launch_id=spec.mark,
        niceness=spec.niceness,
        command=spec.command,
    )
    failure: LaunchFailure | None = None
    try:
        failure = run_launch(spec, server, events)
    except Interrupted:
        failure = LaunchFailure(FailureCause.interrupted, "stopped with the sweep")
    except SweepError as error:  # a mistake in the configuration that shows only now; every launch would meet it
        events.write("mistake", message=error.message, hint=error.hint)
        failure = LaunchFailure(FailureCause.interrupted, error.message)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server is being stopped already
        events.write("phase", phase="stopping")
        server.stop()
    events.record(
        LaunchRecord(
            **spec.identity,
            device_ids=spec.device_ids,
            state="ok" if failure is None else "failed",
            cause=None if failure is None else failure.cause.value,
            detail=None if failure is None else failure.detail,
            transient=failure is not None and failure.cause.transient,
            startup_s=server.startup_s,
            duration_s=time.monotonic() - began,
            started_at=started_at,
            finished_at=_now(),
            log=str((spec.folder / SERVER_LOG).relative_to(spec.study_dir)),
            vllm_version=server.vllm_version,
            attempt=spec.attempt,
            repeat=spec.repeat,
            resolved_differently=resolved_differently(spec),
        )
    )


def _interrupt(*_: object) -> None:
    raise Interrupted


def _end_with_the_controller() -> None:
    """Ask the kernel for SIGTERM when the controller dies, and notice if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    controller = os.environ.get(CONTROLLER_PID)
    if controller is not None and os.getppid() != int(controller):
        sys.exit(1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
