"""Along or outward: does a technique move along the frontier, or push it?"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sweep.decide.plots import theme
from sweep.decide.plots.bars import bars
from sweep.decide.staircase import axis_range, staircase
from sweep.results.metrics import get_metric

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from sweep.decide.explain.techniques import TechniqueEffect

VERDICTS: Mapping[str, tuple[str, str]] = {
    "outward": (theme.GREEN, "triangle-right"),
    "along": (theme.BLUE, "diamond"),
    "no effect": (theme.MISSING, "circle"),
    "inward": (theme.VERMILION, "triangle-left"),
    "cannot tell": (theme.MISSING, "circle-open"),
}


def techniques_figure(effects: Sequence[TechniqueEffect]) -> go.Figure:
    """How much hypervolume the front gains by having each technique, with intervals, coloured by verdict."""
    import plotly.graph_objects as go

    rows = sorted((e for e in effects if e.gain is not None), key=lambda e: e.gain or 0.0)
    untold = len(effects) - len(rows)
    figure = go.Figure()
    theme.dress(
        figure,
        "Along or outward?",
        "hypervolume that the front gains by having a setting, bars: 95 % intervals"
        + (f"; {untold} more could not be compared" if untold else ""),
        height=200 + 30 * max(len(rows), 2),
    )
    if not rows:
        return theme.note(figure, "no setting was measured both with and without: nothing to compare")
    for verdict, (color, symbol) in VERDICTS.items():
        group = [e for e in rows if e.verdict == verdict]
        if group:
            figure.add_trace(_effects(group, verdict, color, symbol))
    figure.add_vline(x=0, line={"color": theme.INK, "width": 1})
    ends = [v for e in rows for v in (e.gain, *(e.gain_interval or ()))]
    low, high = min(0.0, *ends), max(0.0, *ends)
    pad = 0.08 * (high - low) or 0.01
    figure.update_xaxes(title_text="Hypervolume gained by having it", tickformat="+.1~%", range=[low - pad, high + pad])
    figure.update_yaxes(
        ticks="", categoryorder="array", categoryarray=[_name(e) for e in rows], tickfont={"size": 12}, showgrid=True
    )
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"})
    return figure


def _name(effect: TechniqueEffect) -> str:
    return theme.shorten(effect.level, 46)


def _effects(group: Sequence[TechniqueEffect], verdict: str, color: str, symbol: str) -> go.Scatter:
    import plotly.graph_objects as go

    gains = [(e.gain or 0.0, e.gain_interval) for e in group]
    reach = [(gain, *(interval or (gain, gain))) for gain, interval in gains]
    return go.Scatter(
        x=[gain for gain, *_ in reach],
        y=[_name(e) for e in group],
        mode="markers",
        marker={"symbol": symbol, "size": 12, "color": color, "line": {"width": 1.4, "color": theme.INK}},
        error_x=bars(reach, thickness=1.4, width=4, color=theme.INK),
        name=verdict,
        hovertext=["<br>".join(textwrap.wrap(theme.escape(e.text), 80)) for e in group],
        hoverinfo="text",
    )


def technique_figure(fronts: pd.DataFrame, effect: TechniqueEffect, x: str, y: str) -> go.Figure:
    """The front of everything measured, the front without one technique, and what lies between them.

    fronts: columns side ("with" or "without"), x, y, on_front, point_id, as explain.techniques.technique_fronts gives.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    theme.dress(figure, f"{effect.level}: {effect.verdict}", effect.text, height=460)
    x_metric, y_metric = get_metric(x), get_metric(y)
    limits = [axis_range(list(fronts[c]))[0] for c in ("x", "y")]
    worst = (limits[0][x_metric.sign > 0], limits[1][y_metric.sign > 0])
    without = fronts[fronts["side"] == "without"]
    lines = [
        staircase(list(zip(rows["x"], rows["y"], strict=True)), x_metric, y_metric, worst) for rows in (without, fronts)
    ]
    gained = [*lines[0], *reversed(lines[1])]
    figure.add_trace(
        go.Scatter(
            x=[a for a, _ in gained], y=[b for _, b in gained], mode="none", fill="toself",
            fillcolor="rgba(230, 159, 0, 0.3)", name="gained by having it", hoverinfo="skip",
        )
    )  # fmt: skip
    for number, (name, line) in enumerate(zip(("front without it", "front having it"), lines, strict=True)):
        style: dict[str, Any] = {"color": theme.colour(number), "dash": theme.dash(1 - number), "width": 2}
        figure.add_trace(
            go.Scatter(
                x=[a for a, _ in line], y=[b for _, b in line], mode="lines", line=style, name=name, hoverinfo="skip"
            )
        )
    for number, side in enumerate(("without", "with")):
        rows = fronts[fronts["side"] == side]
        figure.add_trace(
            theme.scatter(len(fronts))(
                x=rows["x"],
                y=rows["y"],
                mode="markers",
                marker={
                    "symbol": theme.symbol(number),
                    "color": theme.colour(number),
                    "size": 8,
                    "opacity": 0.75,
                    "line": {"width": 0.8, "color": theme.INK},
                },
                name=f"points {side} it",
                customdata=list(rows["point_id"]),
                hovertext=list(rows["point_id"]),
                hoverinfo="text",
            )
        )
    figure.update_xaxes(**theme.metric_axis(x_metric, list(fronts["x"])))
    figure.update_yaxes(**theme.metric_axis(y_metric, list(fronts["y"])))
    return figure
