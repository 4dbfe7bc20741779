"""All knobs at once: parallel coordinates from the knobs to the objectives."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sweep.decide.plots import theme
from sweep.decide.staircase import axis_range, log_ticks
from sweep.decide.wording import number_text, plural
from sweep.results.front import eligible
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint, cell, settings

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MOST_KNOBS = 8
UNSET = "default"


def knob_values(points: Sequence[OperatingPoint]) -> dict[str, list[Any]]:
    """What each engine setting is in each point, for the settings that are not the same everywhere.

    Keys without "args." and "env."; "default" where it was left to vLLM.
    """
    rows = [settings(p.engine) for p in points]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_word(row.get(name, UNSET)) for row in rows] for name in names}
    return {
        name.removeprefix("args.").removeprefix("env."): values
        for name, values in columns.items()
        if len({repr(v) for v in values}) > 1
    }


def _word(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else cell(value)


def knobs_figure(
    points: Sequence[OperatingPoint], objectives: Sequence[str], *, importance: Mapping[str, float] | None = None
) -> go.Figure:
    """Parallel coordinates of measured points: knobs, load, objectives; colour is the first objective.

    importance: knob -> share; the knobs shown are the most important ones, or the first eight. A line of a chosen range
    (drag along an axis) stays, the others fade.
    """
    import plotly.graph_objects as go

    shown = eligible(points, objectives) if objectives else []
    figure = go.Figure()
    best = f"bright: better {get_metric(objectives[0]).label.split(' (')[0]}; " if shown else ""
    theme.dress(
        figure,
        "From knobs to objectives",
        f"{plural(len(shown), 'measured point')}; {best}drag along an axis to keep only the lines that pass there",
        height=520,
    )
    if not shown:
        return theme.note(figure, "no measured point has every objective yet")
    knobs = knob_values(shown)
    names = sorted(knobs, key=lambda k: -(importance or {}).get(k, 0.0))[:_MOST_KNOBS]
    width = 15 if len(names) + len(objectives) < 9 else 12
    dimensions = [_dimension(name, knobs[name], width) for name in names]
    dimensions.append(
        _dimension("load", [p.load.get("concurrency") or p.load.get("request_rate_rps") for p in shown], width)
    )
    dimensions += [_metric_dimension(name, [p.metrics[name] for p in shown]) for name in objectives]
    first = dimensions[-len(objectives)]
    figure.add_trace(
        go.Parcoords(
            dimensions=dimensions,
            line={
                "color": first["values"],
                "colorscale": "Cividis",
                "reversescale": get_metric(objectives[0]).sign > 0,
            },
            labelfont={"size": 11},
            tickfont={"size": 11},
            rangefont={"size": 1, "color": "rgba(0,0,0,0)"},
            unselected={"line": {"opacity": 0.04}},
        )
    )
    figure.update_layout(margin={"l": 80, "r": 80, "t": 140, "b": 30})
    return figure


def _dimension(name: str, values: Sequence[Any], width: int) -> dict[str, Any]:
    """An axis with one place for each value, in order: numbers by size, then texts."""
    numbers = sorted({v for v in values if _is_number(v)})
    texts = sorted({str(v) for v in values if not _is_number(v)})
    places: list[Any] = [*texts, *numbers]
    index = {(_is_number(v), v): i for i, v in enumerate(places)}
    step = -(-len(places) // 12)
    return {
        "label": _label(name, width),
        "values": [index[_is_number(v), v if _is_number(v) else str(v)] for v in values],
        "range": [-0.3, len(places) - 0.7],
        "tickvals": list(range(0, len(places), step)),
        "ticktext": [number_text(v) if _is_number(v) else theme.shorten(str(v), 13) for v in places[::step]],
    }


def _metric_dimension(name: str, values: Sequence[float]) -> dict[str, Any]:
    metric = get_metric(name)
    label = f"{theme.escape(metric.label.split(' (')[0])}<br>({theme.escape(metric.unit)})"
    limits, log = axis_range(values)
    if not log:
        return {"label": label, "values": list(values), "range": list(limits)}
    ticks = log_ticks(limits)
    return {
        "label": label,
        "values": [math.log10(v) for v in values],
        "range": [math.log10(v) for v in limits],
        "tickvals": [math.log10(v) for v in ticks],
        "ticktext": [number_text(v) for v in ticks],
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(name: str, width: int) -> str:
    """Two lines of so many characters: a third would run into the axis."""
    words = name.rsplit(".", 1)[-1].replace("_", " ")
    return theme.escape("\n".join(textwrap.wrap(words, width, max_lines=2, placeholder="…"))).replace("\n", "<br>")
