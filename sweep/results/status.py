"""status.json: what a sweep says about itself while it runs, and how another shell reads it."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

import psutil

from sweep.errors import ConfigError, StudyError

STATUS_FILE = "status.json"


def read_status(folder: Path) -> dict[str, Any] | None:
    """The last status, its state corrected to "died" when the process that wrote "running" is gone; None if none.

    Only the node it runs on can tell: elsewhere the status is taken at its word. Raises StudyError for a damaged file.
    """
    path = folder / STATUS_FILE
    if not path.exists():
        return None
    try:
        status: dict[str, Any] = json.loads(path.read_text())
        here = status["node"] == platform.node()
        if status["state"] == "running" and here and not _alive(status["pid"], status["process_started"]):
            status |= {"state": "died", "jobs": [], "eta_s": None}
    except (ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path} is corrupt ({error!r})", "delete it: the next `sweep run` writes it anew") from error
    return status


def duration_text(seconds: float) -> str:
    """3725 -> "1 h 02 min"; 95 -> "1 min 35 s"; 4.2 -> "4 s"."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def seconds_of(text: str) -> float:
    """The other way: "90s", "10m", "2h", "1.5h" or plain seconds. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|min|m|h)?\s*", text)
    if match is None or not float(match[1]):
        raise ConfigError(f"'{text}' is no time", "write 90s, 10m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[match[2] or "s"]


def process_started(pid: int) -> float | None:
    """When a process began (seconds since the epoch): a pid that was given to another process is told apart by it.

    None for a process that has ended, also while its parent has not taken note of that.
    """
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _alive(pid: int, started: float) -> bool:
    now = process_started(pid)
    return now is not None and abs(now - started) < 1.0
