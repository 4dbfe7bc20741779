"""Bounds a person states: "ttft_p99_ms<=500 itl_p99.interactive<=50ms quality_kl<=3ref".

A bound is on a metric of the whole workload or, with a dot, of one of its request classes. A quality may be bounded
relative to the reference engine: 3ref is three times what the reference itself has (for quality_kl that is the noise
floor), 99%ref is 99 % of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from sweep.errors import SlaError, did_you_mean
from sweep.results.metrics import METRICS, PER_CLASS, Metric

if TYPE_CHECKING:
    from sweep.results.points import OperatingPoint

Op = Literal["<=", ">=", "<", ">"]

_BOUND = re.compile(
    r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?P<op><=|>=|==|=<|=>|!=|<|>|=|≤|≥)\s*"
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"\s*(?P<unit>[A-Za-z%$][A-Za-z%$/]*)?(?![\w.])(?!\s*[<>=≤≥])\s*(?:[,;]\s*)*"
)
_SPELLINGS = {"≤": "<=", "≥": ">=", "=<": "<=", "=>": ">="}
# The unit suffixes of metric names, longest first, so that a name without its unit can be understood.
_SUFFIXES = ("_per_mtok", "_usd_per_mtok", "_j_per_token", "_per_token", "_tok_s", "_rps", "_ms", "_us", "_s")
# A value in units of what the reference engine has.
_OF_REFERENCE = {"ref": 1.0, "%ref": 0.01}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SCALES: dict[str, dict[str, float]] = {
    "ms": {unit: seconds * 1e3 for unit, seconds in _SECONDS.items()},
    "s": _SECONDS,
    "fraction": {"%": 0.01},
    "req/s": {"rps": 1.0},
    "USD/Mtok": {"$": 1.0, "usd": 1.0, "$/mtok": 1.0},
}


@dataclass(frozen=True)
class Bound:
    """One bound: value is in the metric's own unit, or a multiple of the reference's value (of_reference)."""

    metric: str
    op: Op
    value: float
    of_reference: bool = False

    def meets(self, value: float) -> bool:
        """Whether a measured value (the metric's unit) keeps the bound."""
        if self.op == "<=":
            return value <= self.value
        if self.op == ">=":
            return value >= self.value
        return value < self.value if self.op == "<" else value > self.value

    def relative_miss(self, value: float) -> float:
        """The miss as a fraction of the bound (of the value where the bound is 0); 0 if met."""
        if self.meets(value):
            return 0.0
        scale = abs(self.value) or abs(value)
        return abs(value - self.value) / scale if scale else 0.0

    def __str__(self) -> str:
        return f"{self.metric}{self.op}{self.value:.15g}{'ref' if self.of_reference else ''}"


@dataclass(frozen=True)
class Sla:
    """All bounds must be met. No bounds: everything measured meets it."""

    bounds: tuple[Bound, ...] = ()

    def __str__(self) -> str:
        return " ".join(map(str, self.bounds))

    def resolved(self, points: Sequence[OperatingPoint]) -> Sla:
        """The same with every multiple of the reference as a number: the value that vLLM's defaults have.

        Raises SlaError where the study measured no such value of its reference.
        """
        return Sla(tuple(_resolved(b, points) if b.of_reference else b for b in self.bounds))


def parse_sla(text: str) -> Sla:
    """Read bounds separated by spaces, commas or semicolons.

    Operators <= >= < >. A value may carry a unit (us, ms, s for times; % for fractions; ref for qualities), and a name
    may then leave out its own: ttft_p99<=0.5s is ttft_p99_ms<=500. Raises SlaError for anything not understood,
    an unknown metric, a wrong unit, or a bound on the side that is already better.
    """
    bounds: dict[str, Bound] = {}
    position = 0
    while position < len(text):
        match = _BOUND.match(text, position)
        if match is None:
            if not text[position:].strip(" \t\r\n,;"):
                break
            raise SlaError(
                f"SLA not understood from '{text[position:].strip()}'",
                "write metric<=number for each bound, numbers without thousands separators, "
                "for example: ttft_p99_ms<=500 quality_kl<=0.02",
            )
        bound = _bound(match)
        if bound.metric in bounds:
            raise SlaError(f"SLA bounds {bound.metric} twice", "keep the tighter of the two")
        bounds[bound.metric] = bound
        position = match.end()
    if not bounds:
        raise SlaError("SLA is empty", "for example: ttft_p99_ms<=500 itl_p99_ms<=50 quality_kl<=0.02")
    return Sla(tuple(bounds.values()))


def _bound(match: re.Match[str]) -> Bound:
    written, unit = match.group(0).strip(" ,;"), match["unit"]
    metric = find_metric(match["name"], written)
    value = float(match["number"])
    of_reference = unit is not None and unit.lower() in _OF_REFERENCE
    if of_reference:
        if not metric.name.startswith("quality_"):
            raise SlaError(
                f"SLA bound '{written}': only a quality has a reference to be relative to",
                f"bound {metric.name} in {metric.unit}",
            )
        value = float(f"{value * _OF_REFERENCE[str(unit).lower()]:.15g}")
    elif unit is not None and unit.lower() != metric.unit.lower():
        scale = {k.lower(): v for k, v in _SCALES.get(metric.unit, {}).items()}.get(unit.lower())
        if scale is None:
            accepted = ", ".join(dict.fromkeys([metric.unit, *_SCALES.get(metric.unit, {})]))
            raise SlaError(f"SLA bound '{written}': {metric.name} has no unit '{unit}'", f"use {accepted}, or no unit")
        # 15 significant digits keep 0.1 % from becoming 0.0010000000000000002.
        value = float(f"{value * scale:.15g}")
    elif unit is None and match["name"] != metric.name and metric.unit in ("ms", "s"):
        number = match["number"]
        raise SlaError(
            f"SLA bound '{written}' has no unit",
            f"write {match['name']}{match['op']}{number}{metric.unit} or {metric.name}{match['op']}{number}",
        )
    if metric.unit == "fraction" and value > 1 and not of_reference:
        raise SlaError(
            f"SLA bound '{written}': {metric.name} is a fraction between 0 and 1",
            f"write {metric.name}{match['op']}{match['number']}% if percent was meant",
        )
    op = _SPELLINGS.get(match["op"], match["op"])
    good = "<=" if metric.direction == "minimize" else ">="
    if op not in ("<=", ">=", "<", ">"):
        raise SlaError(f"SLA bound '{written}' uses '{op}'", f"write {metric.name}{good}{match['number']}")
    if op[0] != good[0]:
        better = "lower" if metric.direction == "minimize" else "higher"
        raise SlaError(
            f"SLA bound '{written}' would forbid the better values: {metric.name} is better when {better}",
            f"write {metric.name}{good}{value:.15g}",
        )
    return Bound(metric.name, cast(Op, op), value, of_reference)


def _resolved(bound: Bound, points: Sequence[OperatingPoint]) -> Bound:
    reference = [p for p in points if p.purpose in ("baseline", "reference") and bound.metric in p.metrics]
    if not reference:
        raise SlaError(
            f"SLA bound '{bound}' is relative to the reference, whose {bound.metric} was not measured here",
            f"give {bound.metric} as a number",
        )
    return Bound(bound.metric, bound.op, float(f"{bound.value * reference[0].metrics[bound.metric]:.6g}"))


def find_metric(name: str, written: str) -> Metric:
    """The metric of this name, with or without its unit suffix. Raises SlaError quoting what was written."""
    whole, dot, request_class = name.partition(".")
    if dot and name not in METRICS:
        metric = find_metric(whole, written)
        if metric.name not in PER_CLASS or not request_class.isidentifier():
            raise SlaError(f"SLA bound '{written}': {metric.name} has no classes", f"write {metric.name}")
        return METRICS[f"{metric.name}.{request_class}"]
    if name in METRICS:
        return METRICS[name]
    same = [m for m in METRICS.values() if name in _without_unit(m.name)]
    if len(same) == 1:
        return same[0]
    stem = next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), name)
    other_unit = [m for m in METRICS.values() if stem in _without_unit(m.name)]
    if len(other_unit) == 1:
        m = other_unit[0]
        raise SlaError(f"SLA bound '{written}': {m.name} is measured in {m.unit}", f"write {m.name}, in {m.unit}")
    family = [m for m in METRICS if m.startswith(f"{name}_")]
    hint = f"say which one: {', '.join(family)}" if family else did_you_mean(name, METRICS)
    raise SlaError(f"SLA names an unknown metric '{name}' in '{written}'", hint)


def _without_unit(name: str) -> set[str]:
    """Every name a metric goes by when its unit is left out; empty if the name carries no unit."""
    return {name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)}
