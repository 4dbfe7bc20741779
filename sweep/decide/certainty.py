"""How sure it is that a point keeps a bound, and the margin a person asks for.

How far a true value may lie from the measured one is results.uncertainty's: repeats, moderated by the spread pooled
over the study; a run's own requests; quality's standard error. With standard error s and Student's t of its degrees of
freedom (the normal where they are None), a positive value v spreads by a factor:

    P(true value <= bound) = T(ln(bound / v) v / s)

Quality spreads by a difference: T((bound - v) / s). Where nothing tells of a spread the answer is None, never 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweep.decide.sla import Bound
from sweep.errors import SlaError
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import Spread, Spreads, t_cdf, t_quantile

NO_SPREAD = "no spread known"
METHOD = (
    "Student's t on repeats, moderated by the study's pooled spread; 'one run' counts its own requests only, "
    "not what differs between launches"
)
SOURCES = {
    "repeats": "from its repeats",
    "study": "from the spread of other points' repeats",
    "requests": "from one run",
    "quality": "from its standard error",
}


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

    def __str__(self) -> str:
        parts = [f"{100 * self.headroom:.3g} % headroom"] if self.headroom else []
        parts += [f"confidence {self.confidence:.4g}"] if self.confidence is not None else []
        return " and ".join(parts)


class Judge:
    """Judges bounds at the points of one study, whose repeats say how far to trust each of them."""

    def __init__(self, points: Sequence[OperatingPoint], demand: Demand | None = None) -> None:
        self.demand = demand or Demand()
        self._spreads = Spreads(points)

    def as_measured(self) -> Judge:
        """The same without headroom and confidence."""
        judge = Judge((), Demand())
        judge._spreads = self._spreads
        return judge

    def spread(self, point: OperatingPoint, metric: str) -> Spread | None:
        """How far the true value may lie from the measured one; None where nothing tells."""
        agreed = point.n_repeats > 1 and point.sd.get(metric) == 0
        if agreed and metric == "startup_s":
            return None  # repeats within one launch share its start-up: their agreement is no evidence
        if agreed and not point.metrics[metric]:
            return Spread(0.0, point.n_repeats - 1, "repeats")  # a count that was 0 every time
        return self._spreads.of(point, metric)

    def probability(self, point: OperatingPoint, bound: Bound) -> float | None:
        """P(the true value keeps the bound), 0 to 1; None where no spread is known."""
        known = self.spread(point, bound.metric)
        if known is None:
            return None
        value, sign = point.metrics[bound.metric], get_metric(bound.metric).sign
        if known.standard_error == 0:
            return float(bound.meets(value))
        if _by_factor(value, known):
            if bound.value <= 0:
                return float(bound.meets(value))
            return t_cdf(sign * math.log(bound.value / value) * value / known.standard_error, known.degrees)
        return t_cdf(sign * (bound.value - value) / known.standard_error, known.degrees)

    def all_at_least(self, point: OperatingPoint, bounds: Iterable[Bound]) -> float | None:
        """A lower limit on P(every bound holds), whatever depends on what (Bonferroni); None if one is unknown."""
        chances = [self.probability(point, b) for b in bounds]
        known = [p for p in chances if p is not None]
        return max(0.0, 1 - sum(1 - p for p in known)) if known and len(known) == len(chances) else None

    def better(self, one: OperatingPoint, other: OperatingPoint, metric: str) -> float | None:
        """P(one is truly better than the other in this metric): Welch's t on the logarithms of positive values."""
        spreads = self.spread(one, metric), self.spread(other, metric)
        a, b = one.metrics[metric], other.metrics[metric]
        if spreads[0] is None or spreads[1] is None:
            return None
        by_factor = a > 0 and b > 0
        scales = (a, b) if by_factor else (1.0, 1.0)
        variances = [(s.standard_error / by) ** 2 for s, by in zip(spreads, scales, strict=True) if s is not None]
        distance = (math.log(b / a) if by_factor else b - a) * get_metric(metric).sign
        total = sum(variances)
        if total == 0:
            return 0.5 if distance == 0 else float(distance > 0)
        parts = [v**2 / s.degrees for v, s in zip(variances, spreads, strict=True) if s is not None and s.degrees]
        degrees = max(1, int(total**2 / sum(parts))) if sum(parts) else None
        return t_cdf(distance / math.sqrt(total), degrees)

    def needed(self, point: OperatingPoint, bound: Bound) -> float | None:
        """The bound this point would just keep, in the metric's unit; None if it keeps none with this confidence.

        Without headroom and confidence it is the measured value.
        """
        value, sign = point.metrics[bound.metric], get_metric(bound.metric).sign
        if self.demand.confidence is not None:
            known = self.spread(point, bound.metric)
            if known is None:
                return None
            reach = sign * t_quantile(self.demand.confidence, known.degrees) * known.standard_error
            value = value * math.exp(reach / value) if _by_factor(value, known) else value + reach
        if self.demand.headroom:
            if get_metric(bound.metric).unit == "fraction" and sign < 0:
                value = 1 - (1 - value) / (1 - self.demand.headroom)
            else:
                value /= 1 - sign * self.demand.headroom
        return value

    def meets(self, point: OperatingPoint, bound: Bound) -> bool:
        """Whether the point keeps the bound with the headroom and the confidence asked for."""
        needed = self.needed(point, bound)
        return needed is not None and bound.meets(needed)

    def meets_all(self, point: OperatingPoint, bounds: Iterable[Bound]) -> bool:
        return all(self.meets(point, b) for b in bounds)


def _by_factor(value: float, spread: Spread) -> bool:
    return value > 0 and spread.source != "quality"
