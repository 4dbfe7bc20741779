"""Error bars, the same in every figure: from a value to the ends of its 95 % interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sweep.results.points import OperatingPoint


def bars(reach: Iterable[tuple[float, float, float]], **style: Any) -> dict[str, Any]:
    """Plotly's error_x, error_y or error_z. reach: (value, low, high) of each marker; style as Plotly has it."""
    rows = list(reach)
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for value, _, high in rows],
        "arrayminus": [value - low for value, low, _ in rows],
        **style,
    }


def point_bars(points: Sequence[OperatingPoint], metric: str, **style: Any) -> dict[str, Any]:
    """Bars of one metric of points that have it; none where its spread is unknown."""
    return bars(((v := p.metrics[metric], *p.intervals.get(metric, (v, v))) for p in points), **style)
