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


Corner = tuple[float, float, float]
Box = tuple[Corner, Corner]


def faces(values: Sequence[tuple[float, ...]], worst: tuple[float, ...]) -> list[Box]:
    """The rectangles that bound what (n, 3) values dominate, up to the worst corner; lower is better everywhere.

    Each is (lowest, highest corner), flat in one axis: the three-dimensional staircase. For every axis in turn the
    values are swept from best to worst; each adds the rectangles it is the first to dominate at its own level.
    """
    inside = [v for v in values if all(a < w for a, w in zip(v, worst, strict=True))]
    found: list[Box] = []
    for axis in range(3):
        u, v = (k for k in range(3) if k != axis)
        steps: list[tuple[float, float]] = []  # the staircase of what has been swept: first rising, second falling
        for value in sorted(inside, key=lambda w: (w[axis], w[u], w[v])):
            for low, high in _newly_dominated(steps, (value[u], value[v]), (worst[u], worst[v])):
                corners = []
                for a, b in (low, high):
                    corner = [0.0, 0.0, 0.0]
                    corner[axis], corner[u], corner[v] = value[axis], a, b
                    corners.append((corner[0], corner[1], corner[2]))
                found.append((corners[0], corners[1]))
    return found


def _newly_dominated(
    steps: list[tuple[float, float]], point: tuple[float, float], worst: tuple[float, float]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The rectangles (low, high) that point adds to what steps dominate. Puts the point into steps."""
    before = [s for s in steps if s[0] <= point[0]]
    ceiling = before[-1][1] if before else worst[1]
    if ceiling <= point[1]:
        return []
    added, left = [], point[0]
    beaten = [s for s in steps if s[0] > point[0] and s[1] >= point[1]]
    after = next((s for s in steps if s[0] > point[0] and s[1] < point[1]), None)
    for s in beaten:
        added.append(((left, point[1]), (s[0], ceiling)))
        left, ceiling = s
    added.append(((left, point[1]), (after[0] if after else worst[0], ceiling)))
    kept = [s for s in steps if s not in beaten and not (s[0] == point[0] and s[1] >= point[1])]
    steps[:] = sorted([*kept, point])
    return [(low, high) for low, high in added if low[0] < high[0] and low[1] < high[1]]
