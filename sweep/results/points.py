"""From records to operating points: one row for each (engine config, load), whatever was measured how often.

The rules of the join, all of them:

* A point is (config_hash, load_label, provenance). Repeats are one point with spread, never several points.
* State: the newest record decides, and transient failures do not count while any other record exists. So a
  start-up time-out that was retried and then measured is a measured point (the failure stays in `failures`),
  and a point whose newest record is a quarantine or a lasting failure is not measured, whatever came before.
* Metrics exist on measured points only: the mean over the measured repeats that have a value, `sd` the sample
  standard deviation where two or more have one. A percentile of a point is the mean of its repeats'.
* `run_se` is the standard error that the runs' own requests leave, from their intervals; `intervals` adds what the
  repeats of the whole study say: see results.uncertainty.
* quality_* come from the newest measured QualityRecord of the point's numerics fingerprint, and quality_kl is
  never below that measurement's noise floor: differences under it are ties.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from sweep.results.metrics import METRICS
from sweep.results.records import LaunchRecord, PointRecord, PointState, Purpose, QualityRecord, Record
from sweep.results.uncertainty import run_standard_errors, with_intervals

if TYPE_CHECKING:
    import pandas as pd

_PURPOSES: tuple[Purpose, ...] = ("baseline", "trial", "reference", "validation")

# The first columns of points_frame.
_IDENTITY = ("point_id", "config_hash", "fingerprint", "launch_id", "purpose", "provenance", "load_label")
_LOAD = ("concurrency", "request_rate_rps", "burstiness")
_STATE = ("devices", "state", "cause", "detail", "n_repeats")


@dataclass(frozen=True)
class OperatingPoint:
    """One engine config at one load with everything known about it.

    metrics: keys of METRICS with a value; what could not be measured is absent. sd: sample standard deviation
    over repeats, same keys. run_se: standard error within the runs, same keys. intervals: 95 % (low, high), same keys,
    where a spread is known. n_repeats: measured repeats. quality_se: standard errors of quality_* within one
    measurement. launch_id: the launch of the record that decided the state. raw: per-request files, relative
    to the study folder. purpose: "baseline" if any of its records is one.
    """

    point_id: str
    config_hash: str
    fingerprint: str
    launch_id: str
    engine: Mapping[str, Any]
    load: Mapping[str, Any]
    load_label: str
    params: Mapping[str, Any] | None
    purpose: Purpose
    devices: int
    provenance: str
    state: PointState
    cause: str | None = None
    detail: str | None = None
    n_repeats: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    sd: Mapping[str, float] = field(default_factory=dict)
    run_se: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    quality_se: Mapping[str, float] = field(default_factory=dict)
    quality_cause: str | None = None
    raw: tuple[str, ...] = ()

    @property
    def overrides(self) -> int:
        """How many engine arguments and environment variables differ from leaving everything to vLLM."""
        return len(settings(self.engine)) - 1


def settings(engine: Mapping[str, Any]) -> dict[str, Any]:
    """{"model", "args.<name>", "env.<NAME>"} of an engine config, without what is left to vLLM."""
    args = {f"args.{name}": value for name, value in engine.get("args", {}).items() if value is not None}
    env = {f"env.{name}": value for name, value in engine.get("env", {}).items()}
    return {"model": engine["model"], **dict(sorted(args.items())), **dict(sorted(env.items()))}


def operating_points(records: Iterable[Record]) -> list[OperatingPoint]:
    """Join a study's records into its operating points, in order of first appearance."""
    join = Join()
    for record in records:
        join.add(record)
    return with_intervals(join.points())


_Key = tuple[str, str, str]


class Join:
    """The operating points of records that keep coming: only what a record touches is joined anew. No intervals."""

    def __init__(self) -> None:
        self._groups: dict[_Key, list[PointRecord]] = {}
        self._startup_s: dict[str, float] = {}
        self._quality: dict[str, QualityRecord] = {}
        self._keys_of: dict[str, set[_Key]] = {}  # of a launch_id or fingerprint
        self._joined: dict[_Key, OperatingPoint] = {}

    def add(self, record: Record) -> None:
        if isinstance(record, PointRecord):
            if record.purpose == "validation":
                return  # judges a point, is none: see results.validation
            key = record.config_hash, record.load_label, record.provenance
            self._groups.setdefault(key, []).append(record)
            for related in (record.launch_id, record.fingerprint):
                self._keys_of.setdefault(related, set()).add(key)
            self._joined.pop(key, None)
        elif isinstance(record, LaunchRecord):
            if record.startup_s is not None:
                self._startup_s[record.launch_id] = record.startup_s
                self._forget(record.launch_id)
        elif record.state == "measured" or record.fingerprint not in self._quality:
            self._quality[record.fingerprint] = record
            self._forget(record.fingerprint)

    def point(self, config_hash: str, load_label: str, provenance: str) -> OperatingPoint:
        """One of them. Raises KeyError where there is no record."""
        key = config_hash, load_label, provenance
        if key not in self._joined:
            group = self._groups[key]
            self._joined[key] = _join(group, self._startup_s, self._quality.get(group[0].fingerprint))
        return self._joined[key]

    def points(self) -> list[OperatingPoint]:
        """All of them, in order of first appearance."""
        return [self.point(*key) for key in self._groups]

    def _forget(self, related: str) -> None:
        for key in self._keys_of.get(related, ()):
            self._joined.pop(key, None)


def _join(group: list[PointRecord], startup_s: Mapping[str, float], quality: QualityRecord | None) -> OperatingPoint:
    decisive = [r for r in group if not (r.state == "failed" and r.transient)]
    newest = (decisive or group)[-1]
    measured = [r for r in group if r.state == "measured"] if newest.state == "measured" else []
    samples: dict[str, list[float]] = {}
    for record in measured:
        values: dict[str, float | None] = dict(record.metrics)
        if values.get("startup_s") is None:
            values["startup_s"] = startup_s.get(record.launch_id)
        for name, value in values.items():
            if value is not None:
                samples.setdefault(name, []).append(value)
    metrics = {name: fmean(values) for name, values in samples.items()}
    if measured and quality is not None:
        metrics |= _quality_metrics(quality)
    own_label = newest.load_label if newest.provenance == "measured" else f"{newest.load_label}-{newest.provenance}"
    return OperatingPoint(
        point_id=f"{newest.config_hash}-{own_label}",
        config_hash=newest.config_hash,
        fingerprint=newest.fingerprint,
        launch_id=newest.launch_id,
        engine=newest.engine,
        load=newest.load,
        load_label=newest.load_label,
        params=next((r.params for r in reversed(group) if r.params is not None), None),
        purpose=min((r.purpose for r in group), key=_PURPOSES.index),
        devices=newest.devices,
        provenance=newest.provenance,
        state=newest.state,
        cause=newest.cause if newest.state != "measured" else None,
        detail=newest.detail if newest.state != "measured" else None,
        n_repeats=len(measured),
        metrics=metrics,
        run_se=run_standard_errors([r.intervals for r in measured], len(measured)),
        sd={name: stdev(values) for name, values in samples.items() if len(values) > 1},
        quality_se=_present(quality.standard_errors) if measured and quality is not None else {},
        quality_cause=quality.cause if quality is not None and quality.state == "failed" else None,
        raw=tuple(r.raw for r in measured if r.raw is not None),
    )


def _quality_metrics(quality: QualityRecord) -> dict[str, float]:
    metrics = _present(quality.metrics)
    if "quality_kl" in metrics and quality.noise_floor_kl is not None:
        metrics["quality_kl"] = max(metrics["quality_kl"], quality.noise_floor_kl)
    return metrics


def _present(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Failure:
    """What one cause did in a study.

    subject: "operating point" or "quality". points: operating points it hit; recovered: those of them that
    were measured in the end. launches: ids of the launches it happened in. detail, log, engine: evidence of the
    newest occurrence (log is relative to the study folder).
    """

    subject: str
    cause: str
    points: int
    recovered: int
    launches: tuple[str, ...]
    transient: bool
    detail: str | None
    log: str | None
    engine: Mapping[str, Any] | None


def failures(records: Sequence[Record]) -> list[Failure]:
    """Everything that did not work by cause, most points hit first; also what a retry mended."""
    points = operating_points(records)
    state = {p.point_id: p.state for p in points}
    ids = {(p.config_hash, p.load_label, p.provenance): p.point_id for p in points}
    logs = {r.launch_id: r.log for r in records if isinstance(r, LaunchRecord)}
    groups: dict[tuple[str, str], list[PointRecord | LaunchRecord | QualityRecord]] = {}
    for record in records:
        if record.state in ("failed", "quarantined"):
            subject = "quality" if isinstance(record, QualityRecord) else "operating point"
            groups.setdefault((subject, record.cause or "unknown"), []).append(record)
    found = []
    for (subject, cause), group in groups.items():
        hit = {ids[r.config_hash, r.load_label, r.provenance] for r in group if isinstance(r, PointRecord)}
        newest = next((r for r in reversed(group) if r.detail), group[-1])
        found.append(
            Failure(
                subject=subject,
                cause=cause,
                points=len(hit),
                recovered=sum(state[point_id] == "measured" for point_id in hit),
                launches=tuple(dict.fromkeys(r.launch_id for r in group if r.launch_id is not None)),
                transient=any(r.transient for r in group if not isinstance(r, QualityRecord)),
                detail=newest.detail,
                log=logs.get(newest.launch_id) if newest.launch_id is not None else None,
                engine=None if isinstance(newest, QualityRecord) else newest.engine,
            )
        )
    return sorted(found, key=lambda f: (-f.points, -len(f.launches), f.cause))


def points_frame(records: Iterable[Record], objectives: Sequence[str] = ()) -> pd.DataFrame:
    """One row for each operating point, in order of first appearance.

    Columns: identity and state; `knob.<name>` what the sampler chose (empty for a config outside the search
    space); `model`, `args.<name>`, `env.<NAME>` what was launched (empty: vLLM's default; nested values as
    JSON text); every metric with its unit in the name (NaN: not measured); `<metric>_sd` for metrics with
    repeats, `<metric>_se` for quality; `on_front` for the objectives given.
    """
    import pandas as pd

    from sweep.results.front import front

    points = operating_points(records)
    on_front = {p.point_id for p in front(points, objectives)} if objectives else set()
    rows = []
    for p in points:
        row: dict[str, Any] = {name: getattr(p, name) for name in (*_IDENTITY, *_STATE)}
        row |= {name: p.load.get(name) for name in _LOAD}
        row |= {f"knob.{name}": cell(value) for name, value in (p.params or {}).items()}
        row |= {name: cell(value) for name, value in settings(p.engine).items()}
        row |= p.metrics
        row |= {f"{name}_sd": value for name, value in p.sd.items()}
        row |= {f"{name}_se": value for name, value in p.quality_se.items()}
        row["on_front"] = p.point_id in on_front
        rows.append(row)
    seen = list(dict.fromkeys(name for row in rows for name in row))
    knobs = sorted(name for name in seen if name.startswith("knob."))
    engine = sorted(name for name in seen if name.startswith(("args.", "env.")))
    of_classes = sorted({m for p in points for m in p.metrics if "." in m and m in METRICS})
    metrics = [*METRICS, *of_classes]
    spread = [f"{m}{end}" for m in metrics for end in ("_sd", "_se") if f"{m}{end}" in seen]
    columns = [*_IDENTITY, *_LOAD, *_STATE, "on_front", *knobs, "model", *engine, *metrics, *spread]
    frame = pd.DataFrame(rows, columns=pd.Index(columns))
    whole = dict.fromkeys(("concurrency", "devices", "n_repeats"), "Int64")
    real = dict.fromkeys(["request_rate_rps", "burstiness", *metrics, *spread], "float64")
    frame = frame.astype({**whole, **real, "on_front": "bool"})
    return nullable(frame, [*knobs, *engine])


def nullable(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Whole numbers stay whole in columns with gaps, where pandas alone would turn 8 into 8.0."""
    return frame.assign(**{name: frame[name].convert_dtypes() for name in columns})


def cell(value: Any) -> Any:
    """A table cell: scalars stay, dicts and lists become compact JSON text, so that groupby and CSV work."""
    return json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping | list | tuple) else value
