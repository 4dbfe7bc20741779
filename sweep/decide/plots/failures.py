"""Where the space does not work: knob values against causes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sweep.decide.plots import theme
from sweep.decide.plots.knobs import knob_values
from sweep.decide.wording import number_text, plural
from sweep.results.points import OperatingPoint
from sweep.results.records import LOST

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MOST_ROWS = 24
_TELLING = 1.5  # a row has some cause this many times as often as the whole study
_BINS = 4  # of a knob with more values than twice that


def failure_figure(points: Sequence[OperatingPoint]) -> go.Figure:
    """Share of the points of each knob value that failed or were quarantined, by cause; the numbers are counts.

    Rows: the knob values that have a cause more often than the study as a whole, most failures on top.
    """
    import plotly.graph_objects as go

    lost = [p for p in points if p.state in LOST]
    causes = sorted({_cause(p) for p in lost}, key=lambda c: -sum(_cause(p) == c for p in lost))
    rows: list[tuple[str, int, list[int]]] = []
    for name, values in knob_values(points).items():
        groups: dict[str, list[OperatingPoint]] = {}
        for p, label in zip(points, _labels(values), strict=True):
            groups.setdefault(label, []).append(p)
        for label, group in groups.items():
            counts = [sum(p.state in LOST and _cause(p) == c for p in group) for c in causes]
            if any(counts):
                rows.append((f"{name} = {label}", len(group), counts))
    usual = [sum(_cause(p) == c for p in lost) / len(points) for c in causes]
    telling = [r for r in rows if any(n / r[1] >= _TELLING * u for n, u in zip(r[2], usual, strict=True))]
    rows = sorted(telling or rows, key=lambda r: sum(r[2]) / r[1])[-_MOST_ROWS:]
    figure = go.Figure()
    theme.dress(
        figure,
        "Where it does not work",
        f"{len(lost)} of {plural(len(points), 'point')} failed or were quarantined; settings that have a cause more "
        "often than the study as a whole; colour: share of their points, number: how many",
        height=170 + 26 * max(len(rows), 4),
    )
    if not rows:
        text = "nothing failed" if not lost else "every point has the same engine arguments: no knob tells them apart"
        return theme.note(figure, text)
    figure.add_trace(
        go.Heatmap(
            x=["<br>".join(textwrap.wrap(theme.escape(c).replace("_", " "), 12)) for c in causes],
            y=[theme.shorten(f"{label} ({count})", 52) for label, count, _ in rows],
            z=[[n / count for n in counts] for _, count, counts in rows],
            text=[[str(n) if n else "" for n in counts] for *_, counts in rows],
            texttemplate="%{text}",
            hovertext=[
                [
                    f"{theme.escape(label)}<br>{theme.escape(c)}: {n} of {plural(count, 'point')}"
                    for c, n in zip(causes, counts, strict=True)
                ]
                for label, count, counts in rows
            ],
            hoverinfo="text",
            colorscale=[[0, "#ffffff"], [0.001, "#fdebd9"], [1, theme.FAILED]],
            zmin=0,
            zmax=1,
            xgap=2,
            ygap=2,
            colorbar={"tickformat": ".0%", "thickness": 14, "title": {"text": "failed"}},
        )
    )
    figure.update_xaxes(side="top", tickangle=0, showline=False, ticks="")
    figure.update_yaxes(showline=False, ticks="", tickfont={"size": 12})
    figure.update_layout(margin={"t": 140})
    return figure


def _cause(point: OperatingPoint) -> str:
    return point.cause or "unknown"


def _labels(values: Sequence[Any]) -> list[str]:
    """One label for each value; the numbers of a knob with many values in a few bins of equal count."""
    numbers = sorted(v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    if len(set(numbers)) <= 2 * _BINS:
        return [str(v) for v in values]
    edges = sorted({numbers[len(numbers) * k // _BINS] for k in range(_BINS)} | {numbers[-1]})

    def label(value: Any) -> str:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return str(value)
        k = max(i for i, edge in enumerate(edges[:-1]) if edge <= value)
        low, high = number_text(edges[k]), number_text(edges[k + 1])
        return f"{low} to {high}" if k == len(edges) - 2 else f"{low} to below {high}"

    return [label(v) for v in values]
