"""How far the true value of a metric may lie from a point's measured one, and what that leaves open about the front.

Three sources, joined on the relative scale (latencies, rates and costs spread in proportion to their size):

* between launches: the coefficient of variation of a point's repeats. Two or three repeats know little of their own
  spread, so it is moderated by the spread pooled over the study (Smyth 2004, eq. 7), which counts as at most
  PRIOR_DEGREES further repeats:  s² = (d cv² + d0 cv0²) / (d + d0), d = n - 1, with Student's t on d + d0 degrees.
  A point measured once has the pooled spread. Where nothing in the study was repeated, this source is unknown.
* within a run: the standard error behind the interval of its requests (measure.intervals), with the normal's quantile:
  a run has many. Repeats contain it too, so the source that reaches farther counts, never their sum: two launches that
  agree by chance do not deny what each of them left open. Alone it is a lower limit.
* quality: the standard error of its one measurement. It belongs to the numerics fingerprint: all points that share a
  fingerprint share one draw.

Objectives of one point are drawn independently, although cost and latency of one run move together; so a probability
of being on the front is a little too open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

from sweep.results.front import eligible, nondominated
from sweep.results.metrics import get_metric

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sweep.results.points import OperatingPoint

    FloatArray = npt.NDArray[np.float64]
    BoolArray = npt.NDArray[np.bool_]

COVERAGE = 0.95
PRIOR_DEGREES = 4
DRAWS = 512


@dataclass(frozen=True)
class Spread:
    """standard_error: of the point's value, in the metric's unit. degrees: of freedom, None for a normal.

    source: "repeats", "study" (the pooled spread of other points' repeats), "requests" (one run's own) or "quality".
    """

    standard_error: float
    degrees: int | None
    source: str

    @property
    def reach(self) -> float:
        """Half the width of the 95 % interval, in the metric's unit."""
        return t_quantile((1 + COVERAGE) / 2, self.degrees) * self.standard_error


class Spreads:
    """The spread of every metric of every point of one study."""

    def __init__(self, points: Sequence[OperatingPoint]) -> None:
        squares: dict[str, float] = {}
        degrees: dict[str, int] = {}
        for p in points:
            for name, sd in p.sd.items():
                if p.metrics[name]:
                    squares[name] = squares.get(name, 0.0) + (p.n_repeats - 1) * (sd / p.metrics[name]) ** 2
                    degrees[name] = degrees.get(name, 0) + p.n_repeats - 1
        self._pooled = {name: (squares[name] / degrees[name], degrees[name]) for name in squares if degrees[name]}

    def pooled_cv(self, metric: str) -> float | None:
        """Launch-to-launch coefficient of variation over all repeated points; None where nothing was repeated."""
        pooled = self._pooled.get(metric)
        return None if pooled is None else math.sqrt(pooled[0])

    def pooled(self, metric: str) -> tuple[float, int] | None:
        """(pooled_cv, degrees of freedom) of a point that was measured once; None where nothing was repeated."""
        pooled = self._pooled.get(metric)
        return None if pooled is None else (math.sqrt(pooled[0]), min(pooled[1], PRIOR_DEGREES))

    def of(self, point: OperatingPoint, metric: str) -> Spread | None:
        """None where nothing tells, and for a value that was not measured."""
        value = point.metrics.get(metric)
        if value is None:
            return None
        if metric in point.quality_se:
            return Spread(point.quality_se[metric], None, "quality")
        own = point.n_repeats - 1 if metric in point.sd and value else 0
        cv0_squared, others = self._pooled.get(metric, (0.0, 0))
        prior = min(others, PRIOR_DEGREES)
        within = point.run_se.get(metric, 0.0)
        if not own + prior or not value:
            return Spread(within, None, "requests") if within else None
        cv_squared = (point.sd[metric] / value) ** 2 if own else 0.0
        moderated = (own * cv_squared + prior * cv0_squared) / (own + prior)
        between = abs(value) * math.sqrt(moderated / max(point.n_repeats, 1))
        launches = Spread(between, own + prior, "repeats" if own else "study")
        return max(launches, Spread(within, None, "requests"), key=lambda spread: spread.reach)


def interval(value: float, spread: Spread) -> tuple[float, float]:
    """The 95 % interval around a measured value, in its unit. A positive value spreads by a factor, never below 0."""
    reach = spread.reach
    if value > 0 and spread.source != "quality":
        return value * math.exp(-reach / value), value * math.exp(reach / value)
    low = value - reach
    return (max(0.0, low) if value >= 0 else low), value + reach


def with_intervals(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """The same points with the 95 % interval of each metric whose spread is known."""
    spreads = Spreads(points)
    return [replace(p, intervals=_intervals(p, spreads)) for p in points]


def _intervals(point: OperatingPoint, spreads: Spreads) -> dict[str, tuple[float, float]]:
    found = {}
    for name, value in point.metrics.items():
        spread = spreads.of(point, name)
        if spread is not None:
            found[name] = interval(value, spread)
    return found


def draws(points: Sequence[OperatingPoint], objectives: Sequence[str], *, n: int = DRAWS, seed: int = 0) -> FloatArray:
    """Plausible true values, (n, points, objectives), in natural units.

    A value of unknown spread is drawn as measured: ask Spreads which. Raises KeyError for a point without the metric.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    spreads = Spreads(points)
    result = np.empty((n, len(points), len(objectives)))
    for k, name in enumerate(objectives):
        shared: dict[str, FloatArray] = {}
        for i, p in enumerate(points):
            value, spread = p.metrics[name], spreads.of(p, name)
            if spread is None:
                result[:, i, k] = value
                continue
            if spread.source == "quality":
                noise = shared.setdefault(p.fingerprint, rng.standard_normal(n))
                result[:, i, k] = np.maximum(0.0, value + noise * spread.standard_error)
                continue
            noise = rng.standard_normal(n) if spread.degrees is None else rng.standard_t(spread.degrees, n)
            step = noise * spread.standard_error
            result[:, i, k] = value * np.exp(np.clip(step / value, -5, 5)) if value > 0 else value + step
    return result


def minimized_draws(
    points: Sequence[OperatingPoint], objectives: Sequence[str], *, n: int = DRAWS, seed: int = 0
) -> FloatArray:
    """draws, with lower better in every objective, (n, points, objectives)."""
    import numpy as np

    signs = np.array([get_metric(name).sign for name in objectives])
    minimized: FloatArray = draws(points, objectives, n=n, seed=seed) * signs
    return minimized


def on_front(minimized: FloatArray) -> BoolArray:
    """Whether each point is non-dominated in each draw, (n, points), of minimized_draws."""
    import numpy as np

    result = np.zeros(minimized.shape[:2], dtype=bool)
    for row, values in zip(result, minimized, strict=True):
        row[:] = nondominated(values)
    return result


def front_probability(
    points: Sequence[OperatingPoint], objectives: Sequence[str], *, n: int = DRAWS, seed: int = 0
) -> dict[str, float]:
    """point_id -> share of draws in which the point is on the front, for the eligible points."""
    candidates = eligible(points, objectives)
    if not candidates:
        return {}
    share = on_front(minimized_draws(candidates, objectives, n=n, seed=seed)).mean(axis=0)
    return {p.point_id: float(s) for p, s in zip(candidates, share, strict=True)}


def run_standard_errors(intervals: Sequence[Mapping[str, Sequence[float]]], n_repeats: int) -> dict[str, float]:
    """Standard errors of the mean over runs, from each run's 95 % intervals: half the width / 1.96, over sqrt(n)."""
    z = NormalDist().inv_cdf((1 + COVERAGE) / 2)
    names = set.intersection(*(set(i) for i in intervals)) if intervals else set()
    return {
        name: math.sqrt(fmean(((i[name][1] - i[name][0]) / 2 / z) ** 2 for i in intervals) / n_repeats)
        for name in sorted(names)
    }


def t_cdf(t: float, degrees: int | None) -> float:
    """P(T <= t): Abramowitz & Stegun 26.7.3 and 26.7.4, exact for whole degrees of freedom; None is the normal."""
    if degrees is None:
        return NormalDist().cdf(t)
    angle = math.atan(t / math.sqrt(degrees))
    odd, cosine = degrees % 2, math.cos(angle)
    term = total = (cosine if odd else 1.0) if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    inside = math.sin(angle) * total
    within = 2 / math.pi * (angle + inside) if odd else inside
    return min(1.0, max(0.0, (1 + within) / 2))


@lru_cache
def t_quantile(probability: float, degrees: int | None) -> float:
    """The t with P(T <= t) = probability, for a probability of at least one half."""
    if degrees is None:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return high
