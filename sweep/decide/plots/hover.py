"""What a figure says of one operating point when a reader points at it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sweep.decide.plots.theme import escape, shorten
from sweep.decide.wording import (
    engine_items,
    load_text,
    number_text,
    plural,
    point_value_text,
    shared_settings,
)
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint

_SHOWN = (
    "cost_usd_per_mtok", "output_throughput_tok_s", "request_throughput_rps", "ttft_p50_ms", "ttft_p99_ms",
    "itl_p50_ms", "itl_p99_ms", "e2e_p99_ms", "quality_kl", "quality_top1_agreement",
)  # fmt: skip


def hover_text(point: OperatingPoint, shared: Mapping[str, Any], on_front: bool) -> str:
    """Plotly hover text: identity, load, engine arguments, main metrics or the cause. Escaped."""
    place = {"measured": "on the front" if on_front else "not on the front"}.get(point.state, point.state)
    lines = [f"<b>{escape(point.point_id)}</b> ({place})", escape(load_text(point.load))]
    items = engine_items(point.engine, shared) or ["vLLM's defaults" if point.purpose == "baseline" else "defaults"]
    lines += [f"  {shorten(item, 90)}" for item in items]
    if point.state == "measured":
        lines += [f"{name}: {_value(point, name)}" for name in _SHOWN if name in point.metrics]
        lines.append(f"{plural(point.n_repeats, 'repeat')} on {plural(point.devices, 'device')}")
    else:
        lines.append(f"<b>{escape(point.cause or 'unknown cause')}</b>")
        lines += [escape(part) for part in textwrap.wrap(point.detail or "", 90)[:4]]
    return "<br>".join(lines)


def _value(point: OperatingPoint, name: str) -> str:
    if name not in point.intervals:
        return point_value_text(point, name)
    factor = 100 if get_metric(name).unit == "fraction" else 1
    low, high = (number_text(factor * v) for v in point.intervals[name])
    return f"{point_value_text(point, name)} [{low}, {high}]"


class Hover:
    """What figures of one study say of its points; each text is written once, however many figures show the point."""

    def __init__(self, points: Sequence[OperatingPoint], on_front: set[str]) -> None:
        self._shared = shared_settings(points)
        self._on_front = on_front
        self._texts: dict[str, str] = {}

    def text(self, point: OperatingPoint) -> str:
        """hover_text of a point of the study."""
        if point.point_id not in self._texts:
            text = hover_text(point, self._shared, point.point_id in self._on_front)
            self._texts[point.point_id] = text
        return self._texts[point.point_id]

    def about(self, points: Sequence[OperatingPoint]) -> dict[str, Any]:
        """Trace settings of markers that stand for points: their hover texts, and their ids for whoever clicks."""
        return {
            "hovertext": [self.text(p) for p in points],
            "hoverinfo": "text",
            "customdata": [p.point_id for p in points],
        }
