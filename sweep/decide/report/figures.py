"""The figures of the report, and their lighter form inside the page.

A figure in the page carries no hover texts: each point's stands once in the payload, and a trace says by number which
point a marker is. Titles leave the drawing for the page's own headings, which wrap on a phone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from sweep.decide.plots import Hover, front3d_figure, front_figure
from sweep.results.metrics import METRICS
from sweep.results.points import OperatingPoint

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_PER_DEVICE, _PER_USER = "output_throughput_per_device_tok_s", "user_throughput_tok_s"


@dataclass(frozen=True)
class Shown:
    """A figure with what the page needs: an id, the name on its tab, and the metrics of its axes, if it is a front."""

    key: str
    tab: str
    figure: go.Figure
    axes: tuple[str, ...] = ()


def fronts(
    points: Sequence[OperatingPoint],
    objectives: Sequence[str],
    bands: Mapping[tuple[str, str], pd.DataFrame],
    cliffs: Sequence[tuple[str, str]],
    hover: Hover,
) -> list[Shown]:
    """A figure for each pair of objectives (with three, the third is the colour), one of three, and tokens per GPU."""
    pairs = list(combinations(objectives, 2)) or [(o, "output_throughput_tok_s") for o in objectives]
    shown = []
    for x, y in pairs:
        rest = [o for o in objectives if o not in (x, y)]
        color = rest[0] if len(rest) == 1 else "load"
        jumps = () if any(name.startswith("quality_") for name in (x, y)) else cliffs
        compared = objectives if len(objectives) > 1 else None
        figure = front_figure(
            points, x, y, color=color, objectives=compared, band=bands.get((x, y)), cliffs=jumps, hover=hover
        )
        shown.append(Shown(f"front-{x}-{y}", f"{_short(x)} × {_short(y)}", figure, (x, y)))
    if len(objectives) == 3:
        shown.append(Shown("front-3d", "all three", front3d_figure(points, objectives, hover=hover), tuple(objectives)))
    if any(_PER_DEVICE in p.metrics and _PER_USER in p.metrics for p in points):
        figure = front_figure(points, _PER_USER, _PER_DEVICE, objectives=list(objectives) or None, hover=hover)
        shown.append(Shown("front-throughput", "tok/s per GPU × user", figure, (_PER_USER, _PER_DEVICE)))
    return shown


def _short(name: str) -> str:
    return METRICS[name].label.split(" (")[0]


def slim(figure: go.Figure, number: Mapping[str, int], hover: Sequence[str]) -> dict[str, Any]:
    """The figure as plain JSON for the page: rounded to six digits, points by number, no title."""
    plain: dict[str, Any] = _plain(figure.to_plotly_json())
    plain["layout"].pop("title", None)
    plain["layout"].pop("template", None)  # the page has it once
    kinds = {trace["type"] for trace in plain["data"]}
    plain["layout"]["margin"]["t"] = 64 if kinds & {"parcoords", "heatmap"} else 24
    for trace in plain["data"]:
        ids = trace.get("customdata")
        if not ids:
            continue
        trace["customdata"] = [number.get(i) for i in ids]
        known = [None if n is None else hover[n] for n in trace["customdata"]]
        if list(trace.get("hovertext") or ()) == known or trace.get("hovertext") == ids:
            trace.pop("hovertext")
    return plain


def caption(figure: go.Figure) -> tuple[str, str]:
    """Title and subtitle, as plain HTML."""
    first, *rest = (figure.layout.title.text or "").split("<br>")
    return first, " ".join(re.sub(r"</?span[^>]*>", "", line) for line in rest)


def _plain(value: Any) -> Any:
    """Plain JSON values. Numbers to six digits; what is not finite is null."""
    import numpy as np

    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value
