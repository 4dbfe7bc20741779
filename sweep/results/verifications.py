"""What `sweep verify` found: verifications.jsonl beside records.jsonl, one JSON object per line, append-only.

A verification judges a point and is none: it never joins a front, and an older sweep opens the study without it. Every
stage keeps its metrics, so that another SLA can be held against them later without a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sweep.errors import StudyError
from sweep.results.records import PointState

VERIFICATIONS_FILE = "verifications.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class StageResult:
    """One stage. name: "held_out", "bursts", "longer" or "soak". asked: what made it harder, as plain numbers.

    state, cause, detail, metrics, intervals: as in a PointRecord. windows: the same metrics in equal parts of a soak,
    in order of time. raw: its per-request file, relative to the study.
    """

    name: str
    asked: Mapping[str, float]
    load: Mapping[str, Any]
    load_label: str
    state: PointState
    cause: str | None = None
    detail: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    windows: Sequence[Mapping[str, float | None]] = ()
    raw: str | None = None


@dataclass(frozen=True)
class Verification:
    """One fresh launch of a point and its stages. sla: the bounds it was run for; passed: whether all held everywhere.

    cause, detail: why the launch itself failed, if it did. startup_s: of this launch.
    """

    verification_id: str
    point_id: str
    config_hash: str
    load_label: str
    provenance: str
    sla: str
    passed: bool
    stages: Sequence[StageResult]
    started_at: str
    finished_at: str
    startup_s: float | None = None
    vllm_version: str | None = None
    cause: str | None = None
    detail: str | None = None


def append_verification(folder: Path, verification: Verification) -> None:
    """Durable when it returns."""
    line = json.dumps({"schema": SCHEMA_VERSION, **asdict(verification)}, allow_nan=False)
    with (folder / VERIFICATIONS_FILE).open("ab+") as f:
        if f.tell() > 0:
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":
                f.write(b"\n")
        f.write(line.encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


def read_verifications(folder: Path) -> list[Verification]:
    """All of a study in order of writing; a last line that a kill cut short is left out.

    Raises StudyError naming the line of a corrupt file.
    """
    path = folder / VERIFICATIONS_FILE
    if not path.exists():
        return []
    found = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_verification(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ValueError) and line.startswith(b'{"schema"') and not line.rstrip().endswith(b"}"):
                continue
            raise StudyError(
                f"{path}:{number} is not a verification ({error})", "delete the line; every other line is intact"
            ) from error
    return found


def _verification(data: Mapping[str, Any]) -> Verification:
    if data["schema"] > SCHEMA_VERSION:
        raise StudyError(
            f"verification schema {data['schema']} is newer than this sweep understands ({SCHEMA_VERSION})",
            "upgrade sweep to open this study",
        )
    values = _known(Verification, data)
    return Verification(**{**values, "stages": tuple(map(_stage, data["stages"]))})


def _stage(data: Mapping[str, Any]) -> StageResult:
    return StageResult(**{**_known(StageResult, data), "windows": tuple(data.get("windows", ()))})


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Unknown fields are ignored, so that older programs read newer files."""
    names = {f.name for f in fields(cls)}
    return {k: v for k, v in data.items() if k in names}
