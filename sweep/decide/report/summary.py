"""The first screen: what was learned, which configuration, how sure. Paragraphs of HTML in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sweep.decide.answer import PickResult
from sweep.decide.opened import Study
from sweep.decide.scorecard import Line
from sweep.decide.sla import Bound, Sla
from sweep.decide.wording import engine_text, plural, point_value_text, value_text
from sweep.errors import SweepError
from sweep.results.front import eligible, front, ineligible
from sweep.results.metrics import Metric, get_metric
from sweep.results.points import OperatingPoint
from sweep.results.records import LOST, LaunchRecord
from sweep.results.uncertainty import front_probability
from sweep.results.validation import is_validation, validations


def starting_sla(study: Study) -> tuple[Sla, str]:
    """The SLA a report opens with, and where it comes from: nobody has stated one yet.

    What vLLM's defaults reach at the load where they are best in the first objective: the other objectives shall not be
    worse than the worse end of their 95 % interval there. Without such a point, no bounds.
    """
    if not study.objectives:
        return Sla(), "no bounds"
    target, *others = (get_metric(o) for o in study.objectives)
    defaults = [p for p in eligible(study.operating_points, study.objectives) if p.purpose == "baseline"]
    if not defaults or not others:
        return Sla(), "no bounds"
    theirs = min(defaults, key=lambda p: target.sign * p.metrics[target.name])
    bounds = [Bound(m.name, "<=" if m.sign > 0 else ">=", _outwards(_worst_end(theirs, m), m.sign)) for m in others]
    named = " and ".join(m.label.split(" (")[0] for m in others)
    return Sla(tuple(bounds)), f"{named} no worse than vLLM’s defaults at {theirs.load_label}"


def _worst_end(point: OperatingPoint, metric: Metric) -> float:
    value = point.metrics[metric.name]
    return point.intervals.get(metric.name, (value, value))[metric.sign > 0]


def _outwards(value: float, sign: float) -> float:
    """Four digits, rounded so that the value itself still keeps the bound."""
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 3) if value else 1.0
    rounded = float(f"{value:.4g}")
    return rounded if sign * (rounded - value) >= 0 else float(f"{rounded + sign * step:.4g}")


def learned(study: Study, best: Sequence[OperatingPoint], shared: Mapping[str, Any]) -> list[str]:
    """What was measured and what came out of it."""
    points = study.operating_points
    measured = [p for p in points if p.state == "measured"]
    if not measured:
        return [f"{plural(len(points), 'operating point')} tried, none measured yet."]
    launches = [r for r in study.records if isinstance(r, LaunchRecord)]
    lost, cut = sum(p.state in LOST for p in points), sum(p.state == "cut" for p in points)
    configs = len({p.config_hash for p in measured})
    hours = sum(r.duration_s for r in launches) / 3600
    sentences = [
        f"{plural(len(measured), 'operating point')} of {plural(configs, 'engine config')} measured in "
        f"{plural(len(launches), 'launch')}"
        + (f" ({hours:.1f} h of server time)" if hours >= 0.1 else "")
        + (f"; {lost} more failed or were quarantined, each with its cause below." if lost else "; nothing failed.")
        + (f" {cut} more were not measured: their configurations were dominated at busier loads." if cut else "")
    ]
    names = " × ".join(escape(get_metric(o).label) for o in study.objectives)
    out = [p for p, _ in ineligible(measured, study.objectives)] if study.objectives else []
    if study.objectives:
        without = f" {len(out)} measured without one of them could not take part." if out else ""
        sentences.append(f"<strong>{plural(len(best), 'point')}</strong> on the front of {names}.{without}")
    # The best of one objective is named among the points that have all of them: those that can be on the front.
    comparable = eligible(points, study.objectives) if study.objectives else []
    sentences += [_best_of(name, comparable or measured, shared) for name in study.objectives]
    sentences.append(_defaults_on_front(points, best, study.objectives))
    return [s for s in sentences if s]


def _best_of(name: str, points: Sequence[OperatingPoint], shared: Mapping[str, Any]) -> str:
    """The best value of one objective, its point, and how vLLM's defaults compare."""
    metric = get_metric(name)
    having = [p for p in points if name in p.metrics]
    if not having:
        return f"No point has {escape(metric.label)}."
    best = min(having, key=lambda p: metric.sign * p.metrics[name])
    word = "Lowest" if metric.direction == "minimize" else "Highest"
    best_value = best.metrics[name]
    same = sum(p.metrics[name] == best_value for p in having)
    holder = f"<code>{escape(engine_text(best, shared))}</code> at {escape(best.load_label)}"
    text = f"{word} {escape(metric.label)}: <strong>{escape(point_value_text(best, name))}</strong>, "
    text += f"reached by {same} points" if same > 1 else f"with {holder}"
    defaults = [p for p in having if p.purpose == "baseline"]
    if not defaults:
        return f"{text}. vLLM's defaults were not measured for comparison."
    theirs = min(defaults, key=lambda p: metric.sign * p.metrics[name])
    value = theirs.metrics[name]
    if best_value == value:
        return f"{text}: no better than vLLM's defaults."
    better = "lower" if metric.direction == "minimize" else "higher"
    change = f"{abs(best_value - value) / abs(value):.0%} {better} than" if value else "against"
    said = f"{escape(value_text(name, value))} at {escape(theirs.load_label)}"
    return f"{text}: {change} vLLM's defaults at their best load ({said})."


def _defaults_on_front(
    points: Sequence[OperatingPoint], best: Sequence[OperatingPoint], objectives: Sequence[str]
) -> str:
    defaults = [p for p in points if p.purpose == "baseline" and p.state == "measured"]
    if not defaults or not objectives:
        return ""
    kept = sum(p.purpose == "baseline" for p in best)
    if kept == len(best):
        return "Nothing measured is better than vLLM's defaults."
    if kept == 0:
        return f"None of the {plural(len(defaults), 'point')} of vLLM's defaults is on the front."
    if kept == len(defaults):
        return f"Every point of vLLM's defaults ({kept}) is on the front."
    return f"{kept} of the {plural(len(defaults), 'point')} of vLLM's defaults are on the front."


def starting_pick(study: Study, sla: Sla) -> PickResult | None:
    """What the page's first pick is, by the same rules; None where nothing can be picked."""
    try:
        found = study.pick(sla)
    except SweepError:  # nothing measured, or no point with every metric: the page says so elsewhere
        return None
    return found if isinstance(found, PickResult) else None


def picked(result: PickResult, origin: str) -> list[str]:
    """The pick for the starting SLA."""
    p = result.chosen
    engine = f"<code>{escape(engine_text(p, result.shared))}</code>"
    values = ", ".join(escape(point_value_text(p, b.bound.metric)) for b in result.bounds)
    value = f"<strong>{escape(point_value_text(p, result.target.name))}</strong> ({escape(result.target.label)})"
    return [
        f"With {escape(origin)}: {engine} at {escape(p.load_label)} on {plural(p.devices, 'device')}: {value}"
        + (f", at {values}." if values else "."),
        *(escape(reason) for reason in result.why),
        "Your SLA is another? Move the sliders below: the pick follows.",
    ]


def sure(study: Study, result: PickResult | None, card: Sequence[Line]) -> list[str]:
    """What the pick and the front rest on."""
    objectives = study.objectives
    measured = eligible(study.operating_points, objectives) if objectives else []
    if not measured:
        return ["Nothing measured, nothing to be sure of."]
    sentences = []
    repeated = sum(p.n_repeats > 1 for p in measured)
    sentences.append(
        f"{repeated} of {plural(len(measured), 'point')} measured more than once"
        + ("." if repeated else ": no spread between launches is known, so small differences mean nothing.")
    )
    chances = front_probability(study.operating_points, objectives)
    if result is not None and result.chosen.point_id in chances and result.chosen.intervals:
        sentences.append(f"The pick is on the front with probability {chances[result.chosen.point_id]:.0%}.")
    on_front = {p.point_id for p in front(measured, objectives)}
    if any(p.intervals for p in measured):
        firm = sum(chances[i] >= 0.9 for i in on_front)
        close = sum(chance >= 0.1 and i not in on_front for i, chance in chances.items())
        sentences.append(
            f"{firm} of the {plural(len(on_front), 'front point')} are there with probability 90 % or more; "
            f"{plural(close, 'other point')} could be on it (10 % or more)."
        )
    sentences += _held_out(study)
    bad = [line for line in card if line.verdict == "bad"]
    warned = sum(line.verdict == "warn" for line in card)
    words = "; ".join(escape(line.question) for line in bad)
    sentences.append(
        f"<a href='#realism'>Realism</a>: {len(bad)} bad, {warned} to know, of {plural(len(card), 'question')}"
        + (f" ({words})." if bad else ".")
    )
    if any(p.provenance != "measured" for p in measured):
        sentences.append(f"<strong>These numbers are {escape(measured[0].provenance)}</strong>, not measured on a GPU.")
    return sentences


def _held_out(study: Study) -> list[str]:
    """What fresh launches on unseen requests said of the finalists."""
    found = validations(study.records, study.objectives) if any(map(is_validation, study.records)) else []
    if not found:
        return ["No finalist was measured again on held-out requests (validation=finalists does that)."]
    told = []
    for name in study.objectives:
        changes = [c for v in found if (c := v.worse_by(name)) is not None]
        if changes:
            told.append(f"{get_metric(name).label.split(' (')[0]} {sum(changes) / len(changes):+.1%}")
    failed = sum(v.state != "measured" for v in found)
    text = f"{plural(len(found), 'finalist')} launched fresh on held-out requests"
    if told:
        text += f": {', '.join(told)} on average (+ is worse than it had looked)"
    return [escape(f"{text}{f'; {failed} of them failed' if failed else ''}.")]
