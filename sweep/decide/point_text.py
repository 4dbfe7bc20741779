"""Everything known of one operating point, as text: its metrics with intervals, its proof, how to launch it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sweep.decide.answer import point_dict
from sweep.decide.opened import Study
from sweep.decide.wording import engine_text, load_text, plural, shared_settings
from sweep.engine.engine_args import EngineConfig
from sweep.results.metrics import METRICS, get_metric
from sweep.results.points import OperatingPoint
from sweep.results.records import PointRecord, to_dict
from sweep.results.uncertainty import Spreads, front_probability

_SOURCES = {
    "repeats": "repeats", "study": "spread of other points' repeats", "requests": "requests of this run",
    "quality": "positions of the text",
}  # fmt: skip


def point_text(study: Study, point_id: str) -> str:
    """Raises StudyError naming the nearest points where there is none of this id."""
    point = study.point(point_id)
    shared = shared_settings(study.operating_points)
    lines = [
        f"{point.point_id}: {engine_text(point, shared)}",
        f"  load     {point.load_label}: {load_text(point.load)} on {plural(point.devices, 'device')}",
        f"  state    {_state(study, point)}",
        f"  command  {EngineConfig.from_dict(point.engine).serve_command()}",
        *_metric_lines(study, point),
    ]
    record = newest_measurement(study, point)
    if record is not None and record.proof:
        lines += [f"proof of {record.launch_id}, {record.started_at}", *_evidence(record.proof, "  ")]
    return "\n".join(lines)


def point_json(study: Study, point_id: str) -> dict[str, Any]:
    """The same as plain JSON values: the point, and each of its measurements with its proof."""
    point = study.point(point_id)
    told = ("launch_id", "repeat", "purpose", "state", "cause", "detail", "metrics", "intervals", "proof", "raw")
    records = [to_dict(record) for record in _measurements(study, point)]
    measurements = [{name: record[name] for name in told} for record in records]
    return {**point_dict(point), "intervals": dict(point.intervals), "measurements": measurements}


def newest_measurement(study: Study, point: OperatingPoint) -> PointRecord | None:
    """The newest record of the point, validation apart; None for a point nobody measured."""
    return next((r for r in reversed(_measurements(study, point)) if r.purpose != "validation"), None)


def _measurements(study: Study, point: OperatingPoint) -> list[PointRecord]:
    key = (point.config_hash, point.load_label, point.provenance)
    records = (r for r in study.records if isinstance(r, PointRecord))
    return [r for r in records if (r.config_hash, r.load_label, r.provenance) == key]


def _state(study: Study, point: OperatingPoint) -> str:
    if point.state != "measured":
        return f"{point.state}: {point.cause}: {point.detail}"
    share = front_probability(study.operating_points, study.objectives).get(point.point_id)
    on_front = "" if share is None else f"; on the front with probability {share:.0%}"
    return f"{point.provenance} {plural(point.n_repeats, 'time')}{on_front}"


def _metric_lines(study: Study, point: OperatingPoint) -> list[str]:
    """Each metric with unit, 95 % interval, and where that comes from; the study's objectives first."""
    spreads = Spreads(study.operating_points)
    order = [*study.objectives, *METRICS, *(name for name in point.metrics if name not in METRICS)]
    names = [name for name in dict.fromkeys([*order, *point.metrics]) if name in point.metrics]
    rows = []
    for name in names:
        ends, spread = point.intervals.get(name), spreads.of(point, name)
        interval = "" if ends is None else f"[{ends[0]:.4g}, {ends[1]:.4g}]"
        source = "" if spread is None else _SOURCES[spread.source]
        rows.append((name, f"{point.metrics[name]:.4g}", get_metric(name).unit, interval, source))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [f"  {'  '.join(text.ljust(w) for text, w in zip(row, [*widths, 0], strict=True))}".rstrip() for row in rows]


def _evidence(proof: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Nested evidence, one line a group; what could not be found out says so."""
    for name, value in proof.items():
        if isinstance(value, Mapping):
            said = " ".join(f"{k}={_value(v)}" for k, v in value.items())
            yield f"{indent}{name:<10} {said}"
        else:
            yield f"{indent}{name:<10} {_value(value)}"


def _value(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value) if not isinstance(value, str) else value
