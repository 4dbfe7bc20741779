"""One fingerprint against the reference, as a record: divergence on text, and paired results on the tasks' items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sweep.measure.quality import QualityResult
from sweep.measure.quality.paired import (
    Z,
    difference_interval,
    mcnemar_p,
    paired_table,
    wilson_interval,
)
from sweep.measure.quality.tasks import Answers
from sweep.results.metrics import PER_TASK
from sweep.results.records import QualityRecord, to_json

_NO_LOSS = {"loss": 0.0, "low": 0.0, "high": 0.0}


def quality_record(
    fingerprint: str,
    reference: str,
    result: QualityResult,
    floor: float | None,
    answers: Answers | str | None,
    reference_answers: Answers | str | None,
) -> QualityRecord:
    """answers: of lm-eval, or why there are none, or None when it was not asked."""
    values = {
        "quality_kl": (result.quality_kl, result.quality_kl_se),
        "quality_top1_agreement": (result.quality_top1_agreement, result.quality_top1_agreement_se),
        "quality_perplexity": (result.quality_perplexity, result.quality_perplexity_se),
    }
    lost = {
        "quality_kl": (result.quality_kl, result.quality_kl_se),
        "quality_top1_agreement": (1 - result.quality_top1_agreement, result.quality_top1_agreement_se),
        "quality_perplexity": (result.perplexity_difference, result.perplexity_difference_se),
    }
    tasks, failure = _tasks(answers, reference_answers)
    accuracies = {PER_TASK if name == _ALL else f"{PER_TASK}.{name}": found for name, found in tasks.items()}
    losses = {
        name: {"loss": value, "low": value - Z * se, "high": value + Z * se}
        for name, (value, se) in lost.items()
        if value is not None and se is not None
    }
    losses |= {
        name: {"loss": -t["difference"], "low": -t["difference_high"], "high": -t["difference_low"]}
        for name, t in accuracies.items()
    }
    if fingerprint == reference:
        losses = dict.fromkeys(losses, _NO_LOSS)
    return QualityRecord(
        fingerprint=fingerprint,
        reference_fingerprint=reference,
        state="measured",
        metrics={name: value for name, (value, _) in values.items()}
        | {name: t["accuracy"] for name, t in accuracies.items()},
        noise_floor_kl=floor,
        positions=result.positions,
        launch_id=None,
        finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        standard_errors={name: se for name, (_, se) in values.items()}
        | {name: (t["accuracy"] * (1 - t["accuracy"]) / t["items"]) ** 0.5 for name, t in accuracies.items()},
        intervals={
            name: (value - Z * se, value + Z * se)
            for name, (value, se) in values.items()
            if value is not None and se is not None
        }
        | {name: (t["low"], t["high"]) for name, t in accuracies.items()},
        losses=losses,
        tasks=tasks,
        task_failure=failure,
        identical=result.identical,
    )


_ALL = "all tasks"


def _tasks(
    answers: Answers | str | None, reference: Answers | str | None
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Results by task and over all of them, and why there are none although they were asked for."""
    if answers is None or isinstance(answers, str):
        return {}, answers
    if reference is None or isinstance(reference, str):
        return {}, f"the reference has no task results: {reference or 'not asked yet'}"
    try:
        found = {_ALL: paired_results(_pooled(reference), _pooled(answers))}
        return found | {task: paired_results(reference[task], items) for task, items in answers.items()}, None
    except (KeyError, ValueError):
        return {}, "the reference answered other items"


def _pooled(answers: Answers) -> dict[str, bool]:
    return {f"{task}/{item}": right for task, items in answers.items() for item, right in items.items()}


def paired_results(reference: Mapping[str, bool], answers: Mapping[str, bool]) -> dict[str, Any]:
    """What QualityRecord.tasks holds of one task. Raises ValueError for different items."""
    table = paired_table(reference, answers)
    right = table.both + table.better
    low, high = wilson_interval(right, table.items)
    difference_low, difference_high = difference_interval(table)
    return {
        "items": table.items,
        "accuracy": right / table.items,
        "low": low,
        "high": high,
        "better": table.better,
        "worse": table.worse,
        "mcnemar_p": mcnemar_p(table),
        "difference": table.difference,
        "difference_low": difference_low,
        "difference_high": difference_high,
    }


def same_but_for_its_time(one: QualityRecord, other: QualityRecord) -> bool:
    return to_json(replace(one, finished_at="")) == to_json(replace(other, finished_at=""))
