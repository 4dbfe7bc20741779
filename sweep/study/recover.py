"""After a crash: what dead launches had finished is taken in, and nothing of them is left running."""

from __future__ import annotations

import fcntl
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from sweep.engine.failures import FailureCause
from sweep.engine.processes import kill_leftovers
from sweep.executor.local import read_events
from sweep.launch.spec import EVENTS_FILE, LAUNCHES_DIR, SPEC_FILE, WORKER_LOCK, LaunchSpec, read_spec
from sweep.measure.workload import Load
from sweep.results.records import LaunchRecord, PointRecord, Record, record_from_dict
from sweep.study.ledger import Ledger

# What a worker may take to end beyond the time its server has to stop.
_WORKER_MARGIN_S = 60.0


def read_specs(folder: Path) -> list[LaunchSpec]:
    """Every launch that was begun, in order; in the study's folder as it is now, should it have been moved."""
    paths = sorted((folder / LAUNCHES_DIR).glob(f"*/{SPEC_FILE}"))
    return [replace(read_spec(path), study_dir=str(folder)) for path in paths]


def recover_records(folder: Path, ledger: Ledger) -> list[Record]:
    """Facts that dead launches left behind and records.jsonl does not have, each launch closed by its own record.

    Waits for workers that are still stopping their servers, then ends whatever is left of each launch.
    """
    closed = {r.launch_id for r in ledger.launches}
    have = {(r.launch_id, r.load_label, r.repeat) for r in ledger.records if isinstance(r, PointRecord)}
    found: list[Record] = []
    for spec in read_specs(folder):
        if spec.launch_id in closed:
            continue
        _await_worker(spec)
        kill_leftovers(spec.mark)
        events, _ = read_events(spec.folder / EVENTS_FILE, 0)
        records = [record_from_dict(e["record"]) for e in events if e["event"] == "record"]
        points = [r for r in records if isinstance(r, PointRecord)]
        found += [r for r in points if (r.launch_id, r.load_label, r.repeat) not in have]
        ends = [r for r in records if isinstance(r, LaunchRecord)]
        found += ends or [vanished(spec, "the controller or its machine stopped during this launch")]
    return found


def vanished(spec: LaunchSpec, detail: str, cause: FailureCause = FailureCause.interrupted) -> LaunchRecord:
    """The record of a launch whose worker never wrote one."""
    began = (spec.folder / SPEC_FILE).stat().st_mtime
    last = max(path.stat().st_mtime for path in spec.folder.iterdir())
    return LaunchRecord(
        **spec.identity,
        device_ids=spec.device_ids,
        state="failed",
        cause=cause.value,
        detail=detail,
        transient=True,
        startup_s=None,
        duration_s=last - began,
        started_at=datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds"),
        finished_at=datetime.fromtimestamp(last, UTC).isoformat(timespec="milliseconds"),
        attempt=spec.attempt,
        repeat=spec.repeat,
    )


def lost_point(spec: LaunchSpec, load: Load, launch: LaunchRecord) -> PointRecord:
    """A load that its launch said nothing of: a transient failure, worth the usual retries and no more."""
    return PointRecord(
        **spec.point_identity(load),
        state="failed",
        cause=launch.cause or FailureCause.unknown.value,
        detail=launch.detail or "the launch ended without measuring this load",
        transient=True,
        started_at=launch.started_at,
        finished_at=launch.finished_at,
    )


def _await_worker(spec: LaunchSpec) -> None:
    """A worker holds its lock for life; after the controller's death it stops its server and ends by itself."""
    path = spec.folder / WORKER_LOCK
    if not path.exists():
        return
    deadline = time.monotonic() + spec.stop_timeout_s + _WORKER_MARGIN_S
    with path.open("a") as handle:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.2)
