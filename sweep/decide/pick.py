"""Choose one operating point for an SLA: the measured point that meets every bound and is best in one metric.

Nothing is interpolated and no bound is relaxed: either a measured point meets all of them, or the answer is
Infeasible with the nearest point and by how much it misses. The rules:

* Only measured points with the target and every bounded metric take part.
* Points whose target is within 1 % of the best are ties: the one that overrides fewest engine arguments wins
  (easier to run and to explain), then the better target.
* The cost of a bound is what dropping it alone would gain: best target without it against the chosen one.
* A headroom and a confidence, where asked for, are part of meeting a bound: see certainty.Demand.
* Infeasible: for each bound the smallest relaxation of it alone that lets some point through, and of all bounds
  together the one whose largest relaxation, as a fraction of its bound, is smallest: the nearest point's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from sweep.decide.answer import BoundReport, Infeasible, Miss, PickResult, Relaxation
from sweep.decide.capacity import Traffic, capacity
from sweep.decide.certainty import NO_SPREAD, Demand, probability
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
) -> PickResult | Infeasible:
    """Choose among a study's operating points. Give exactly one target metric.

    demand: headroom and confidence of every bound. traffic: size the chosen deployment for it, at that price.
    Raises SlaError for no or two targets, a target optimized the wrong way, or metrics no point has;
    StudyError when nothing was measured.
    """
    target = _target(minimize, maximize)
    measured = [p for p in points if p.state == "measured"]
    if not measured:
        raise StudyError(
            "no operating point of this study has been measured yet",
            "wait for the first ones, or read the failures with `sweep status`",
        )
    names = list(dict.fromkeys([target.name, *(b.metric for b in sla.bounds)]))
    candidates = eligible(points, names)
    if not candidates:
        raise _nothing_has_all(measured, names)
    shared = shared_settings(points)
    feasible = _ordered([p for p in candidates if _meets(p, sla.bounds, demand)], target)
    if not feasible:
        return _infeasible(candidates, target, sla, demand, len(measured), shared)
    best = feasible[0].metrics[target.name]
    ties = [p for p in feasible if abs(p.metrics[target.name] - best) <= TIE_FRACTION * abs(best)]
    chosen = min(ties, key=lambda p: p.overrides)  # min keeps the first, and ties are ordered by target
    return PickResult(
        target=target,
        sla=sla,
        chosen=chosen,
        runner_up=next((p for p in feasible if p.config_hash != chosen.config_hash), None),
        why=_reasons(points, measured, candidates, feasible, chosen, target, sla, demand, shared),
        bounds=tuple(_bound_report(b, points, sla, demand, target, chosen, best) for b in sla.bounds),
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


def _meets(point: OperatingPoint, bounds: Sequence[Bound], demand: Demand) -> bool:
    return all(demand.meets(point, b) for b in bounds)


def _nothing_has_all(measured: Sequence[OperatingPoint], names: Sequence[str]) -> SlaError:
    lacking = {name: sum(name not in p.metrics for p in measured) for name in names}
    counts = ", ".join(f"{name} is missing in {n}" for name, n in lacking.items() if n)
    advice = {
        "p99": "a p99 needs many requests: raise the workload's num_requests, or bound the p90 or p50",
        "goodput": "goodput needs the workload's slo_ttft_ms and slo_tpot_ms",
        "quality": "measure quality (see the failures of this study), or leave the quality bound out",
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
    target: Metric,
    sla: Sla,
    demand: Demand,
    n_measured: int,
    shared: Mapping[str, Any],
) -> Infeasible:
    ordered = _ordered(candidates, target)
    # Where the confidence cannot be had at all, the measured values still tell points apart.
    nearest = min(ordered, key=lambda p: (_largest_miss(p, sla, demand), _largest_miss(p, sla, _AS_MEASURED)))
    misses, droppable, relaxations = [], [], []
    for bound in sla.bounds:
        value, sign = nearest.metrics[bound.metric], get_metric(bound.metric).sign
        best = min((p.metrics[bound.metric] for p in candidates), key=lambda v: sign * v)
        needed = demand.needed(nearest, bound)
        miss = bound.relative_miss(value if needed is None else needed)
        misses.append(Miss(bound, value, miss, best, demand.meets(nearest, bound), probability(nearest, bound)))
        others = [b for b in sla.bounds if b is not bound]
        rest = [p for p in ordered if _meets(p, others, demand)]
        if rest:
            droppable.append(bound)
        loosened = [relaxed for p in rest if (relaxed := _relaxation(p, bound, demand)) is not None]
        if loosened:
            relaxations.append(min(loosened, key=lambda r: r.relative))
    together = [_relaxation(nearest, b, demand) for b in sla.bounds if not demand.meets(nearest, b)]
    return Infeasible(
        target=target,
        sla=sla,
        nearest=nearest,
        misses=tuple(misses),
        enough_to_drop=tuple(droppable),
        n_candidates=len(candidates),
        n_measured=n_measured,
        shared=shared,
        demand=demand,
        unsure=tuple(p for p in ordered if _meets(p, sla.bounds, _AS_MEASURED)),
        n_without_spread=sum(any(demand.needed(p, b) is None for b in sla.bounds) for p in candidates),
        relaxations=tuple(relaxations),
        joint_relaxation=tuple(r for r in together if r is not None) if None not in together else (),
    )


def _largest_miss(point: OperatingPoint, sla: Sla, demand: Demand) -> float:
    needed = [(b, demand.needed(point, b)) for b in sla.bounds]
    return max(float("inf") if value is None else b.relative_miss(value) for b, value in needed)


def _relaxation(point: OperatingPoint, bound: Bound, demand: Demand) -> Relaxation | None:
    """The bound loosened until it lets this point through, rounded outwards to four digits."""
    needed = demand.needed(point, bound)
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
    demand: Demand,
    target: Metric,
    chosen: OperatingPoint,
    best: float,
) -> BoundReport:
    others = [b for b in sla.bounds if b is not bound]
    names = [target.name, *(b.metric for b in others)]
    relaxed = _ordered([p for p in eligible(points, names) if _meets(p, others, demand)], target)[0]
    gains = target.sign * relaxed.metrics[target.name] < target.sign * best
    value = chosen.metrics[bound.metric]
    return BoundReport(bound, value, relaxed if gains else None, probability(chosen, bound))


def _reasons(
    points: Sequence[OperatingPoint],
    measured: Sequence[OperatingPoint],
    candidates: Sequence[OperatingPoint],
    feasible: Sequence[OperatingPoint],
    chosen: OperatingPoint,
    target: Metric,
    sla: Sla,
    demand: Demand,
    shared: Mapping[str, Any],
) -> tuple[str, ...]:
    name = target.name
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
    unsure = sum(_meets(p, sla.bounds, _AS_MEASURED) for p in candidates) - len(feasible)
    if unsure:
        without = sum(any(demand.needed(p, b) is None for b in sla.bounds) for p in candidates)
        once = f" ({without} points were {NO_SPREAD})" if without else ""
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
