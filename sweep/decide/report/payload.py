"""What the page's scripts work on: every operating point once, in columns, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sweep.decide.opened import Study
from sweep.decide.pick import TIE_FRACTION
from sweep.decide.plots import Hover
from sweep.decide.sla import Sla
from sweep.decide.wording import engine_text, shared_settings
from sweep.engine.engine_args import EngineConfig
from sweep.results.front import eligible
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint

# Columns of the table, after the objectives; those without a single value are left out.
COLUMNS = (
    "cost_usd_per_mtok", "output_throughput_tok_s", "output_throughput_per_device_tok_s", "user_throughput_tok_s",
    "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tpot_p99_ms", "e2e_p99_ms", "goodput_rps",
    "slo_attainment", "quality_kl", "quality_top1_agreement", "energy_j_per_token", "startup_s",
)  # fmt: skip
# What an SLA usually bounds, in this order after the objectives.
_BOUNDED = ("ttft_p99_ms", "itl_p99_ms", "e2e_p99_ms", "user_throughput_tok_s", "quality_kl", "output_throughput_tok_s")
_MOST_SLIDERS = 6


def payload(study: Study, on_front: set[str], target: str | None, start: Sla, hover: Hover) -> dict[str, Any]:
    """The study as the page's scripts read it: columns of points, metrics and engine configs. See pick.js.

    target, start: metric and SLA the page opens with. A value that was not measured is null. comparable: may be picked;
    barred: why formats may not, as `sweep pick` bars them.
    """
    points = study.operating_points
    shared = shared_settings(points)
    names = [m for m in dict.fromkeys([*study.objectives, *COLUMNS]) if any(m in p.metrics for p in points)]
    comparable = {p.point_id for name in names for p in eligible(points, [name])}
    configs = {p.config_hash: p for p in points}
    place = {config_hash: i for i, config_hash in enumerate(configs)}
    return {
        "study": study.name,
        "folder": str(study.path),
        "objectives": list(study.objectives),
        "target": target,
        "start": [{"metric": b.metric, "op": b.op, "value": b.value} for b in start.bounds],
        "tie_fraction": TIE_FRACTION,
        "barred": list(study.not_shown.values()),
        "sliders": _sliders(names, study.objectives, target, points),
        "metrics": {name: _metric(name) for name in names},
        "values": {name: [p.metrics.get(name) for p in points] for name in names},
        "low": {name: _ends(points, name, 0) for name in names},
        "high": {name: _ends(points, name, 1) for name in names},
        "points": {
            "id": [p.point_id for p in points],
            "config": [place[p.config_hash] for p in points],
            "load": [p.load_label for p in points],
            "size": [p.load.get("concurrency") or p.load.get("request_rate_rps") for p in points],
            "devices": [p.devices for p in points],
            "repeats": [p.n_repeats for p in points],
            "overrides": [p.overrides for p in points],
            "state": [_state(p, on_front) for p in points],
            "detail": [p.detail for p in points],
            "comparable": [p.point_id in comparable and p.fingerprint not in study.not_shown for p in points],
            "front": [p.point_id in on_front for p in points],
            "baseline": [p.purpose == "baseline" for p in points],
            "hover": [hover.text(p) for p in points],
        },
        "configs": [
            {
                "hash": config_hash,
                "text": engine_text(p, shared),
                "command": EngineConfig.from_dict(p.engine).serve_command(),
            }
            for config_hash, p in configs.items()
        ],
    }


def _state(point: OperatingPoint, on_front: set[str]) -> str:
    if point.state == "measured":
        return "on the front" if point.point_id in on_front else "measured"
    return point.cause or point.state


def _metric(name: str) -> dict[str, Any]:
    metric = get_metric(name)
    percent = metric.unit == "fraction"
    return {
        "label": metric.label.split(" (")[0],
        "unit": "%" if percent else metric.unit,
        "factor": 100 if percent else 1,
        "sign": int(metric.sign),
        "description": metric.description,
    }


def _ends(points: Sequence[OperatingPoint], name: str, end: int) -> list[float | None]:
    """One end of every point's 95 % interval, to four digits: it is read, never compared with a bound."""
    return [float(f"{p.intervals[name][end]:.4g}") if name in p.intervals else None for p in points]


def _sliders(
    names: Sequence[str], objectives: Sequence[str], target: str | None, points: Sequence[OperatingPoint]
) -> list[str]:
    """The metrics a reader bounds: the objectives first; those that differ between points."""
    wanted = [m for m in dict.fromkeys([*objectives, *_BOUNDED]) if m in names and m != target]
    return [m for m in wanted if len({p.metrics[m] for p in points if m in p.metrics}) > 1][:_MOST_SLIDERS]


def embed(data: Any) -> str:
    """JSON that may stand inside a script element, whatever texts it holds."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
