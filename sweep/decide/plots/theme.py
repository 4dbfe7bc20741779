"""The visual language all figures share.

Colours are Okabe & Ito's (groups) and Cividis (scales), told apart by colour-blind readers; every group also has its
own symbol and dash, so that a figure printed in grey stays readable. Strong means on the front, faint means not; a ring
means vLLM's defaults; vermilion means failed; grey means not measured.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sweep.decide.staircase import axis_range, log_ticks
from sweep.decide.wording import number_text
from sweep.results.metrics import Metric

if TYPE_CHECKING:
    import plotly.graph_objects as go

BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, OLIVE, BLACK = OKABE_ITO = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A6A00", "#000000",
)  # fmt: skip
# Eleven symbols and eight colours: no pair comes twice among as many groups as a reader could tell apart.
_SYMBOLS = (
    "circle", "square", "triangle-up", "diamond", "cross", "star", "hexagon", "triangle-down", "pentagon", "x",
    "bowtie",
)  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
FAILED, MISSING, INK, GREY, FAINT = VERMILION, "#8A8A8A", "#222222", "#555555", 0.35
SMALL = f"font-size:12px;color:{GREY}"
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
MANY = 1000  # markers; beyond it a figure is drawn by WebGL


def colour(number: int) -> str:
    """Colour of the group of this number."""
    return OKABE_ITO[number % len(OKABE_ITO)]


def symbol(number: int) -> str:
    """Symbol of the group of this number."""
    return _SYMBOLS[number % len(_SYMBOLS)]


def dash(number: int) -> str:
    """Dash of the line of this number."""
    return _DASHES[number % len(_DASHES)]


def scatter(count: int) -> type[go.Scatter] | type[go.Scattergl]:
    """The trace type for a figure of so many markers."""
    import plotly.graph_objects as go

    chosen: type[go.Scatter] | type[go.Scattergl] = go.Scattergl if count > MANY else go.Scatter
    return chosen


def dress(figure: go.Figure, title: str, subtitle: str = "", *, height: int = 520) -> go.Figure:
    """Give a figure its title (plain text; escaped here) and everything all figures share. Returns the figure."""
    lines = [escape(title)]
    lines += [f"<span style='{SMALL}'>{escape(line)}</span>" for line in textwrap.wrap(subtitle, 110)]
    top = 60 + 18 * len(lines)
    figure.update_layout(
        title={"text": "<br>".join(lines), "x": 0, "xref": "paper", "y": 1 - 26 / height, "yanchor": "top"},
        template="plotly_white",
        colorway=list(OKABE_ITO),
        font={"family": FONT, "color": INK, "size": 13},
        height=height,
        margin={"l": 70, "r": 20, "t": top, "b": 50},
        hoverlabel={"align": "left", "bgcolor": "white", "font": {"size": 12, "color": INK}},
        legend={"tracegroupgap": 0},
        coloraxis={
            "colorscale": "Cividis",
            "colorbar": {"thickness": 14, "lenmode": "pixels", "len": 200, "y": 0, "yanchor": "bottom"},
        },
    )
    figure.update_xaxes(showline=True, linecolor="#999", ticks="outside", automargin=True)
    figure.update_yaxes(showline=True, linecolor="#999", ticks="outside", automargin=True)
    return figure


def axis_title(metric: Metric) -> str:
    """The metric's label, and which way is better."""
    better = "lower is better" if metric.direction == "minimize" else "higher is better"
    return f"{escape(metric.label)} <span style='{SMALL}'>({better})</span>"


def metric_axis(metric: Metric, values: Sequence[float]) -> dict[str, Any]:
    """Axis settings for these values of a metric: title, limits, linear or logarithmic with 1-2-5 ticks."""
    limits, log = axis_range(values)
    axis: dict[str, Any] = {"title_text": axis_title(metric), **scale(limits, log)}
    if not log and metric.unit == "fraction":
        axis["tickformat"] = ".4~p"
    return axis


def scale(limits: tuple[float, float], log: bool) -> dict[str, Any]:
    """Axis settings for these limits, in the values' own unit."""
    if not log:
        return {"type": "linear", "range": list(limits)}
    ticks = log_ticks(limits)
    return {
        "type": "log",
        "range": [math.log10(v) for v in limits],
        "tickvals": ticks,
        "ticktext": [number_text(v) for v in ticks],
    }


def note(figure: go.Figure, text: str) -> go.Figure:
    """Say in the middle of an empty figure why it is empty. Returns the figure."""
    figure.add_annotation(
        text=escape(text), showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5, font={"color": GREY, "size": 14}
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def escape(text: str) -> str:
    """Plotly reads a small HTML: whatever comes from a study is escaped."""
    return html.escape(text, quote=False)


def shorten(text: str, width: int) -> str:
    """At most so many characters, escaped."""
    return escape(text if len(text) <= width else f"{text[: width - 1]}…")
