"""The front of two metrics: a staircase through measured points. Nothing is fitted and nothing is hidden."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sweep.decide.plots import theme
from sweep.decide.plots.bars import point_bars
from sweep.decide.plots.hover import Hover
from sweep.decide.staircase import axis_range, staircase
from sweep.decide.wording import plural
from sweep.errors import ConfigError, did_you_mean
from sweep.results.front import eligible, front, ineligible
from sweep.results.metrics import METRICS, get_metric
from sweep.results.points import OperatingPoint, cell, settings
from sweep.results.records import LOST

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_ROW_PX = 24
_MOST_GROUPS = 11  # as many as there are symbols
_MOST_BARS = 60  # error bars of more points than this are a hedge, not a figure


def front_figure(
    points: Sequence[OperatingPoint],
    x: str,
    y: str,
    *,
    color: str = "load",
    objectives: Sequence[str] | None = None,
    band: pd.DataFrame | None = None,
    cliffs: Sequence[tuple[str, str]] = (),
    hover: Hover | None = None,
) -> go.Figure:
    """Figure of metric y over metric x.

    Measured points: strong if on the front of `objectives` (default: x and y), faint if not; the staircase
    joins those that have every objective and are best for these two axes. Points without coordinates (failed,
    quarantined, a metric not measured) stand in a strip below, by cause. color: "load", a metric, or an
    engine argument. band: columns level, x, y, as explain.membership.front_band gives it: shaded between its lowest and
    its highest level. cliffs: pairs of point ids, joined by a dotted line. hover: shared by the figures of one study.
    Raises ConfigError for an unknown metric or colour.
    """
    from plotly.subplots import make_subplots

    x_metric, y_metric = get_metric(x), get_metric(y)
    objectives = list(objectives or (x, y))
    plotted = eligible(points, [x, y])
    on_front = {p.point_id for p in front(points, objectives)}
    hover = hover or Hover(points, on_front)
    lost = _lost(points, x, y)

    height = 560 + (60 + _ROW_PX * len(lost) if lost else 0)
    if lost:
        share = _ROW_PX * len(lost) / (height - 240)
        figure = make_subplots(rows=2, cols=1, row_heights=[1 - share, share], vertical_spacing=110 / height)
    else:
        figure = make_subplots(rows=1, cols=1)

    comparable = eligible(points, list(dict.fromkeys([x, y, *objectives])))
    edge = front(comparable, [x, y]) if comparable else []
    spans = [_span(plotted, edge, name) for name in (x, y)]
    x_range, y_range = (axis_range(span)[0] for span in spans)
    worst = (x_range[x_metric.sign > 0], y_range[y_metric.sign > 0])
    line = staircase([(p.metrics[x], p.metrics[y]) for p in comparable], x_metric, y_metric, worst)
    banded = band is not None and not band.empty
    if band is not None and banded:
        _add_band(figure, band, x, y, worst)
    _add_line(figure, line, "best of these two axes", {"color": theme.INK, "width": 1.5})
    groups = _groups(plotted, "load" if color in METRICS else color)
    for strong in (False, True):  # the front is drawn over the rest
        for number, (label, group) in enumerate(groups.items()):
            shown = [p for p in group if (p.point_id in on_front) == strong]
            if color not in METRICS:
                _add_markers(figure, shown, x, y, label, number, on_front, hover, theme.colour(number), len(plotted))
                continue
            known, unknown = _split(shown, color)
            values = [p.metrics[color] for p in known]
            _add_markers(figure, known, x, y, label, number, on_front, hover, values, len(plotted))
            _add_markers(figure, unknown, x, y, label, number, on_front, hover, theme.MISSING, len(plotted))
    for number, label in enumerate(groups):
        _add_key(figure, label, number, theme.INK if color in METRICS else theme.colour(number))
    if color in METRICS and _split(plotted, color)[1]:
        _add_key(figure, f"no {color}", 0, theme.MISSING)
    barred = _add_bars(figure, edge, x, y)
    _add_cliffs(figure, plotted, cliffs, x, y)
    _add_rings(figure, plotted, x, y)
    if lost:
        _add_strip(figure, lost, hover)

    n_front = sum(p.point_id in on_front for p in plotted)
    told = [" × ".join(get_metric(o).label for o in objectives), "faint: not on the front"]
    told += ["band: where 80 % of the plausible fronts run"] if banded else []
    told += ["bars: 95 % intervals"] if barred else []
    title = f"Front: {n_front} of {plural(len(comparable), 'comparable point')}"
    theme.dress(figure, title, "; ".join(told), height=height)
    figure.update_layout(legend_title_text="" if color in METRICS else theme.escape(color.removeprefix("args.")))
    if color in METRICS:
        _style_colours(figure, color, [p.metrics[color] for p in _split(plotted, color)[0]])
    figure.update_xaxes(**theme.metric_axis(x_metric, spans[0]), row=1, col=1)
    figure.update_yaxes(**theme.metric_axis(y_metric, spans[1]), row=1, col=1)
    if not plotted:
        figure.add_annotation(
            text="no measured point has both metrics yet",
            showarrow=False,
            xref="x domain",
            yref="y domain",
            x=0.5,
            y=0.5,
        )
    return figure


def _lost(points: Sequence[OperatingPoint], x: str, y: str) -> dict[str, list[OperatingPoint]]:
    """The points without coordinates, by cause."""
    lost: dict[str, list[OperatingPoint]] = {}
    for p, reason in ineligible(points, [x, y]):
        lost.setdefault((p.cause or "unknown") if p.state != "measured" else reason, []).append(p)
    return lost


def _span(plotted: Sequence[OperatingPoint], barred: Sequence[OperatingPoint], name: str) -> list[float]:
    """The values an axis has to hold: measured ones, and the ends of the bars."""
    ends = [end for p in barred[:_MOST_BARS] for end in p.intervals.get(name, ())]
    return [*(p.metrics[name] for p in plotted), *ends]


def _split(points: Sequence[OperatingPoint], metric: str) -> tuple[list[OperatingPoint], list[OperatingPoint]]:
    """The points that have the metric, and those that do not."""
    return [p for p in points if metric in p.metrics], [p for p in points if metric not in p.metrics]


def _add_line(figure: go.Figure, line: Sequence[tuple[float, float]], name: str, style: Mapping[str, Any]) -> None:
    import plotly.graph_objects as go

    x, y = [a for a, _ in line], [b for _, b in line]
    figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line={"shape": "linear", **style}, name=name, hoverinfo="skip"))


def _add_band(figure: go.Figure, band: pd.DataFrame, x: str, y: str, worst: tuple[float, float]) -> None:
    """Shade between the staircase few draws reach and the one nearly all reach."""
    import plotly.graph_objects as go

    edges = []
    for level in (band["level"].min(), band["level"].max()):
        rows = band[band["level"] == level]
        values = list(zip(rows["x"], rows["y"], strict=True))
        edges.append(staircase(values, get_metric(x), get_metric(y), worst))
    outline = [*edges[0], *reversed(edges[1])]
    figure.add_trace(
        go.Scatter(
            x=[a for a, _ in outline],
            y=[b for _, b in outline],
            mode="none",
            fill="toself",
            fillcolor="rgba(86, 180, 233, 0.28)",
            name="band of the front",
            hoverinfo="skip",
        )
    )


def _add_markers(
    figure: go.Figure,
    points: Sequence[OperatingPoint],
    x: str,
    y: str,
    group: str,
    number: int,
    on_front: set[str],
    hover: Hover,
    color: str | list[float],
    count: int,
) -> None:
    """Markers of one group, all of them on the front or none. Numbers as color are read on the colour scale."""
    if not points:
        return
    strong = points[0].point_id in on_front
    marker: dict[str, Any] = {
        "symbol": theme.symbol(number),
        "size": (12 if strong else 8) if count <= theme.MANY else (9 if strong else 5),
        "opacity": 1.0 if strong else theme.FAINT,
        "line": {"width": 1.2 if strong else 0.5, "color": theme.INK},
        "color": color,
    }
    if not isinstance(color, str):
        marker["coloraxis"] = "coloraxis"
    figure.add_trace(
        theme.scatter(count)(
            x=[p.metrics[x] for p in points],
            y=[p.metrics[y] for p in points],
            mode="markers",
            marker=marker,
            name=group,
            legendgroup=group,
            showlegend=False,
            **hover.about(points),
        )
    )


def _add_key(figure: go.Figure, name: str, number: int, color: str) -> None:
    """A legend entry of its own: it shows the plain symbol, and a click on it hides the whole group."""
    import plotly.graph_objects as go

    marker = {"symbol": theme.symbol(number), "color": color, "size": 10}
    figure.add_trace(
        go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=name, legendgroup=name, hoverinfo="skip")
    )


def _add_bars(figure: go.Figure, points: Sequence[OperatingPoint], x: str, y: str) -> bool:
    """The 95 % intervals of the staircase's own points; whether there are any."""
    import plotly.graph_objects as go

    known = [p for p in points if x in p.intervals or y in p.intervals]
    if not known or len(known) > _MOST_BARS:
        return False
    figure.add_trace(
        go.Scatter(
            x=[p.metrics[x] for p in known],
            y=[p.metrics[y] for p in known],
            mode="markers",
            marker={"size": 1, "color": theme.INK},
            hoverinfo="skip",
            showlegend=False,
            error_x=point_bars(known, x, color=theme.INK, thickness=1, width=3),
            error_y=point_bars(known, y, color=theme.INK, thickness=1, width=3),
        )
    )
    return True


def _add_cliffs(
    figure: go.Figure, points: Sequence[OperatingPoint], cliffs: Sequence[tuple[str, str]], x: str, y: str
) -> None:
    """A dotted line between the points on both sides of each cliff, where both have coordinates."""
    at = {p.point_id: (p.metrics[x], p.metrics[y]) for p in points}
    line: list[tuple[Any, Any]] = []
    for one, other in cliffs:
        if one in at and other in at:
            line += [at[one], at[other], (None, None)]
    if line:
        _add_line(figure, line, "cliff: one knob apart", {"color": theme.VERMILION, "width": 1.5, "dash": "dot"})


def _add_rings(figure: go.Figure, points: Sequence[OperatingPoint], x: str, y: str) -> None:
    import plotly.graph_objects as go

    baseline = [p for p in points if p.purpose == "baseline"]
    if baseline:
        figure.add_trace(
            go.Scatter(
                x=[p.metrics[x] for p in baseline],
                y=[p.metrics[y] for p in baseline],
                mode="markers",
                marker={"symbol": "circle-open", "size": 21, "color": theme.INK, "line": {"width": 1.8}},
                name="vLLM's defaults",
                hoverinfo="skip",
            )
        )


def _add_strip(figure: go.Figure, lost: Mapping[str, list[OperatingPoint]], hover: Hover) -> None:
    """One row of marks for each cause: a failed point has no coordinates, so its place says nothing."""
    rows = sorted(lost.items(), key=lambda item: len(item[1]))
    count = sum(len(group) for group in lost.values())
    for reason, group in rows:
        states = [p.state for p in group]
        figure.add_trace(
            theme.scatter(count)(
                x=list(range(1, len(group) + 1)),
                y=[_strip_label(reason, len(group))] * len(group),
                mode="markers",
                marker={
                    "symbol": [{"measured": "circle-open", "failed": "x"}.get(s, "diamond-open") for s in states],
                    "color": [theme.FAILED if s in LOST else theme.MISSING for s in states],
                    "size": 9 if count <= theme.MANY else 6,
                },
                showlegend=False,
                **hover.about(group),
            ),
            row=2,
            col=1,
        )
    width = max(20, *(len(group) for _, group in rows))
    figure.update_xaxes(visible=False, range=[0, width + 1], fixedrange=True, row=2, col=1)
    figure.update_yaxes(showgrid=False, fixedrange=True, row=2, col=1)
    figure.add_annotation(
        text="no coordinates: failed, quarantined or not measured",
        xref="paper", yref="y2 domain", x=0, y=1, yanchor="bottom", xanchor="left", showarrow=False,
        font={"size": 12, "color": theme.GREY},
    )  # fmt: skip


def _strip_label(reason: str, count: int) -> str:
    return theme.escape(f"{textwrap.shorten(reason.split(' (')[0], 28, placeholder='…')} ({count})")


def _groups(points: Sequence[OperatingPoint], color: str) -> dict[str, list[OperatingPoint]]:
    """Points by load or by an engine argument's value, in order; "default" for an argument left out."""
    key = None
    if color != "load":
        known = {name for p in points for name in settings(p.engine)}
        key = next((k for k in (color, f"args.{color}", f"env.{color}") if k in known), None)
        if key is None and points:
            names = [name.removeprefix("args.") for name in known]
            raise ConfigError(f"cannot colour by '{color}'", did_you_mean(color, [*names, *METRICS, "load"]))
    found: dict[str, list[OperatingPoint]] = {}
    order: dict[str, tuple[float, str]] = {}
    for p in points:
        value = p.load_label if key is None else cell(settings(p.engine).get(key, "default"))
        size = p.load.get("concurrency") or p.load.get("request_rate_rps") if key is None else value
        number = float(size) if isinstance(size, int | float) else -math.inf
        found.setdefault(str(value), []).append(p)
        order[str(value)] = (number, str(value))
    return _few(dict(sorted(found.items(), key=lambda item: order[item[0]])), [n for n, _ in order.values()])


def _few(groups: dict[str, list[OperatingPoint]], sizes: Sequence[float]) -> dict[str, list[OperatingPoint]]:
    """No more groups than a legend can hold: neighbouring numbers together, or all but the largest groups."""
    if len(groups) <= _MOST_GROUPS:
        return groups
    if -math.inf in sizes:
        largest = sorted(groups, key=lambda label: -len(groups[label]))[: _MOST_GROUPS - 1]
        rest = [p for label, group in groups.items() if label not in largest for p in group]
        return {label: group for label, group in groups.items() if label in largest} | {"other values": rest}
    labels = list(groups)
    step = -(-len(labels) // 8)
    parts = [labels[i : i + step] for i in range(0, len(labels), step)]
    return {
        part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}": [p for label in part for p in groups[label]]
        for part in parts
    }


def _style_colours(figure: go.Figure, color: str, values: Sequence[float]) -> None:
    if values and min(values) < max(values):  # left alone, Plotly widens the scale for each trace of equal values
        figure.update_layout(coloraxis_cmin=min(values), coloraxis_cmax=max(values))
    figure.update_layout(coloraxis_colorbar_title_text="<br>".join(textwrap.wrap(METRICS[color].label, 18)))
