"""Latency against load: one line for each engine config, joining its measured loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sweep.decide.plots import theme
from sweep.decide.plots.bars import point_bars
from sweep.decide.plots.hover import Hover
from sweep.decide.wording import engine_text, plural, shared_settings
from sweep.results.front import eligible, front
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint

if TYPE_CHECKING:
    import plotly.graph_objects as go

_NAMED = 6  # configs with a colour of their own; the others are grey
_LOADS = {"concurrency": "Concurrent requests", "request_rate_rps": "Request rate (req/s)"}


def latency_figure(
    points: Sequence[OperatingPoint], metric: str, *, objectives: Sequence[str] = (), hover: Hover | None = None
) -> go.Figure:
    """A latency metric over the load of each engine config.

    Named in colour: vLLM's defaults and the configs with most points on the front of `objectives` (default: metric and
    cost); the rest is grey. Concurrency and request rate do not share an axis: the one with more points is drawn.
    """
    import plotly.graph_objects as go

    measured = eligible(points, [metric])
    kind = max(_LOADS, key=lambda k: sum(_load(p, k) is not None for p in measured))
    drawn = [p for p in measured if _load(p, kind) is not None]
    figure = go.Figure()
    configs: dict[str, list[OperatingPoint]] = {}
    for p in sorted(drawn, key=lambda p: (_load(p, kind) or 0.0, p.load_label)):
        configs.setdefault(p.config_hash, []).append(p)
    shared = shared_settings(points)
    on_front = {p.point_id for p in front(points, list(objectives) or [metric, "cost_usd_per_mtok"])}
    hover = hover or Hover(points, on_front)
    counts = {h: sum(p.point_id in on_front for p in group) for h, group in configs.items()}
    baseline = [h for h, group in configs.items() if any(p.purpose == "baseline" for p in group)]
    best = [h for h in sorted(counts, key=lambda h: -counts[h]) if counts[h] and h not in baseline]
    named = [*baseline, *best][:_NAMED]

    rest = [group for h, group in configs.items() if h not in named]
    if rest:
        figure.add_trace(_grey(rest, kind, metric, len(drawn)))
    for number, config in enumerate(named):
        group = configs[config]
        text = engine_text(group[0], shared)
        figure.add_trace(
            go.Scatter(
                x=[_load(p, kind) for p in group],
                y=[p.metrics[metric] for p in group],
                mode="lines+markers",
                line={"color": theme.colour(number), "dash": theme.dash(number), "width": 2},
                marker={"symbol": theme.symbol(number), "size": 9, "line": {"width": 1, "color": theme.INK}},
                error_y=point_bars(group, metric, thickness=1, width=3),
                name=theme.shorten("vLLM's defaults" if config in baseline else text, 60),
                **hover.about(group),
            )
        )
    label = get_metric(metric).label
    theme.dress(
        figure,
        f"{label.split(' (')[0]} against load",
        f"{plural(len(configs), 'engine config')}; in colour: vLLM's defaults and those with most points on the front"
        + ("; bars: 95 % intervals" if any(metric in p.intervals for p in drawn) else ""),
        height=560,
    )
    if not drawn:
        return theme.note(figure, f"no measured point has {metric} yet")
    loads = sorted({_load(p, kind) or 0.0 for p in drawn})
    wide = loads[0] > 0 and loads[-1] / loads[0] > 8
    ticks = _apart(loads) if wide else loads
    figure.update_xaxes(
        title_text=_LOADS[kind], type="log" if wide else "linear", tickvals=ticks, ticktext=[f"{v:g}" for v in ticks]
    )
    ends = [end for h in named for p in configs[h] for end in p.intervals.get(metric, ())]
    figure.update_yaxes(**theme.metric_axis(get_metric(metric), [*(p.metrics[metric] for p in drawn), *ends]))
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top"})
    return figure


def _load(point: OperatingPoint, kind: str) -> float | None:
    """Concurrency belongs to points without a rate: with one it is only a limit."""
    if kind == "concurrency" and point.load.get("request_rate_rps") is not None:
        return None
    value = point.load.get(kind)
    return None if value is None else float(value)


def _grey(groups: Sequence[Sequence[OperatingPoint]], kind: str, metric: str, count: int) -> go.Scatter | go.Scattergl:
    x: list[float | None] = []
    y: list[float | None] = []
    for group in groups:
        x += [*(_load(p, kind) for p in group), None]
        y += [*(p.metrics[metric] for p in group), None]
    ids = [p_id for group in groups for p_id in (*(p.point_id for p in group), None)]
    return theme.scatter(count)(
        x=x,
        y=y,
        mode="lines+markers",
        line={"color": "rgba(120,120,120,0.35)", "width": 1},
        marker={"size": 4, "color": "rgba(120,120,120,0.6)"},
        name=plural(len(groups), "other config"),
        customdata=ids,
        hovertext=ids,
        hoverinfo="text",
    )


def _apart(values: Sequence[float], factor: float = 1.35) -> list[float]:
    """Ticks of a log axis that do not run into each other."""
    kept: list[float] = []
    for value in values:
        if not kept or value / kept[-1] >= factor:
            kept.append(value)
    return kept
