"""Which load a launch measures next, and when it need not go on: pure functions of what is known by then.

The loads it was asked for come first, busiest first. Between two of them further levels may be placed where something
is decided: the highest load that still meets the bounds (bisected in the logarithm), and the knee, where more load
stops buying throughput. Middles are the same for every configuration, and a level of the study's own ladder is
preferred, so that others were measured there too.

A configuration is cut, its lighter loads unmeasured, when at least HOPELESS_LOADS loads were measured and each of them
is dominated by a known point: worse in every objective by more than the errors of both explain, at the stated
confidence (shared out over the objectives, Bonferroni). That confidence is about the loads that were measured; that
lighter ones would be dominated too is concluded from them. Where a spread is unknown nothing is cut.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from sweep.launch.spec import LaunchSpec
from sweep.measure.workload import Load
from sweep.results.metrics import get_metric
from sweep.results.records import DOMINATED, PointRecord, PointState
from sweep.results.uncertainty import COVERAGE, t_quantile

HOPELESS_LOADS = 2
_THROUGHPUT = "output_throughput_tok_s"
# Neighbouring levels closer than this factor are one: nothing is placed between them.
_CLOSE = 1.25
# The knee is where a doubling of the load no longer buys this share of throughput.
_KNEE_GAIN = 0.25


@dataclass(frozen=True)
class LoadPoint:
    """One load of this configuration. metrics: natural units; run_se: standard errors within the run, same units."""

    load: Load
    state: PointState = "measured"
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    run_se: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, record: PointRecord) -> LoadPoint:
        reach = 2 * NormalDist().inv_cdf((1 + COVERAGE) / 2)
        run_se = {name: (high - low) / reach for name, (low, high) in record.intervals.items()}
        return cls(Load.from_dict(record.load), record.state, record.metrics, run_se)


@dataclass(frozen=True)
class Limit:
    """A bound: the metric must not be worse than value (its direction is the metric's own)."""

    metric: str
    value: float

    def met(self, point: LoadPoint) -> bool | None:
        """None where the metric has no value: too few requests for a percentile, say."""
        if point.state == "failed":
            return False
        found, sign = point.metrics.get(self.metric), get_metric(self.metric).sign
        return None if found is None else sign * found <= sign * self.value


@dataclass(frozen=True)
class Rival:
    """A measured point of another configuration. values, errors: objective -> value and its standard error.

    tied: objectives that are the same by construction: the quality of the same numerics.
    """

    point_id: str
    values: Mapping[str, float]
    errors: Mapping[str, float]
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class LadderRules:
    """What a launch goes by beyond its list of loads, as plain JSON in its spec (LaunchSpec.ladder). Empty: the list.

    extra: levels it may place. limits: bounds whose highest load is looked for. known: this configuration's points of
    earlier launches. confidence, objectives, rivals: of a cut. spreads: metric -> (launch-to-launch coefficient of
    variation, its degrees of freedom). quality: metric -> (value, standard error) that all its points will have.
    """

    extra: int = 0
    limits: tuple[Limit, ...] = ()
    known: tuple[LoadPoint, ...] = ()
    confidence: float | None = None
    objectives: tuple[str, ...] = ()
    rivals: tuple[Rival, ...] = ()
    spreads: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    quality: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: LaunchSpec) -> LadderRules:
        """Inverse of dataclasses.asdict, as spec.ladder holds it."""
        values = dict(spec.ladder)
        for name, part in (("limits", Limit), ("rivals", Rival)):
            values[name] = tuple(part(**x) for x in values.get(name, ()))
        known = values.get("known", ())
        values["known"] = tuple(LoadPoint(**{**x, "load": Load.from_dict(x["load"])}) for x in known)
        rules = cls(**values)
        # Numerics of its own after all: what was known of the quality is another engine's.
        return replace(rules, rivals=()) if spec.distinct_numerics else rules


def next_load(
    points: Sequence[LoadPoint], asked: Sequence[Load], rules: LadderRules, grid: Sequence[Load] = ()
) -> Load | None:
    """The load to measure next, or None when this launch has told what it can.

    points: of this launch so far. asked: busiest first. grid: the study's ladder.
    """
    seen = {point.load.label for point in points}
    ahead = next((load for load in asked if load.label not in seen), None)
    if ahead is not None:
        return None if hopeless(points, rules) else ahead
    if len(points) >= len(asked) + rules.extra:
        return None
    curves = list(_curves([*rules.known, *points]))
    for place in (_at_the_limit, _at_the_knee):
        for curve in curves:
            pair = place(curve, rules)
            if pair is None or all(_dominator(p, rules) for p in pair):
                continue
            found = _between(pair[0].load, pair[1].load, {p.load.label for p in (*rules.known, *points)}, grid)
            if found is not None:
                return found
    return None


def hopeless(points: Sequence[LoadPoint], rules: LadderRules) -> bool:
    """Whether all that was measured of this configuration is dominated, HOPELESS_LOADS of it by this launch."""
    measured = [p for p in points if p.state == "measured"]
    earlier = [p for p in rules.known if p.state == "measured"]
    return len(measured) >= HOPELESS_LOADS and all(_dominator(p, rules) for p in (*measured, *earlier))


def cut_records(spec: LaunchSpec, points: Sequence[LoadPoint], rules: LadderRules, at: str) -> list[PointRecord]:
    """The facts that a cut leaves: every load that was asked for and not reached, with what dominates the others.

    at: the time, ISO 8601. proof of each: {"cut": {"confidence", "dominated": [{"load", "by", "values"}]}}.
    """
    seen = {point.load.label for point in points}
    cut = [load for load in map(Load.from_dict, spec.loads) if load.label not in seen]
    if not cut or not hopeless(points, rules):
        return []
    found = [(p.load.label, _dominator(p, rules)) for p in points if p.state == "measured"]
    dominated = [(label, rival) for label, rival in found if rival is not None]
    evidence = [{"load": label, "by": rival.point_id, "values": dict(rival.values)} for label, rival in dominated]
    by = ", ".join(f"{label} by {rival.point_id}" for label, rival in dominated)
    return [
        PointRecord(
            **spec.point_identity(load),
            state="cut",
            cause=DOMINATED,
            detail=f"every busier load is dominated at {rules.confidence:.0%} confidence ({by})",
            proof={"cut": {"confidence": rules.confidence, "dominated": evidence}},
            started_at=at,
            finished_at=at,
        )
        for load in cut
    ]


def busiest_first(loads: Iterable[Load]) -> tuple[Load, ...]:
    """In the order of a ladder: closed loops, rates, speeds of a trace, each busiest first."""
    return tuple(sorted(loads, key=lambda x: (x.concurrency is None, x.rate_scale is not None, -_level(x))))


def _dominator(point: LoadPoint, rules: LadderRules) -> Rival | None:
    """A rival that dominates this point beyond the errors of both; None where there is none, or too little is known."""
    if rules.confidence is None or not rules.objectives or point.state != "measured":
        return None
    each = 1 - (1 - rules.confidence) / len(rules.objectives)
    return next((rival for rival in rules.rivals if _dominates(rival, point, rules, each)), None)


def _dominates(rival: Rival, point: LoadPoint, rules: LadderRules, confidence: float) -> bool:
    """Worse in every objective that is not the same by construction, each at this confidence."""
    for name in rules.objectives:
        if name in rival.tied:
            continue
        own = _value(point, name, rules)
        if own is None or name not in rival.values or name not in rival.errors:
            return False
        value, error, degrees = own
        gap = get_metric(name).sign * (value - rival.values[name])
        if gap <= 0 or gap < t_quantile(confidence, degrees) * math.hypot(error, rival.errors[name]):
            return False
    return len(rival.tied) < len(rules.objectives)


def _value(point: LoadPoint, name: str, rules: LadderRules) -> tuple[float, float, int | None] | None:
    """(value, standard error, degrees of freedom) of an objective; None where one of them is unknown.

    Between launches and within the run: the larger, as results.uncertainty joins them.
    """
    if name in rules.quality:
        return (*rules.quality[name], None)
    value = point.metrics.get(name)
    if value is None or name not in rules.spreads:
        return None
    cv, degrees = rules.spreads[name]
    return value, max(cv * abs(value), point.run_se.get(name, 0.0)), degrees


def _level(load: Load) -> float:
    """How hard a load pushes: requests in flight, or per second."""
    return float(load.concurrency if load.concurrency is not None else load.request_rate_rps or 0.0)


def _kind(load: Load) -> tuple[bool, float] | None:
    """What two loads have in common that differ in their level alone; None for one without levels beside it."""
    steady = load.rate_scale is None and load.ramp_from_rps is None
    return (load.concurrency is None, load.burstiness) if steady else None


def _curves(points: Iterable[LoadPoint]) -> Iterable[list[LoadPoint]]:
    """The points between which there are levels, lightest first: closed loops, and rates with the same arrivals.

    What ramps up or replays a trace has none. A quarantined point says nothing.
    """
    curves: dict[tuple[bool, float], dict[str, LoadPoint]] = defaultdict(dict)
    for point in points:
        if point.state in ("measured", "failed") and (kind := _kind(point.load)) is not None:
            curves[kind][point.load.label] = point
    return (sorted(curve.values(), key=lambda p: _level(p.load)) for curve in curves.values())


def _at_the_limit(curve: Sequence[LoadPoint], rules: LadderRules) -> tuple[LoadPoint, LoadPoint] | None:
    """The busiest load that meets every limit, and the next busier one, which does not; None without either."""
    if not rules.limits:
        return None
    told = [(point, [limit.met(point) for limit in rules.limits]) for point in curve]
    known = [(point, all(met)) for point, met in told if None not in met or False in met]
    best = max((i for i, (_, met) in enumerate(known) if met), default=None)
    return None if best is None or best + 1 == len(known) else (known[best][0], known[best + 1][0])


def _at_the_knee(curve: Sequence[LoadPoint], _: LadderRules) -> tuple[LoadPoint, LoadPoint] | None:
    """The first two neighbours over which a doubling buys little; None once they are no more than a doubling apart."""
    running = [point for point in curve if point.state == "measured" and point.metrics.get(_THROUGHPUT)]
    for low, high in itertools.pairwise(running):
        doublings = math.log2(_level(high.load) / _level(low.load))
        gained = math.log2(float(high.metrics[_THROUGHPUT] or 1.0) / float(low.metrics[_THROUGHPUT] or 1.0))
        if gained / doublings < _KNEE_GAIN:
            return (low, high) if doublings > 1.0 else None
    return None


def _between(low: Load, high: Load, seen: set[str], grid: Sequence[Load]) -> Load | None:
    """The level of the grid nearest to their geometric middle, else that; None where nothing new lies between."""
    if _level(high) / _level(low) < _CLOSE:
        return None
    middle = math.sqrt(_level(low) * _level(high))
    kin = (x for x in grid if _kind(x) == _kind(low) and x.label not in seen)
    inside = [x for x in kin if _level(low) < _level(x) < _level(high)]
    if inside:
        return min(inside, key=lambda x: abs(math.log(_level(x) / middle)))
    if low.concurrency is not None:
        found = replace(low, concurrency=round(middle))
    else:
        found = replace(low, request_rate_rps=float(f"{middle:.3g}"))
    return found if _level(low) < _level(found) < _level(high) and found.label not in seen else None
