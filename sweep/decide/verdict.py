"""A verification held against bounds: pass or fail for each bound at each stage.

* held_out, bursts, longer: the value measured over the stage keeps the bound. Its 95 % interval says whether that is
  sure (`sure`): the interval's worse end keeps it too.
* soak: the value over the whole soak keeps it and, where the windows drift the wrong way, the line through them still
  keeps it at the soak's end. Drift is a one-sided Mann-Kendall test at 5 % (Mann 1945; Kendall 1975) with a total
  change of at least 5 %; the line is Theil-Sen's (Sen 1968). Fewer than four windows can show no drift at that level.
* A bound whose metric a stage could not measure is not passed: it is unknown, and says so.
* Quality belongs to the numerics and not to the requests: it is the study's measurement, judged once ("study").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from sweep.decide.sla import Bound, Sla
from sweep.decide.wording import number_text, value_text
from sweep.results.metrics import get_metric
from sweep.results.verifications import StageResult, Verification

DRIFT_LEVEL = 0.05
DRIFT_CHANGE = 0.05
MIN_WINDOWS = 4


@dataclass(frozen=True)
class Drift:
    """Of one metric over a soak. change: total, as a fraction of the median window, worse is positive. p: one-sided.

    at_end: what the line through the windows has at the end of the last one.
    """

    change: float
    p: float
    at_end: float
    windows: int

    @property
    def is_drift(self) -> bool:
        return self.p <= DRIFT_LEVEL and self.change >= DRIFT_CHANGE


@dataclass(frozen=True)
class Check:
    """One bound at one stage. value: None if it was not measured. passed: None then. sure: None without an interval."""

    stage: str
    bound: Bound
    value: float | None
    interval: tuple[float, float] | None
    passed: bool | None
    sure: bool | None
    drift: Drift | None = None
    why: str | None = None

    def to_dict(self) -> dict[str, Any]:
        drift = self.drift
        return {
            "stage": self.stage,
            "bound": str(self.bound),
            "value": self.value,
            "interval": None if self.interval is None else list(self.interval),
            "passed": self.passed,
            "sure": self.sure,
            "drift": None if drift is None else {"change": drift.change, "p": drift.p, "is_drift": drift.is_drift},
            "why": self.why,
        }


@dataclass(frozen=True)
class Verdict:
    """A verification judged by an SLA, its own or another. passed: every bound at every stage."""

    verification: Verification
    sla: Sla
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        ran = self.verification.cause is None and all(s.state == "measured" for s in self.verification.stages)
        return ran and bool(self.checks) and all(c.passed for c in self.checks)

    def to_dict(self) -> dict[str, Any]:
        v = self.verification
        return {
            "verification_id": v.verification_id,
            "point_id": v.point_id,
            "finished_at": v.finished_at,
            "sla": str(self.sla),
            "passed": self.passed,
            "cause": v.cause,
            "stages": [{"name": s.name, "asked": dict(s.asked), "state": s.state, "cause": s.cause} for s in v.stages],
            "checks": [c.to_dict() for c in self.checks],
        }

    def text_lines(self) -> list[str]:
        """A table: a row for each stage, a column for each bound; then what failed and why."""
        v = self.verification
        title = f"{v.finished_at[:10]} {'passed' if self.passed else 'NOT passed'}: {v.verification_id}"
        if v.sla != str(self.sla):
            title += f" (it was run for {v.sla})"
        if v.cause is not None:
            return [title, f"the launch failed: {v.cause}: {v.detail}"]
        names = ["study", *(s.name for s in v.stages)] if any(c.stage == "study" for c in self.checks) else [
            s.name for s in v.stages
        ]  # fmt: skip
        bounds = list(dict.fromkeys(c.bound for c in self.checks))
        cells = {(c.stage, c.bound): _cell(c) for c in self.checks}
        stages = {s.name: s for s in v.stages}
        rows = [["stage", *map(str, bounds)]]
        rows += [[_stage_text(name, stages), *(cells.get((name, b), "") for b in bounds)] for name in names]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return [title, *table, *self._remarks()]

    def _remarks(self) -> list[str]:
        remarks = [f"{s.name}: {s.state}: {s.cause}: {s.detail}" for s in self.verification.stages if s.cause]
        for c in self.checks:
            if c.why is not None and not c.passed:
                remarks.append(f"{c.stage}: {c.bound}: {c.why}")
        for c in self.checks:
            if c.drift is not None and c.drift.is_drift:
                remarks.append(
                    f"{c.stage}: {c.bound.metric} drifts: {c.drift.change:+.0%} over {c.drift.windows} windows "
                    f"(p = {c.drift.p:.2g})"
                )
        return remarks


def judge(verification: Verification, sla: Sla, study_metrics: Mapping[str, float]) -> Verdict:
    """Hold a verification against an SLA whose bounds are numbers. study_metrics: of the point, for its quality."""
    checks = []
    for bound in sla.bounds:
        if bound.metric.startswith("quality_"):
            value = study_metrics.get(bound.metric)
            passed = None if value is None else bound.meets(value)
            why = "not measured in the study" if value is None else None
            checks.append(Check("study", bound, value, None, passed, None, why=why))
        else:
            checks += [_check(stage, bound) for stage in verification.stages]
    order = {name: i for i, name in enumerate(["study", *(s.name for s in verification.stages)])}
    return Verdict(verification, sla, tuple(sorted(checks, key=lambda c: order[c.stage])))


def _check(stage: StageResult, bound: Bound) -> Check:
    value = stage.metrics.get(bound.metric)
    if stage.state == "failed" or value is None:
        return Check(stage.name, bound, value, None, None, None, why=_why_unknown(stage, bound))
    low, high = stage.intervals.get(bound.metric, (None, None))
    interval = None if low is None or high is None else (float(low), float(high))
    worse = None if interval is None else interval[1 if get_metric(bound.metric).direction == "minimize" else 0]
    drift = drift_of([w.get(bound.metric) for w in stage.windows], bound.metric)
    passed = bound.meets(value) and stage.state == "measured"
    why = None if stage.state == "measured" else f"{stage.state}: {stage.cause}"
    if passed and drift is not None and drift.is_drift and not bound.meets(drift.at_end):
        passed, why = False, f"kept on average, but drifted to {value_text(bound.metric, drift.at_end)}"
    return Check(
        stage=stage.name,
        bound=bound,
        value=value,
        interval=interval,
        passed=passed,
        sure=None if worse is None else bound.meets(worse),
        drift=drift,
        why=why,
    )


def _why_unknown(stage: StageResult, bound: Bound) -> str:
    if stage.state == "failed":
        return f"not measured: {stage.cause}"
    completed = stage.metrics.get("requests_completed")
    seen = "" if completed is None else f"{completed:.0f} requests completed"
    needs = " (a p99 takes 100 requests, a p90 ten)" if "_p" in bound.metric else ""
    return f"not measured: {seen}{needs}" if seen else f"not measured{needs}"


def drift_of(values: Sequence[float | None], metric: str) -> Drift | None:
    """Drift of a metric over equal windows in order; None where fewer than four have it."""
    known = [(i, v) for i, v in enumerate(values) if v is not None]
    if len(known) < MIN_WINDOWS:
        return None
    sign = get_metric(metric).sign
    pairs = list(combinations(known, 2))
    slope = median((b - a) / (j - i) for (i, a), (j, b) in pairs)
    middle = median(v for _, v in known)
    intercept = median(v - slope * i for i, v in known)
    rising = sum((sign * (b - a) > 0) - (sign * (b - a) < 0) for (_, a), (_, b) in pairs)
    return Drift(
        change=sign * slope * len(values) / abs(middle) if middle else 0.0,
        p=kendall_p(rising, len(known)),
        at_end=intercept + slope * (len(values) - 0.5),
        windows=len(values),
    )


def kendall_p(score: int, n: int) -> float:
    """P(S >= score) of Kendall's S of n values in random order: exact, from the counts of permutations by inversions.

    Ties in the data only make it larger than stated.
    """
    counts = [1]
    for k in range(2, n + 1):
        counts = [sum(counts[max(0, i - k + 1) : i + 1]) for i in range(len(counts) + k - 1)]
    pairs = n * (n - 1) // 2
    most_inversions = math.floor((pairs - score) / 2)
    return sum(counts[: most_inversions + 1]) / math.factorial(n) if most_inversions >= 0 else 0.0


def _cell(check: Check) -> str:
    if check.value is None:
        return "not measured"
    ends = ""
    if check.interval is not None:
        low, high = check.interval
        ends = f" [{number_text(low)}, {number_text(high)}]"
    unsure = "?" if check.passed and check.sure is False else ""
    return f"{'pass' if check.passed else 'FAIL'}{unsure} {value_text(check.bound.metric, check.value)}{ends}"


def _stage_text(name: str, stages: Mapping[str, StageResult]) -> str:
    if name not in stages:
        return name
    asked = ", ".join(f"{k} {v:g}" for k, v in stages[name].asked.items())
    return f"{name} ({asked}, {stages[name].load_label})" if asked else f"{name} ({stages[name].load_label})"
