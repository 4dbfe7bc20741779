"""Choose one operating point for an SLA: the measured point that meets every bound and is best in one metric.

Nothing is interpolated and no bound is relaxed: either a measured point meets all of them, or the answer is
Infeasible with the nearest point and by how much it misses. The rules:

* Only measured points with the target and every bounded metric take part.
* Points whose target is within 1 % of the best are ties: the one that overrides fewest engine arguments wins
  (easier to run and to explain), then the better target.
* The cost of a bound is what dropping it alone would gain: best target without it against the chosen one.
* A headroom and a confidence, where asked for, are part of meeting a bound: see certainty.Demand.
* Where a number of devices is stated, a point takes part only if the traffic fits on them (fleet.py).
* Infeasible: for each bound the smallest relaxation of it alone that lets some point through, and of all bounds
  together the one whose largest relaxation, as a fraction of its bound, is smallest: the nearest point's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from sweep.decide.answer import BoundReport, Infeasible, Miss, PickResult, Relaxation
from sweep.decide.capacity import Traffic, capacity
from sweep.decide.certainty import NO_SPREAD, SOURCES, Demand, Judge
from sweep.decide.fleet import devices_for, smallest_fleet
from sweep.decide.rival import clear_winner, rival
from sweep.decide.sla import Bound, Sla
from sweep.decide.wording import engine_items, plural, point_value_text, shared_settings, value_text
from sweep.errors import SlaError, StudyError
from sweep.results.front import eligible
from sweep.results.metrics import Metric, get_metric
from sweep.results.points import OperatingPoint

TIE_FRACTION = 0.01
_AS_MEASURED = Demand()


def pick(
    points: Sequence[OperatingPoint],
    sla: Sla,
    *,
    minimize: str | None = None,
    maximize: str | None = None,
    demand: Demand = _AS_MEASURED,
    traffic: Traffic | None = None,
    price_usd_per_device_hour: float | None = None,
    devices: int | None = None,
) -> PickResult | Infeasible:
    """Choose among a study's operating points. Give exactly one target metric.

    demand: headroom and confidence of every bound. traffic: size the chosen deployment for it, at that price. devices:
    how many there are for it. Bounds relative to the reference are resolved first. Raises SlaError for no or two
    targets, a target optimized the wrong way, or metrics no point has; StudyError when nothing was measured.
    """
    target = _target(minimize, maximize)
    if devices is not None and devices < 1:
        raise SlaError(f"devices={devices} is not positive", "say how many there are, or leave it out")
    measured = [p for p in points if p.state == "measured"]
    if not measured:
        raise StudyError(
            "no operating point of this study has been measured yet",
            "wait for the first ones, or read the failures with `sweep status`",
        )
    sla = sla.resolved(points)
    judge = Judge(points, demand)
    names = list(dict.fromkeys([target.name, *(b.metric for b in sla.bounds)]))
    candidates = eligible(points, names)
    if not candidates:
        raise _nothing_has_all(measured, names)
    shared = shared_settings(points)
    keeping = _ordered([p for p in candidates if judge.meets_all(p, sla.bounds)], target)
    feasible = [p for p in keeping if _fits(p, traffic, devices)]
    if not feasible:
        return _infeasible(candidates, keeping, target, sla, judge, len(measured), shared, traffic, devices)
    best = feasible[0].metrics[target.name]
    ties = [p for p in feasible if abs(p.metrics[target.name] - best) <= TIE_FRACTION * abs(best)]
    chosen = min(ties, key=lambda p: p.overrides)  # min keeps the first, and ties are ordered by target
    second = rival(feasible, chosen, target, sla.bounds, judge, TIE_FRACTION)
    return PickResult(
        target=target,
        sla=sla,
        chosen=chosen,
        rival=second,
        clear_winner=clear_winner(second),
        why=_reasons(points, measured, candidates, feasible, chosen, target, sla, judge, shared),
        bounds=tuple(_bound_report(b, points, sla, judge, target, chosen, best) for b in sla.bounds),
        all_bounds=judge.all_at_least(chosen, sla.bounds),
        ties=tuple(p for p in ties if p is not chosen),
        n_feasible=len(feasible),
        n_measured=len(measured),
        shared=shared,
        demand=demand,
        capacity=capacity(chosen, traffic, price_usd_per_device_hour) if traffic is not None else None,
    )


def _target(minimize: str | None, maximize: str | None) -> Metric:
    if (minimize is None) == (maximize is None):
        raise SlaError("give one metric to minimize or to maximize", "for example --minimize cost_usd_per_mtok")
    metric = get_metric(minimize or maximize or "")
    asked = "minimize" if minimize is not None else "maximize"
    if asked != metric.direction:
        raise SlaError(
            f"cannot {asked} {metric.name}: it is better when "
            f"{'lower' if metric.direction == 'minimize' else 'higher'}",
            f"use --{metric.direction} {metric.name}",
        )
    return metric


def _ordered(points: Sequence[OperatingPoint], target: Metric) -> list[OperatingPoint]:
    return sorted(points, key=lambda p: (target.sign * p.metrics[target.name], p.overrides, p.point_id))


def _fits(point: OperatingPoint, traffic: Traffic | None, devices: int | None) -> bool:
    if devices is None:
        return True
    needed = devices_for(point, traffic)
    return needed is not None and needed <= devices


def _nothing_has_all(measured: Sequence[OperatingPoint], names: Sequence[str]) -> SlaError:
    lacking = {name: sum(name not in p.metrics for p in measured) for name in names}
    counts = ", ".join(f"{name} is missing in {n}" for name, n in lacking.items() if n)
    advice = {
        "p99": "a p99 needs many requests: raise the workload's num_requests, or bound the p90 or p50",
        "goodput": "goodput needs the workload's slo_ttft_ms and slo_tpot_ms",
        "quality": "measure quality (see the failures of this study), or leave the quality bound out",
        ".": "a metric of a request class exists where the workload has classes of that name",
        "energy": "energy is only measured where NVML reports power",
    }
    hints = [text for key, text in advice.items() if any(key in name for name, n in lacking.items() if n)]
    otherwise = "bound a metric that was measured; `sweep export` shows which are"
    return SlaError(
        f"no point has {' and '.join(names)}: of {plural(len(measured), 'measured point')}, {counts}",
        "; ".join(hints) or otherwise,
    )


def _infeasible(
    candidates: Sequence[OperatingPoint],
    keeping: Sequence[OperatingPoint],
    target: Metric,
    sla: Sla,
    judge: Judge,
    n_measured: int,
    shared: Mapping[str, Any],
    traffic: Traffic | None,
    devices: int | None,
) -> Infeasible:
    """keeping: candidates that meet every bound, and need more devices than there are."""
    ordered, measured = _ordered(candidates, target), judge.as_measured()
    # Where the confidence cannot be had at all, the measured values still tell points apart.
    ranked = sorted(ordered, key=lambda p: (_largest_miss(p, sla, judge), _largest_miss(p, sla, measured)))
    nearest = ranked[0]
    misses, droppable, relaxations = [], [], []
    for bound in sla.bounds:
        value, sign = nearest.metrics[bound.metric], get_metric(bound.metric).sign
        best = min((p.metrics[bound.metric] for p in candidates), key=lambda v: sign * v)
        needed = judge.needed(nearest, bound)
        miss = bound.relative_miss(value if needed is None else needed)
        misses.append(Miss(bound, value, miss, best, judge.meets(nearest, bound), judge.probability(nearest, bound)))
        others = [b for b in sla.bounds if b is not bound]
        rest = [p for p in ordered if judge.meets_all(p, others)]
        if rest and not keeping:
            droppable.append(bound)
        loosened = [relaxed for p in rest if (relaxed := _relaxation(p, bound, judge)) is not None]
        if loosened and not keeping:
            relaxations.append(min(loosened, key=lambda r: r.relative))
    together = [_relaxation(nearest, b, judge) for b in sla.bounds if not judge.meets(nearest, b)]
    there = devices if devices is not None else devices_for(nearest, traffic) or nearest.devices
    return Infeasible(
        target=target,
        sla=sla,
        nearest=nearest,
        others_near=_others_near(ranked),
        misses=tuple(misses),
        enough_to_drop=tuple(droppable),
        n_candidates=len(candidates),
        n_measured=n_measured,
        shared=shared,
        demand=judge.demand,
        unsure=() if keeping else tuple(p for p in ordered if measured.meets_all(p, sla.bounds)),
        n_without_spread=sum(any(judge.needed(p, b) is None for b in sla.bounds) for p in candidates),
        relaxations=tuple(relaxations),
        joint_relaxation=tuple(r for r in together if r is not None) if None not in together else (),
        fleet=smallest_fleet(ordered, sla.bounds, judge, target, traffic, there),
        devices=devices if keeping else None,
    )


def _others_near(ranked: Sequence[OperatingPoint], count: int = 2) -> tuple[OperatingPoint, ...]:
    """The next nearest points of other engine configs than those before them."""
    first = {p.config_hash: p for p in reversed(ranked)}
    return tuple(p for p in ranked if first[p.config_hash] is p)[1 : count + 1]


def _largest_miss(point: OperatingPoint, sla: Sla, judge: Judge) -> float:
    needed = [(b, judge.needed(point, b)) for b in sla.bounds]
    return max((float("inf") if value is None else b.relative_miss(value) for b, value in needed), default=0.0)


def _relaxation(point: OperatingPoint, bound: Bound, judge: Judge) -> Relaxation | None:
    """The bound loosened until it lets this point through, rounded outwards to four digits."""
    needed = judge.needed(point, bound)
    if needed is None:
        return None
    exact = Decimal(repr(needed))
    outwards = ROUND_CEILING if get_metric(bound.metric).direction == "minimize" else ROUND_FLOOR
    value = float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - 3), outwards)) if exact else 0.0
    loosened = Bound(bound.metric, "<=" if bound.op[0] == "<" else ">=", value)
    return Relaxation(bound, loosened, bound.relative_miss(needed), point)


def _bound_report(
    bound: Bound,
    points: Sequence[OperatingPoint],
    sla: Sla,
    judge: Judge,
    target: Metric,
    chosen: OperatingPoint,
    best: float,
) -> BoundReport:
    others = [b for b in sla.bounds if b is not bound]
    names = [target.name, *(b.metric for b in others)]
    relaxed = _ordered([p for p in eligible(points, names) if judge.meets_all(p, others)], target)[0]
    gains = target.sign * relaxed.metrics[target.name] < target.sign * best
    value = chosen.metrics[bound.metric]
    spread = judge.spread(chosen, bound.metric)
    return BoundReport(
        bound=bound,
        value=value,
        relaxed=relaxed if gains else None,
        probability=judge.probability(chosen, bound),
        evidence=NO_SPREAD if spread is None else SOURCES[spread.source],
    )


def _reasons(
    points: Sequence[OperatingPoint],
    measured: Sequence[OperatingPoint],
    candidates: Sequence[OperatingPoint],
    feasible: Sequence[OperatingPoint],
    chosen: OperatingPoint,
    target: Metric,
    sla: Sla,
    judge: Judge,
    shared: Mapping[str, Any],
) -> tuple[str, ...]:
    name, demand = target.name, judge.demand
    extreme = "lowest" if target.direction == "minimize" else "highest"
    met = f"{plural(len(feasible), 'point')} of {len(measured)} measured"
    met += " meet every bound" if sla.bounds else " could be chosen, no bounds given"
    met += f" with {demand}" if sla.bounds and str(demand) else ""
    best = feasible[0]
    if chosen.metrics[name] == best.metrics[name]:
        reasons = [f"{met}; this one has the {extreme} {name}: {point_value_text(chosen, name)}."]
    else:
        reasons = [
            f"{met}; the {extreme} {name} is {point_value_text(best, name)}, and this point is within "
            f"{TIE_FRACTION:.0%} of it ({point_value_text(chosen, name)}) with "
            f"{plural(len(engine_items(chosen.engine, shared)), 'setting')} of its own instead of "
            f"{len(engine_items(best.engine, shared))}."
        ]
    left_out = len(measured) - len(candidates)
    if left_out:
        reasons.append(f"{plural(left_out, 'measured point')} took no part: a metric asked for was not measured there.")
    measured_ones, kept = judge.as_measured(), sum(judge.meets_all(p, sla.bounds) for p in candidates)
    if kept > len(feasible):
        reasons.append(
            f"{plural(kept - len(feasible), 'more point')} would meet them, but not on the devices there are."
        )
    unsure = sum(measured_ones.meets_all(p, sla.bounds) for p in candidates) - kept
    if unsure:
        without = sum(any(judge.needed(p, b) is None for b in sla.bounds) for p in candidates)
        once = f" (of {plural(without, 'point')} {NO_SPREAD})" if without else ""
        would = f"{plural(unsure, 'more point')} would meet the bounds as measured"
        reasons.append(f"{would}, but not with {demand}{once}.")
    reasons.append(_against_defaults(points, feasible, chosen, target))
    if chosen.n_repeats == 1:
        reasons.append("Measured once: repeat it before trusting small differences.")
    else:
        reasons.append(f"Mean of {chosen.n_repeats} repeats.")
    return tuple(reasons)


def _against_defaults(
    points: Sequence[OperatingPoint],
    feasible: Sequence[OperatingPoint],
    chosen: OperatingPoint,
    target: Metric,
) -> str:
    defaults = [p for p in feasible if p.purpose == "baseline"]
    if chosen.purpose == "baseline":
        return "These are vLLM's defaults: no measured change of arguments gains more than a tie."
    if not any(p.purpose == "baseline" and p.state == "measured" for p in points):
        return "vLLM's defaults were not measured in this study, so there is no baseline to compare with."
    if not defaults:
        return "vLLM's defaults do not meet the SLA at any measured load."
    ours, theirs = chosen.metrics[target.name], defaults[0].metrics[target.name]
    change = f" ({(ours - theirs) / abs(theirs):+.1%})" if theirs else ""
    return (
        f"vLLM's defaults, at their best load that meets the SLA ({defaults[0].load_label}), have "
        f"{value_text(target.name, theirs)}; this point has {value_text(target.name, ours)}{change}."
    )
