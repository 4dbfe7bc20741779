"""The front as a figure: a staircase through measured points. Nothing is fitted and nothing is hidden.

Colours are Okabe-Ito (groups) and Cividis (scales), told apart by colour-blind readers; every group also has
its own symbol, so that a figure printed in grey stays readable.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sweep.decide.staircase import axis_range, log_ticks, staircase
from sweep.decide.wording import (
    engine_items,
    load_text,
    number_text,
    plural,
    point_value_text,
    shared_settings,
)
from sweep.errors import ConfigError, did_you_mean
from sweep.results.front import eligible, front, ineligible
from sweep.results.metrics import METRICS, Metric, get_metric
from sweep.results.points import OperatingPoint, cell, settings

if TYPE_CHECKING:
    import plotly.graph_objects as go

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A6A00", "#000000")
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "cross", "star", "hexagon", "triangle-down")
_FAILED, _MISSING, _INK, _FAINT = "#D55E00", "#8A8A8A", "#222222", 0.35
_SMALL = "font-size:12px;color:#555"
_HOVER = (
    "cost_usd_per_mtok", "output_throughput_tok_s", "request_throughput_rps", "ttft_p50_ms", "ttft_p99_ms",
    "itl_p50_ms", "itl_p99_ms", "e2e_p99_ms", "quality_kl", "quality_top1_agreement",
)  # fmt: skip


def front_figure(
    points: Sequence[OperatingPoint],
    x: str,
    y: str,
    *,
    color: str = "load",
    objectives: Sequence[str] | None = None,
) -> go.Figure:
    """Figure of metric y over metric x.

    Measured points: strong if on the front of `objectives` (default: x and y), faint if not; the staircase
    joins those that have every objective and are best for these two axes. Points without coordinates (failed,
    quarantined, a metric not measured) stand in a strip below, by cause. color: "load", a metric, or an
    engine argument. Raises ConfigError for an unknown metric or colour.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    x_metric, y_metric = get_metric(x), get_metric(y)
    objectives = list(objectives or (x, y))
    shared = shared_settings(points)
    plotted = eligible(points, [x, y])
    on_front = {p.point_id for p in front(points, objectives)}
    lost: dict[str, list[OperatingPoint]] = {}
    for p, reason in ineligible(points, [x, y]):
        lost.setdefault((p.cause or "unknown") if p.state != "measured" else reason, []).append(p)

    strip_px = 60 + 24 * len(lost) if lost else 0
    height = 560 + strip_px
    if lost:
        share = 24 * len(lost) / (height - 240)
        figure = make_subplots(rows=2, cols=1, row_heights=[1 - share, share], vertical_spacing=110 / height)
    else:
        figure = make_subplots(rows=1, cols=1)

    x_range, x_log = axis_range([p.metrics[x] for p in plotted])
    y_range, y_log = axis_range([p.metrics[y] for p in plotted])
    worst = (x_range[x_metric.sign > 0], y_range[y_metric.sign > 0])
    comparable = eligible(points, list(dict.fromkeys([x, y, *objectives])))
    line = staircase([(p.metrics[x], p.metrics[y]) for p in comparable], x_metric, y_metric, worst)
    figure.add_trace(
        go.Scatter(
            x=[a for a, _ in line],
            y=[b for _, b in line],
            mode="lines",
            line={"color": _INK, "width": 1.5, "shape": "linear"},
            name="best of these two axes",
            hoverinfo="skip",
        )
    )
    groups = _groups(plotted, "load" if color in METRICS else color)
    for strong in (False, True):  # the front is drawn over the rest
        for number, (label, group) in enumerate(groups.items()):
            shown = [p for p in group if (p.point_id in on_front) == strong]
            if color not in METRICS:
                _add_markers(figure, shown, x, y, label, number, strong, shared, color=_group_colour(number))
                continue
            known, unknown = _split(shown, color)
            _add_markers(figure, known, x, y, label, number, strong, shared, color=[p.metrics[color] for p in known])
            _add_markers(figure, unknown, x, y, label, number, strong, shared, color=_MISSING)
    for number, label in enumerate(groups):
        _add_key(figure, label, number, _INK if color in METRICS else _group_colour(number))
    if color in METRICS and _split(plotted, color)[1]:
        _add_key(figure, f"no {color}", 0, _MISSING)
    baseline = [p for p in plotted if p.purpose == "baseline"]
    if baseline:
        figure.add_trace(
            go.Scatter(
                x=[p.metrics[x] for p in baseline],
                y=[p.metrics[y] for p in baseline],
                mode="markers",
                marker={"symbol": "circle-open", "size": 21, "color": _INK, "line": {"width": 1.8}},
                name="vLLM's defaults",
                hoverinfo="skip",
            )
        )
    if lost:
        _add_strip(figure, lost, shared)

    n_front = sum(p.point_id in on_front for p in plotted)
    named = " × ".join(get_metric(o).label for o in objectives)
    figure.update_layout(
        title={
            "text": f"Front: {n_front} of {plural(len(comparable), 'comparable point')}"
            f"<br><span style='{_SMALL}'>{html.escape(named)}; faint: not on the front</span>",
            "x": 0,
            "xref": "paper",
            "y": 1 - 28 / height,
            "yanchor": "middle",
        },
        template="plotly_white",
        font={"family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", "color": _INK},
        height=height,
        margin={"l": 70, "r": 20, "t": 80, "b": 50},
        legend={"title": {"text": "" if color in METRICS else _colour_title(color)}, "tracegroupgap": 0},
        hoverlabel={"align": "left", "bgcolor": "white", "font": {"size": 12, "color": _INK}},
        coloraxis={
            "colorscale": "Cividis",
            "colorbar": {"len": 0.5, "y": 0, "yanchor": "bottom", "thickness": 14},
        },
    )
    if color in METRICS:
        values = [p.metrics[color] for p in _split(plotted, color)[0]]
        if values and min(values) < max(values):  # left alone, Plotly widens the scale for each trace of equal values
            figure.update_layout(coloraxis_cmin=min(values), coloraxis_cmax=max(values))
        figure.update_layout(coloraxis_colorbar_title_text="<br>".join(textwrap.wrap(METRICS[color].label, 18)))
    _style_axis(figure.update_xaxes, x_metric, x_range, x_log)
    _style_axis(figure.update_yaxes, y_metric, y_range, y_log)
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


def _split(points: Sequence[OperatingPoint], metric: str) -> tuple[list[OperatingPoint], list[OperatingPoint]]:
    """The points that have the metric, and those that do not."""
    return [p for p in points if metric in p.metrics], [p for p in points if metric not in p.metrics]


def _group_colour(number: int) -> str:
    return OKABE_ITO[number % len(OKABE_ITO)]


def _symbol(number: int) -> str:
    return _SYMBOLS[number % len(_SYMBOLS)]


def _add_key(figure: go.Figure, name: str, number: int, color: str) -> None:
    """A legend entry of its own: it shows the plain symbol, and a click on it hides the whole group."""
    import plotly.graph_objects as go

    marker = {"symbol": _symbol(number), "color": color, "size": 10}
    figure.add_trace(
        go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=name, legendgroup=name, hoverinfo="skip")
    )


def _add_markers(
    figure: go.Figure,
    points: Sequence[OperatingPoint],
    x: str,
    y: str,
    group: str,
    number: int,
    strong: bool,
    shared: Mapping[str, Any],
    *,
    color: str | list[float],
) -> None:
    """Markers of one group. A list of numbers as color is read on the figure's colour scale."""
    import plotly.graph_objects as go

    if not points:
        return
    marker: dict[str, Any] = {
        "symbol": _symbol(number),
        "size": 12 if strong else 8,
        "opacity": 1.0 if strong else _FAINT,
        "line": {"width": 1.2 if strong else 0.5, "color": _INK},
        "color": color,
    }
    if not isinstance(color, str):
        marker["coloraxis"] = "coloraxis"
    figure.add_trace(
        go.Scatter(
            x=[p.metrics[x] for p in points],
            y=[p.metrics[y] for p in points],
            mode="markers",
            marker=marker,
            name=group,
            legendgroup=group,
            showlegend=False,
            hovertext=[hover_text(p, shared, strong) for p in points],
            hoverinfo="text",
        )
    )


def _add_strip(figure: go.Figure, lost: Mapping[str, list[OperatingPoint]], shared: Mapping[str, Any]) -> None:
    """One row of marks for each cause: a failed point has no coordinates, so its place says nothing."""
    import plotly.graph_objects as go

    rows = sorted(lost.items(), key=lambda item: len(item[1]))
    for reason, group in rows:
        states = [p.state for p in group]
        figure.add_trace(
            go.Scatter(
                x=list(range(1, len(group) + 1)),
                y=[_strip_label(reason, len(group))] * len(group),
                mode="markers",
                marker={
                    "symbol": [{"measured": "circle-open", "failed": "x"}.get(s, "diamond-open") for s in states],
                    "color": [_MISSING if s == "measured" else _FAILED for s in states],
                    "size": 9,
                },
                hovertext=[hover_text(p, shared, False) for p in group],
                hoverinfo="text",
                showlegend=False,
            ),
            row=2,
            col=1,
        )
    width = max(20, *(len(group) for _, group in rows))
    figure.update_xaxes(visible=False, range=[0, width + 1], fixedrange=True, row=2, col=1)
    figure.update_yaxes(showgrid=False, fixedrange=True, ticks="", automargin=True, row=2, col=1)
    figure.add_annotation(
        text="no coordinates: failed, quarantined or not measured",
        xref="paper", yref="y2 domain", x=0, y=1, yanchor="bottom", xanchor="left", showarrow=False,
        font={"size": 12, "color": "#555"},
    )  # fmt: skip


def _strip_label(reason: str, count: int) -> str:
    return html.escape(f"{textwrap.shorten(reason.split(' (')[0], 40, placeholder='…')} ({count})", quote=False)


def hover_text(point: OperatingPoint, shared: Mapping[str, Any], on_front: bool) -> str:
    """Plotly hover text: identity, load, engine arguments, main metrics or the cause. Escaped."""
    place = {"measured": "on the front" if on_front else "not on the front"}.get(point.state, point.state)
    lines = [f"<b>{_escape(point.point_id)}</b> ({place})", _escape(load_text(point.load))]
    items = engine_items(point.engine, shared) or ["vLLM's defaults" if point.purpose == "baseline" else "defaults"]
    lines += [f"  {_escape(textwrap.shorten(item, 90, placeholder='…'))}" for item in items]
    if point.state == "measured":
        lines += [f"{name}: {point_value_text(point, name)}" for name in _HOVER if name in point.metrics]
        lines.append(f"{plural(point.n_repeats, 'repeat')} on {plural(point.devices, 'device')}")
    else:
        lines.append(f"<b>{_escape(point.cause or 'unknown cause')}</b>")
        lines += [_escape(part) for part in textwrap.wrap(point.detail or "", 90)[:4]]
    return "<br>".join(lines)


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


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
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _colour_title(color: str) -> str:
    return "load" if color == "load" else html.escape(color.removeprefix("args."))


def _style_axis(update: Any, metric: Metric, limits: tuple[float, float], log: bool) -> None:
    shown = [math.log10(v) for v in limits] if log else list(limits)
    better = "lower is better" if metric.direction == "minimize" else "higher is better"
    update(
        title_text=f"{metric.label} <span style='{_SMALL}'>({better})</span>",
        type="log" if log else "linear",
        range=shown,
        showline=True,
        linecolor="#999",
        ticks="outside",
        row=1,
        col=1,
    )
    if log:
        update(tickvals=log_ticks(limits), ticktext=[number_text(v) for v in log_ticks(limits)], row=1, col=1)
