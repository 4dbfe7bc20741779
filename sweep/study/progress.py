"""What a running sweep shows: lines on the console, and status.json for other shells."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sweep.executor.clock import WALL
from sweep.results.front import eligible
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.status import STATUS_FILE, duration_text, process_started
from sweep.study.folder import write_json
from sweep.study.loop import StudyLoop

_REFRESH_S = 1.0


class Progress:
    """Console and status.json of one session. Use as a context manager; pass `changed` to StudyLoop."""

    def __init__(self, folder: Path, space_size: int | None, console: Console | None = None) -> None:
        self._path = folder / STATUS_FILE
        self._space_size = space_size
        self._console = console or Console()
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        )
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._last_refresh = 0.0
        self._points: list[OperatingPoint] = []
        self._records_seen = -1

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def warn(self, text: str) -> None:
        """What a person should know before the first launch."""
        self._console.print(Text(f"warning: {text}"), soft_wrap=True)

    def changed(self, loop: StudyLoop, message: str | None) -> None:
        """Called after every event; refreshes at most once a second unless there is something to say."""
        now = time.monotonic()
        due = now - self._last_refresh >= _REFRESH_S
        if message is not None:
            self._console.print(Text(f"{self._prefix(loop)} {message}"), soft_wrap=True)
        # In virtual time hours of messages come in a second: a status for each would cost more than the study.
        if due or (message is not None and loop.clock is WALL):
            self._last_refresh = now
            status = self._status(loop)
            write_json(self._path, status)
            if self._live is not None:
                self._live.update(_panel(status), refresh=True)

    def finished(self, loop: StudyLoop, reason: str) -> None:
        """Write the last status: what ended the session."""
        status = self._status(loop)
        state = "interrupted" if reason.startswith("interrupted") else "finished"
        write_json(self._path, {**status, "state": state, "jobs": [], "stop_reason": reason, "eta_s": None})

    def _prefix(self, loop: StudyLoop) -> str:
        """Time, points and the time that is left."""
        when = f"{datetime.now():%H:%M:%S}" if loop.clock is WALL else f"{loop.budget.hours_spent():5.2f} h"
        eta = _eta({"eta_s": loop.eta_s(self._configs_left(loop))})
        return f"{when} [{loop.ledger.settled_points}{_of(loop)} points, {eta}]"

    def _configs_left(self, loop: StudyLoop) -> int | None:
        return None if self._space_size is None else max(0, self._space_size - loop.configs_tried())

    def _status(self, loop: StudyLoop) -> dict[str, Any]:
        if len(loop.ledger.records) != self._records_seen:
            self._points = loop.ledger.operating_points()
            self._records_seen = len(loop.ledger.records)
        states = Counter(p.state for p in self._points)
        return {
            "state": "running",
            "node": platform.node(),
            "pid": os.getpid(),
            "process_started": process_started(os.getpid()),
            "started_at": self._started_at,
            "updated_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "counts": {
                "settled": loop.ledger.settled_points,
                "measured": states["measured"],
                "failed": states["failed"],
                "quarantined": states["quarantined"],
                "cut": states["cut"],
                "launches": len(loop.ledger.launches),
                "configs": loop.configs_tried(),
            },
            "jobs": [
                {
                    "launch_id": a.job.spec.launch_id,
                    "phase": a.phase,
                    "config": loop.describe(a.job.spec.engine),
                    "device_ids": list(a.job.spec.device_ids),
                    "running_s": round(loop.clock.monotonic() - a.started, 1),
                }
                for a in loop.active
            ],
            "hours_spent": round(loop.budget.hours_spent(), 4),
            "usd_spent": round(loop.budget.hours_spent() * loop.budget.usd_per_hour(), 4),
            "eta_s": loop.eta_s(self._configs_left(loop)),
            "best": _best(loop, self._points),
            "controller_s": round(loop.controller_s, 3),
            "stop_reason": loop.stop_reason,
        }


def _best(loop: StudyLoop, points: list[OperatingPoint]) -> dict[str, Any]:
    """The best point of each objective so far."""
    best = {}
    for name in loop.config.objectives.metrics:
        metric = get_metric(name)
        candidates = eligible(points, [name])
        if candidates:
            top = min(candidates, key=lambda p: metric.sign * p.metrics[name])
            best[name] = {"value": top.metrics[name], "config": loop.describe(top.engine), "load": top.load_label}
    return best


def _of(loop: StudyLoop) -> str:
    trials = loop.config.budget.trials
    return f"/{trials}" if trials is not None else ""


def _eta(status: dict[str, Any]) -> str:
    return f"ETA {duration_text(status['eta_s'])}" if status["eta_s"] is not None else "ETA unknown"


def _panel(status: dict[str, Any]) -> Text:
    counts = status["counts"]
    lines = [
        f"{counts['measured']} measured, {counts['failed']} failed, {counts['quarantined']} quarantined"
        f" in {counts['launches']} launches; {_eta(status)}; spent {status['usd_spent']:.2f} USD"
    ]
    for job in status["jobs"]:
        lines.append(f"  {job['launch_id']}: {job['phase']} ({duration_text(job['running_s'])}): {job['config']}")
    for name, best in status["best"].items():
        lines.append(f"  best {name}: {best['value']:.4g} ({best['config']} at {best['load']})")
    return Text("\n".join(lines))
