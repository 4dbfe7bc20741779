"""The truth of a study: records.jsonl, one JSON object per line, appended and fsynced, readable in ten years.

Three kinds of line, each a frozen dataclass here: a launch (one start-to-stop life of a deployment), a point
(one operating point: engine config x load, measured or not with a cause) and a quality measurement (once
per numerics fingerprint). Everything else (Optuna's storage, tables, fronts) can be rebuilt from this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from sweep.errors import StudyError

SCHEMA_VERSION = 1
RECORDS_FILE = "records.jsonl"

Purpose = Literal["baseline", "trial", "reference", "validation"]
PointState = Literal["measured", "failed", "quarantined", "cut"]
# The states of a point that was tried in vain.
LOST: tuple[PointState, ...] = ("failed", "quarantined")
# The cause of a cut point: its launch was given up before this load, see launch/ladder.py.
DOMINATED = "dominated"


@dataclass(frozen=True)
class PointRecord:
    """One measurement of one operating point.

    engine: {"model": str, "args": {...}, "env": {...}} as launched. load: {"concurrency": int} or
    {"request_rate_rps": float, "burstiness": float}. params: the knobs the sampler chose (None when the
    config is not a member of the search space, as vLLM's defaults may be). metrics: keys of
    results.metrics.METRICS; a value that could not be measured is None, never a number. cause/detail: why a
    point that is not "measured" is not, and evidence from log or response. intervals: metric -> [low, high], the 95 %
    interval that the requests of this one run support (measure.intervals). proof: what was checked, as plain JSON.
    A point that is "cut" was asked for and never measured: its configuration was given up at busier loads.
    """

    kind: ClassVar[str] = "point"
    point_id: str
    launch_id: str
    config_hash: str
    fingerprint: str
    engine: Mapping[str, Any]
    load: Mapping[str, Any]
    load_label: str
    params: Mapping[str, Any] | None
    purpose: Purpose
    devices: int
    state: PointState
    cause: str | None = None
    detail: str | None = None
    transient: bool = False
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    repeat: int = 0
    started_at: str = ""
    finished_at: str = ""
    provenance: str = "measured"
    raw: str | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    proof: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchRecord:
    """One start-to-stop life of a deployment. duration_s covers start, loads and stop, in seconds.

    resolved_differently: argument -> [asked, what vLLM made of it], where the two differ. The whole resolved
    configuration lies in the launch's folder (resolved.json).
    """

    kind: ClassVar[str] = "launch"
    launch_id: str
    config_hash: str
    fingerprint: str
    engine: Mapping[str, Any]
    params: Mapping[str, Any] | None
    purpose: Purpose
    devices: int
    device_ids: tuple[int, ...]
    state: Literal["ok", "failed"]
    cause: str | None
    detail: str | None
    transient: bool
    startup_s: float | None
    duration_s: float
    started_at: str
    finished_at: str
    log: str | None = None
    vllm_version: str | None = None
    attempt: int = 0
    repeat: int = 0
    resolved_differently: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class QualityRecord:
    """Agreement of one numerics fingerprint with the reference. metrics as in PointRecord.

    noise_floor_kl: KL between two measurements of the reference itself (nats/token); smaller differences are ties.
    intervals: metric -> 95 % (low, high) of its value. losses: metric -> {"loss", "low", "high"}, how much worse than
    the reference (>= 0 is worse, whatever the metric's direction) with its 95 % interval, from the same text or items.
    tasks: task -> {"items", "accuracy", "low", "high", "better", "worse", "mcnemar_p", "difference", "difference_low",
    "difference_high"}; better and worse are flips against the reference. task_failure: why there are none.
    identical: every log-probability equals the reference's: what was asked for had no effect.
    """

    kind: ClassVar[str] = "quality"
    fingerprint: str
    reference_fingerprint: str
    state: Literal["measured", "failed"]
    metrics: Mapping[str, float | None]
    noise_floor_kl: float | None
    positions: int
    launch_id: str | None
    finished_at: str
    cause: str | None = None
    detail: str | None = None
    standard_errors: Mapping[str, float | None] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    task_failure: str | None = None
    identical: bool = False


Record = PointRecord | LaunchRecord | QualityRecord
_KINDS: dict[str, type[Record]] = {c.kind: c for c in (PointRecord, LaunchRecord, QualityRecord)}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no measurement")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def to_json(record: Record) -> str:
    """One line of records.jsonl, without the newline. NaN and infinity are refused: no data is null."""
    return json.dumps(to_dict(record), allow_nan=False)


def from_json(line: str) -> Record:
    """Inverse of to_json. Unknown fields are ignored, so that older programs read newer files."""
    return record_from_dict(_DECODER.decode(line))


def to_dict(record: Record) -> dict[str, Any]:
    """The JSON object of a record, as written to records.jsonl."""
    return {"schema": SCHEMA_VERSION, "kind": record.kind, **asdict(record)}


def record_from_dict(data: Mapping[str, Any]) -> Record:
    """Inverse of to_dict. Raises KeyError for an unknown kind, StudyError for a newer schema."""
    if data["schema"] > SCHEMA_VERSION:
        raise StudyError(
            f"record schema {data['schema']} is newer than this sweep understands ({SCHEMA_VERSION})",
            "upgrade sweep to open this study",
        )
    cls = _KINDS[data["kind"]]
    known = {f.name for f in fields(cls)}
    values = {k: v for k, v in data.items() if k in known}
    if "device_ids" in values:
        values["device_ids"] = tuple(values["device_ids"])
    return cls(**values)


class RecordStore:
    """Append-only access to a study folder's records.jsonl. One writer; any number of readers at any time."""

    def __init__(self, study_dir: Path) -> None:
        self.path = study_dir / RECORDS_FILE

    def append(self, record: Record) -> None:
        """Durable when it returns. A torn last line of a killed writer is closed off first, never joined."""
        with self.path.open("ab+") as f:
            if f.tell() > 0:
                f.seek(-1, os.SEEK_END)
                if f.read(1) != b"\n":
                    f.write(b"\n")
            f.write(to_json(record).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())

    def read(self) -> list[Record]:
        """All records in order of writing. Raises StudyError naming the line of a corrupt file."""
        return list(self._lines())

    def _lines(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                yield from_json(line.decode())
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) and _is_torn(line):
                    continue
                raise StudyError(
                    f"{self.path}:{number} is not a sweep record ({error})",
                    "restore the line from a backup or delete it; every other line is intact",
                ) from error


def _is_torn(line: bytes) -> bool:
    """A write that a kill cut short, given that the line cannot be decoded: it starts as every record does."""
    start = b'{"schema"'
    return line.startswith(start) or start.startswith(line)
