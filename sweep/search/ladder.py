"""Which load to measure next on a server that is up: a pure function of what this launch has measured so far.

Busiest first, since a configuration that cannot win there need not be asked at lighter loads. Between the levels of the
ladder, further ones are placed where something is decided: the largest load that still meets the SLA (bisected in the
logarithm), and the knee, where more load stops buying throughput. A configuration is given up once two loads in a row
are dominated by known points even at the good end of their uncertainty, at a stated confidence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from sweep.measure.workload import Load
from sweep.results.metrics import get_metric

_THROUGHPUT = "output_throughput_tok_s"
# Neighbouring levels closer than this factor are one: nothing is placed between them.
_CLOSE = 1.25
# The knee is where a doubling of the load no longer buys this share of throughput.
_KNEE_GAIN = 0.25
HOPELESS_LOADS = 2


@dataclass(frozen=True)
class LoadPoint:
    """One measured load of this launch. metrics: natural units; failed: it did not run. errors: relative, one sigma."""

    load: Load
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    failed: bool = False
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """A bound of the SLA: the metric must not be worse than value (its direction is the metric's own)."""

    metric: str
    value: float

    def met(self, point: LoadPoint) -> bool:
        found = point.metrics.get(self.metric)
        sign = get_metric(self.metric).sign
        return not point.failed and found is not None and sign * found <= sign * self.value


@dataclass(frozen=True)
class Incumbents:
    """Known points a launch has to beat. objectives: metric names; values: (points, objectives), natural units.

    confidence: with which a load must be dominated before it counts as such.
    """

    objectives: tuple[str, ...] = ()
    values: Sequence[Sequence[float]] = ()
    confidence: float = 0.95

    def dominate(self, point: LoadPoint) -> bool:
        """Whether a known point is better in every objective, even if this one is as good as its error allows."""
        found = [point.metrics.get(name) for name in self.objectives]
        if point.failed or not found or any(v is None for v in found):
            return point.failed
        reach = NormalDist().inv_cdf(self.confidence)
        hopeful = [
            get_metric(name).sign * float(v or 0.0) - reach * point.errors.get(name, 0.0) * abs(float(v or 0.0))
            for name, v in zip(self.objectives, found, strict=True)
        ]
        signs = [get_metric(name).sign for name in self.objectives]
        return any(all(s * k < h for s, k, h in zip(signs, row, hopeful, strict=True)) for row in self.values)


_NO_INCUMBENTS = Incumbents()


def next_load(
    points: Sequence[LoadPoint],
    ladder: Sequence[Load],
    limits: Sequence[Limit] = (),
    incumbents: Incumbents = _NO_INCUMBENTS,
    most: int = 12,
) -> Load | None:
    """The load to measure next, or None when this launch has told what it can.

    points: in order of measurement. ladder: busiest first. most: loads of one launch in all.
    """
    if len(points) >= most or hopeless(points, incumbents):
        return None
    known = {point.load.label for point in points}
    ahead = next((load for load in ladder if load.label not in known), None)
    if ahead is not None:
        return ahead
    # What replays a trace or ramps up has no level in between.
    if any(load.rate_scale is not None or load.ramp_from_rps is not None for load in ladder):
        return None
    ordered = sorted(points, key=lambda point: level(point.load))
    return _at_the_limit(ordered, limits, known) or _at_the_knee(ordered, known)


def hopeless(points: Sequence[LoadPoint], incumbents: Incumbents) -> bool:
    """Whether the last HOPELESS_LOADS measured loads were all beaten by known points."""
    last = points[-HOPELESS_LOADS:]
    return len(last) == HOPELESS_LOADS and all(incumbents.dominate(point) for point in last)


def level(load: Load) -> float:
    """How hard a load pushes: requests in flight, or per second."""
    return float(load.concurrency if load.concurrency is not None else load.request_rate_rps or 0.0)


def _between(low: Load, high: Load, known: set[str]) -> Load | None:
    """The geometric middle of two loads, None where they are as good as neighbours or it is known."""
    if level(high) / level(low) < _CLOSE:
        return None
    middle = math.sqrt(level(low) * level(high))
    if low.concurrency is not None:
        found = replace(low, concurrency=round(middle))
        if found.concurrency in (low.concurrency, high.concurrency):
            return None
    else:
        found = replace(low, request_rate_rps=float(f"{middle:.3g}"))
    return None if found.label in known else found


def _at_the_limit(ordered: Sequence[LoadPoint], limits: Sequence[Limit], known: set[str]) -> Load | None:
    """Between the busiest load that meets every bound and the next busier one, which does not."""
    if not limits:
        return None
    met = [all(limit.met(point) for limit in limits) for point in ordered]
    for below, above, good, bad in zip(ordered, ordered[1:], met, met[1:], strict=False):
        if good and not bad:
            return _between(below.load, above.load, known)
    return None


def _at_the_knee(ordered: Sequence[LoadPoint], known: set[str]) -> Load | None:
    """Between the last two loads over which a doubling still buys throughput, once: then the knee is placed."""
    running = [point for point in ordered if not point.failed and point.metrics.get(_THROUGHPUT)]
    for low, high in itertools.pairwise(running):
        doublings = math.log2(level(high.load) / level(low.load))
        gained = math.log2(float(high.metrics[_THROUGHPUT] or 1.0) / float(low.metrics[_THROUGHPUT] or 1.0))
        if doublings > 0 and gained / doublings < _KNEE_GAIN:
            return _between(low.load, high.load, known) if doublings > 1.0 else None
    return None
