"""The figure's maths without a figure: corners of a staircase, limits and ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from sweep.results.metrics import Metric


def staircase(
    values: Sequence[tuple[float, float]], x: Metric, y: Metric, worst: tuple[float, float]
) -> list[tuple[float, float]]:
    """Corners of the boundary of what (x, y) values dominate, from the worst y to the worst x.

    values: measured pairs in the metrics' own units; dominated ones are left out. worst: where the two outer
    arms end. Every second corner is a measured point; the corners between are the worse of both neighbours.
    """
    best: list[tuple[float, float]] = []
    for u, v in sorted((x.sign * a, y.sign * b) for a, b in values):  # minimized
        if not best or v < best[-1][1]:
            best.append((u, v))
    if not best:
        return []
    corners = [(best[0][0], max(best[0][1], y.sign * worst[1])), best[0]]
    for (_, v_before), (u, v) in pairwise(best):
        corners += [(u, v_before), (u, v)]
    corners.append((max(best[-1][0], x.sign * worst[0]), best[-1][1]))
    return [(x.sign * u, y.sign * v) for u, v in corners]


def axis_range(values: Sequence[float]) -> tuple[tuple[float, float], bool]:
    """A padded (low, high) and whether a log axis serves better: all positive and over a factor of 20."""
    if not values:
        return (0.0, 1.0), False
    low, high = min(values), max(values)
    if low > 0 and high / low > 20:
        pad = (high / low) ** 0.06
        return (low / pad, high * pad), True
    if low == high == 0:
        return (-0.05, 1.0), False
    pad = 0.08 * (high - low) or 0.1 * abs(high)
    return (low - pad, high + pad), False


def log_ticks(limits: tuple[float, float]) -> list[float]:
    """1-2-5 ticks of each decade inside the limits."""
    first, last = math.floor(math.log10(limits[0])), math.ceil(math.log10(limits[1]))
    ticks = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    return [t for t in ticks if limits[0] <= t <= limits[1]]
