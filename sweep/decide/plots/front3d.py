"""The front of three metrics: the exact stepped surface of what the measured points dominate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sweep.decide.plots import theme
from sweep.decide.plots.bars import point_bars
from sweep.decide.plots.hover import Hover
from sweep.decide.staircase import Box, axis_range, faces
from sweep.decide.wording import plural
from sweep.results.front import eligible, front
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint

if TYPE_CHECKING:
    import plotly.graph_objects as go

_AXES = ("xaxis", "yaxis", "zaxis")


def front3d_figure(
    points: Sequence[OperatingPoint], objectives: Sequence[str], *, hover: Hover | None = None
) -> go.Figure:
    """Three metrics at once: the surface steps from measured point to measured point, as the staircase does.

    objectives: three metrics. Error bars are 95 % intervals. Raises ConfigError for an unknown metric.
    """
    import plotly.graph_objects as go

    metrics = [get_metric(name) for name in objectives]
    plotted = eligible(points, objectives)
    best = front(points, objectives)
    figure = go.Figure()
    theme.dress(
        figure,
        f"Front of three objectives: {len(best)} of {plural(len(plotted), 'comparable point')}",
        "the surface bounds what the measured points dominate; drag to turn it",
        height=640,
    )
    figure.update_layout(margin={"l": 0, "r": 0, "b": 0})
    if not plotted:
        return theme.note(figure, "no measured point has all three metrics yet")
    ids = {p.point_id for p in best}
    ranges = [axis_range([p.metrics[name] for p in plotted])[0] for name in objectives]
    worst = [limits[metric.sign > 0] for limits, metric in zip(ranges, metrics, strict=True)]
    signs = [metric.sign for metric in metrics]
    boxes = faces(
        [tuple(s * p.metrics[name] for s, name in zip(signs, objectives, strict=True)) for p in best],
        tuple(s * w for s, w in zip(signs, worst, strict=True)),
    )
    figure.add_trace(_surface(boxes, signs))
    hover = hover or Hover(points, ids)
    for strong in (False, True):
        shown = [p for p in plotted if (p.point_id in ids) == strong]
        if shown:
            figure.add_trace(_markers(shown, objectives, strong, ids) | hover.about(shown))
    scene = {}
    for axis, name, metric in zip(_AXES, objectives, metrics, strict=True):
        settings = theme.metric_axis(metric, [p.metrics[name] for p in plotted])
        scene[axis] = settings | {"title": {"text": theme.escape(metric.label), "font": {"size": 12}}}
        scene[axis].pop("title_text")
    camera = {"eye": dict(zip("xyz", (1.45 * s for s in _view(signs)), strict=True))}
    figure.update_layout(scene={**scene, "camera": camera, "aspectmode": "cube"}, legend={"x": 0, "y": 1})
    return figure


def _view(signs: Sequence[float]) -> tuple[float, float, float]:
    """Look from the good corner, a little above."""
    return (-signs[0], -1.1 * signs[1], -0.7 * signs[2])


def _markers(points: Sequence[OperatingPoint], names: Sequence[str], strong: bool, ids: set[str]) -> dict[str, object]:
    trace: dict[str, object] = {
        "type": "scatter3d",
        "mode": "markers",
        "name": "on the front" if strong else "dominated",
        "marker": {
            "size": 5 if strong else 3,
            "symbol": "circle" if strong else "circle-open",
            "color": theme.BLUE if strong else theme.MISSING,
            "opacity": 1.0 if strong else 0.5,
        },
    }
    for axis, name in zip("xyz", names, strict=True):
        trace[axis] = [p.metrics[name] for p in points]
        if strong and len(points) <= 60 and any(name in p.intervals for p in points):
            trace[f"error_{axis}"] = point_bars(points, name, thickness=1, width=2, color=theme.INK)
    return trace


def _surface(boxes: Sequence[Box], signs: Sequence[float]) -> go.Mesh3d:
    """Two triangles for each rectangle. A rectangle is flat in one axis."""
    import plotly.graph_objects as go

    corners: list[tuple[float, ...]] = []
    triangles: list[tuple[int, int, int]] = []
    shades: list[str] = []
    for low, high in boxes:
        flat = next(k for k in range(3) if low[k] == high[k])
        u, v = (k for k in range(3) if k != flat)
        first = len(corners)
        for a, b in ((low[u], low[v]), (high[u], low[v]), (high[u], high[v]), (low[u], high[v])):
            corner = [0.0, 0.0, 0.0]
            corner[flat], corner[u], corner[v] = low[flat], a, b
            corners.append(tuple(s * c for s, c in zip(signs, corner, strict=True)))
        triangles += [(first, first + 1, first + 2), (first, first + 2, first + 3)]
        shades += [("#9ecae8", "#7fb4d8", "#c3dff0")[flat]] * 2  # the three directions differ in print as well
    return go.Mesh3d(
        **{axis: [c[k] for c in corners] for k, axis in enumerate("xyz")},
        **{key: [t[k] for t in triangles] for k, key in enumerate("ijk")},
        facecolor=shades,
        opacity=0.55,
        flatshading=True,
        lighting={"ambient": 1, "diffuse": 0, "specular": 0, "fresnel": 0},
        hoverinfo="skip",
        name="surface of the front",
        showlegend=True,
    )
