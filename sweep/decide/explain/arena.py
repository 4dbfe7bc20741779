"""The points that can be on a front, as measured and as drawn, ready to compare fronts with and without some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from sweep.decide.explain.change import is_relative
from sweep.decide.explain.membership import unknown_spread
from sweep.errors import ConfigError, did_you_mean
from sweep.results.front import eligible, hypervolume, minimized, nondominated
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import COVERAGE, Spreads, minimized_draws, on_front

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

SURE = 0.95
LOSS, TWICE = 0.05, 2.0
DRAWS = 256


def at_load(points: Sequence[OperatingPoint], load: str | None) -> list[OperatingPoint]:
    """The points at one load, by its label; all for None. Raises ConfigError for a load that was not run."""
    if load is None:
        return list(points)
    found = [p for p in points if p.load_label == load]
    if not found:
        raise ConfigError(f"no point has the load '{load}'", did_you_mean(load, {p.load_label for p in points}))
    return found


def traded(objectives: Sequence[str]) -> tuple[str, ...]:
    """The objectives in which fronts are compared: without quality, unless fewer than two remain."""
    rest = tuple(name for name in objectives if not name.startswith("quality_"))
    return rest if len(rest) > 1 else tuple(objectives)


def spanned(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> tuple[str, ...]:
    """The objectives that are not 0 at every point: 10 % worse than 0 is 0, so such a one leaves no volume at all.

    A KL of exactly 0 everywhere is one: where nothing changes numerics, quality is no dimension. All if none is left.
    """
    return tuple(n for n in objectives if any(p.metrics[n] for p in points)) or tuple(objectives)


class Arena:
    """The points that have every objective, as measured and as drawn, with one reference point for all comparisons.

    Fronts are compared in `objectives`: those asked for, without quality if it is a price (see `traded`).
    """

    def __init__(
        self, points: Sequence[OperatingPoint], objectives: Sequence[str], *, quality_is_a_price: bool = True
    ) -> None:
        import numpy as np

        self.asked = tuple(objectives)
        self.points = eligible(points, self.asked)
        self.objectives = spanned(self.points, traded(objectives) if quality_is_a_price else self.asked)
        self.spreads = Spreads(points)
        self.unknown = unknown_spread(points, self.objectives)
        empty: FloatArray = np.empty((0, len(self.objectives)))
        self.measured = minimized(self.points, self.objectives) if self.points else empty
        self.drawn = minimized_draws(self.points, self.objectives, n=DRAWS)
        reference = hypervolume(self.points, self.objectives)
        self.limits = [] if reference is None else [
            get_metric(name).sign * reference.reference_point[name] for name in self.objectives
        ]  # fmt: skip
        if self.points:
            self._hopeful, self._safe = np.quantile(self.drawn, (0.005, 0.995), axis=0)

    def contenders(self, mask: BoolArray) -> BoolArray:
        """Which points of the mask may be on its front: not surely beaten by another of them."""
        import numpy as np

        safe = self._safe[mask]
        safe = safe[nondominated(safe)] if len(safe) else safe
        beaten = np.zeros(len(mask), dtype=bool)
        for row in safe:
            beaten |= (row < self._hopeful).all(axis=1)
        result: BoolArray = mask & ~beaten
        return result

    def volumes(self, mask: BoolArray) -> FloatArray:
        """Hypervolume of the masked points, (1 + draws,): as measured, then in each draw."""
        import moocore
        import numpy as np

        keep = self.contenders(mask) if mask.any() else mask
        if not keep.any():
            return np.zeros(1 + len(self.drawn))
        sets = [self.measured[mask], *self.drawn[:, keep]]
        return np.array([moocore.hypervolume(values, ref=self.limits) for values in sets])

    @cached_property
    def everything(self) -> FloatArray:
        """`volumes` of all points."""
        import numpy as np

        return self.volumes(np.ones(len(self.points), dtype=bool))

    def gain(self, mask: BoolArray) -> tuple[float | None, tuple[float, float] | None]:
        """What the masked points add to the hypervolume of the rest, as a share of it, and its 95 % interval."""
        if not mask.any():
            return None, None
        value, interval = relative_gain(self.everything, self.volumes(~mask))
        if value is None or interval is None or self.unknown:
            return (None if value is None else max(0.0, value)), None
        return max(0.0, value), (max(0.0, interval[0]), interval[1])

    def beaten(self, mask: BoolArray) -> dict[int, BoolArray]:
        """Points of the rest's front that a masked point beats in SURE of the draws -> which ones do, (points,).

        Not those that another point of the rest beats as well: they mark no frontier. And the same point has to beat it
        in all these draws: of many points near it, some other one always looks better.
        """
        import numpy as np

        rest, ours = np.flatnonzero(~mask), np.flatnonzero(self.contenders(mask))
        if not len(rest) or not len(ours):
            return {}
        found = {}
        for i in rest[nondominated(self.measured[rest])]:
            if beats(self.measured[rest], self.measured[i], self.objectives).any():
                continue
            able = ours[beats(self.measured[ours], self.measured[i], self.objectives)]
            sure = np.zeros(len(mask), dtype=bool)
            sure[able] = beats(self.drawn[:, able], self.drawn[:, [i]], self.objectives).mean(axis=0) >= SURE
            if sure.any():
                found[int(i)] = sure
        return found

    @cached_property
    def probability(self) -> FloatArray:
        """Of each point being on the front of all, (points,)."""
        import numpy as np

        keep = self.contenders(np.ones(len(self.points), dtype=bool))
        result = np.zeros(len(self.points))
        result[keep] = on_front(self.drawn[:, keep]).mean(axis=0)
        return result


def relative_gain(volumes: FloatArray, baseline: FloatArray) -> tuple[float | None, tuple[float, float] | None]:
    """volumes / baseline - 1 and its 95 % interval, of hypervolumes as measured and in each draw, (1 + draws,).

    None where the baseline dominates nothing: as measured, or in more draws than the interval leaves out.
    """
    import numpy as np

    if baseline[0] <= 0:
        return None, None
    value = float(volumes[0] / baseline[0] - 1)
    known = baseline[1:] > 0
    if known.mean() < COVERAGE:
        return value, None
    low, high = np.quantile(volumes[1:][known] / baseline[1:][known] - 1, ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    return value, (float(low), float(high))


def beats(ours: FloatArray, theirs: FloatArray, objectives: Sequence[str]) -> BoolArray:
    """Whether rows beat others, (..., objectives) -> (...), lower is better in all.

    They do if they are at least TWICE as much better in one objective as worse in any other, and worse in none by more
    than LOSS, as factors. Quality has no such slack, and buys none.
    """
    import numpy as np

    factors = np.array([is_relative(name) for name in objectives], dtype=bool)
    if not factors.any():
        return np.zeros(np.broadcast_shapes(ours.shape, theirs.shape)[:-1], dtype=bool)
    both = (ours * theirs > 0) & factors
    change = np.ones(both.shape)
    np.divide(ours, theirs, where=both, out=change)
    change = np.log(change) * np.where(ours + theirs < 0, -1.0, 1.0)  # minimized, a maximized metric is negative
    change = np.where(both, change, np.where(ours > theirs, np.inf, 0.0))
    worst, best = change.max(axis=-1), change.min(axis=-1)
    result: BoolArray = (worst <= math.log(1 + LOSS)) & (best < 0) & (-best >= TWICE * worst)
    return result
