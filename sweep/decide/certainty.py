"""How sure it is that a point keeps a bound: probabilities from its repeats, and the margin a person asks for.

A measured value is the mean of n repeats with sample standard deviation sd. Taking repeats as independent and
normally distributed, (mean - true value) / (sd / sqrt(n)) follows Student's t with n - 1 degrees of freedom, so

    P(value <= bound) = T_{n-1}((bound - mean) / (sd / sqrt(n)))

The normal distribution is its limit for many repeats; for two or three it would claim too much. quality_* are not
repeated: their standard error comes from one measurement over many positions, and the normal distribution is used.
One measurement has no spread, and neither has a value that all repeats share by construction: the answer is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sweep.decide.sla import Bound
from sweep.errors import SlaError
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import t_cdf, t_quantile

NO_SPREAD = "measured once: no spread known"
METHOD = "Student's t over the repeats; normal with its own standard error for quality"


@dataclass(frozen=True)
class Spread:
    """standard_error: of the point's value, in the metric's unit. degrees: of freedom, None for a normal."""

    standard_error: float
    degrees: int | None


def spread(point: OperatingPoint, metric: str) -> Spread | None:
    """How far the true value may lie from the measured one; None where nothing tells."""
    if metric in point.quality_se:
        return Spread(point.quality_se[metric], None)
    # Repeats of one launch share its start-up: their agreement is no evidence.
    if metric not in point.sd or point.n_repeats < 2 or metric == "startup_s":
        return None
    return Spread(point.sd[metric] / math.sqrt(point.n_repeats), point.n_repeats - 1)


def probability(point: OperatingPoint, bound: Bound) -> float | None:
    """P(the true value keeps the bound), 0 to 1; None where no spread is known."""
    known = spread(point, bound.metric)
    if known is None:
        return None
    value = point.metrics[bound.metric]
    if known.standard_error == 0:
        return float(bound.meets(value))
    to_spare = get_metric(bound.metric).sign * (bound.value - value)
    return t_cdf(to_spare / known.standard_error, known.degrees)


@dataclass(frozen=True)
class Demand:
    """What keeping a bound means. headroom: fraction of the bound left free. confidence: probability, None for any.

    headroom moves a bound towards the better side by that fraction of it; a fraction that is bounded from below
    (agreement >= 98 %) keeps the fraction of its distance to 1. confidence is asked of each bound by itself.
    Raises SlaError for a headroom outside [0, 1) or a confidence outside [0.5, 1).
    """

    headroom: float = 0.0
    confidence: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise SlaError(f"headroom={self.headroom:g} is not from 0 up to 1", "0.1 keeps 10 % of each bound free")
        if self.confidence is not None and not 0.5 <= self.confidence < 1:
            raise SlaError(f"confidence={self.confidence:g} is not from 0.5 up to 1", "for example 0.9")

    def needed(self, point: OperatingPoint, bound: Bound) -> float | None:
        """The bound this point would just keep, in the metric's unit; None if it keeps none with this confidence.

        Without headroom and confidence it is the measured value.
        """
        value, sign = point.metrics[bound.metric], get_metric(bound.metric).sign
        if self.confidence is not None:
            known = spread(point, bound.metric)
            if known is None:
                return None
            value += sign * t_quantile(self.confidence, known.degrees) * known.standard_error
        if self.headroom:
            if get_metric(bound.metric).unit == "fraction" and sign < 0:
                value = 1 - (1 - value) / (1 - self.headroom)
            else:
                value /= 1 - sign * self.headroom
        return value

    def meets(self, point: OperatingPoint, bound: Bound) -> bool:
        """Whether the point keeps the bound with the headroom and the confidence asked for."""
        needed = self.needed(point, bound)
        return needed is not None and bound.meets(needed)

    def __str__(self) -> str:
        parts = [f"{100 * self.headroom:.3g} % headroom"] if self.headroom else []
        parts += [f"confidence {self.confidence:.4g}"] if self.confidence is not None else []
        return " and ".join(parts)
