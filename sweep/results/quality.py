"""Non-inferiority: whether a configuration is shown to lose no more quality than a margin, against the reference.

A difference that is not significant is no proof of equality; a 95 % interval that excludes every loss beyond the margin
is one of sufficient equality (the confidence-interval approach of clinical non-inferiority trials, one-sided 2.5 %).
Losses count upwards, whatever a metric's direction: 0.02 of quality_task_accuracy is two points of accuracy lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sweep.errors import ConfigError, did_you_mean
from sweep.results.metrics import METRICS, PER_TASK
from sweep.results.records import QualityRecord, Record

Verdict = Literal["non-inferior", "not shown", "inferior", "not measured"]
COMPARED = ("quality_kl", "quality_top1_agreement", "quality_perplexity", PER_TASK)


@dataclass(frozen=True)
class Judgement:
    """One metric of one fingerprint against its margin. loss, low, high: with its 95 % interval; None: not measured."""

    metric: str
    margin: float
    loss: float | None
    low: float | None
    high: float | None

    @property
    def verdict(self) -> Verdict:
        if self.low is None or self.high is None:
            return "not measured"
        if self.high <= self.margin:
            return "non-inferior"
        return "inferior" if self.low > self.margin else "not shown"

    @property
    def relative_miss(self) -> float | None:
        """How far the largest plausible loss is beyond the margin, as a fraction of it; at most 0 where it is not."""
        return None if self.high is None else (self.high - self.margin) / self.margin

    def __str__(self) -> str:
        if self.loss is None or self.low is None or self.high is None:
            return f"{self.metric} was not measured"
        found = f"loss {self.loss:.3g} ({self.low:.3g} to {self.high:.3g})"
        return f"{self.metric} {self.verdict}: {found}, margin {self.margin:g}"


def check_margins(margins: Mapping[str, float]) -> None:
    """Raises ConfigError for a margin of a metric that has none, or that is not above 0."""
    for name, margin in margins.items():
        if name.partition(".")[0] not in COMPARED or name not in METRICS:
            raise ConfigError(
                f"quality.non_inferiority: {name} is not compared with a reference", did_you_mean(name, COMPARED)
            )
        if not margin > 0:
            raise ConfigError(
                f"quality.non_inferiority.{name}={margin:g} is no loss",
                "give the largest loss you accept, a number above 0",
            )


def newest_quality(records: Iterable[Record]) -> dict[str, QualityRecord]:
    """The QualityRecord that counts of each fingerprint: the newest measured one, else the first failure."""
    found: dict[str, QualityRecord] = {}
    for record in records:
        if isinstance(record, QualityRecord) and (record.state == "measured" or record.fingerprint not in found):
            found[record.fingerprint] = record
    return found


def judge(record: QualityRecord | None, margins: Mapping[str, float]) -> list[Judgement]:
    """One judgement for each margin, in their order."""
    losses = {} if record is None else record.losses
    judged = []
    for metric, margin in margins.items():
        known = losses.get(metric, {})
        judged.append(Judgement(metric, margin, known.get("loss"), known.get("low"), known.get("high")))
    return judged


def not_shown(fingerprints: Iterable[str], records: Iterable[Record], margins: Mapping[str, float]) -> dict[str, str]:
    """Those of the fingerprints that are not shown to be non-inferior, and why."""
    known = newest_quality(records)
    reasons = {}
    for fingerprint in dict.fromkeys(fingerprints):
        missed = [str(j) for j in judge(known.get(fingerprint), margins) if j.verdict != "non-inferior"]
        if missed:
            reasons[fingerprint] = "; ".join(missed)
    return reasons
