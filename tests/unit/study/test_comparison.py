"""One fingerprint against the reference: the numbers of a QualityRecord, from log-probabilities and item results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sweep.measure.quality import PromptLogprobs, compare
from sweep.results.quality import judge
from sweep.results.records import QualityRecord, from_json, to_json
from sweep.study.comparison import quality_record, same_but_for_its_time


def measured(seed: int, noise: float) -> PromptLogprobs:
    """Six prompts of twenty positions over a vocabulary of 40, the top 5 listed; noise moves the logits."""
    base, rng = np.random.default_rng(0), np.random.default_rng(seed)
    logits = 3 * base.standard_normal((120, 40)) + noise * rng.standard_normal((120, 40))
    full = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids, rows = np.argsort(-full, axis=1)[:, :5], np.arange(120)
    actual = base.integers(40, size=120)
    return PromptLogprobs(ids, np.take_along_axis(full, ids, 1), actual, full[rows, actual], rows // 20)


REFERENCE, NEAR, FAR = measured(1, 0.0), measured(2, 0.1), measured(3, 1.0)
ANSWERS = {"facts": {str(i): i % 4 != 0 for i in range(40)}, "sums": {str(i): True for i in range(10)}}


def record(candidate: PromptLogprobs, answers: object = None, reference_answers: object = None) -> QualityRecord:
    fingerprint = "r" if candidate is REFERENCE else "f"
    result = compare(REFERENCE, candidate)
    return quality_record(fingerprint, "r", result, 0.001, answers, reference_answers)  # type: ignore[arg-type]


def test_perplexity_is_that_of_the_text() -> None:
    found = record(FAR)
    assert found.metrics["quality_perplexity"] == pytest.approx(np.exp(-FAR.actual_logprobs.mean()))
    by_prompt = -FAR.actual_logprobs.reshape(6, 20).mean(axis=1)
    se = np.exp(by_prompt.mean()) * by_prompt.std(ddof=1) / np.sqrt(6)
    assert found.standard_errors["quality_perplexity"] == pytest.approx(se)
    low, high = found.intervals["quality_perplexity"]
    assert high - low == pytest.approx(2 * 1.95996 * se, rel=1e-4)


def test_the_paired_loss_of_perplexity_is_the_difference_and_narrower_than_either_interval() -> None:
    found, reference = record(NEAR), record(REFERENCE)
    loss = found.losses["quality_perplexity"]
    mine, theirs = found.metrics["quality_perplexity"], reference.metrics["quality_perplexity"]
    assert mine is not None and theirs is not None
    assert loss["loss"] == pytest.approx(mine - theirs)
    low, high = found.intervals["quality_perplexity"]
    assert loss["low"] < loss["loss"] < loss["high"]
    assert loss["high"] - loss["low"] < 0.3 * (high - low)


def test_the_nearer_format_is_told_from_the_farther_one() -> None:
    near, far = record(NEAR), record(FAR)
    assert near.intervals["quality_kl"][1] < far.intervals["quality_kl"][0]
    margins = {"quality_kl": near.intervals["quality_kl"][1]}
    assert [judge(r, margins)[0].verdict for r in (near, far, record(REFERENCE))] == [
        "non-inferior",
        "inferior",
        "non-inferior",
    ]


def test_only_equal_log_probabilities_are_identical() -> None:
    copied = replace(REFERENCE)
    assert record(copied).identical and not record(NEAR).identical
    other = REFERENCE.logprobs.copy()
    other[7, 3] -= 1e-9
    assert not record(replace(REFERENCE, logprobs=other)).identical


def test_flips_and_accuracy_of_every_task_and_of_all() -> None:
    answers = {task: dict(items) for task, items in ANSWERS.items()}
    answers["facts"] |= {"0": True, "1": False, "2": False, "3": False}
    found = record(NEAR, answers, ANSWERS)
    assert found.metrics["quality_task_accuracy"] == pytest.approx(38 / 50)
    assert found.metrics["quality_task_accuracy.facts"] == pytest.approx(28 / 40)
    assert found.metrics["quality_task_accuracy.sums"] == 1.0
    assert {task: (t["items"], t["better"], t["worse"]) for task, t in found.tasks.items()} == {
        "all tasks": (50, 1, 3),
        "facts": (40, 1, 3),
        "sums": (10, 0, 0),
    }
    assert found.tasks["facts"]["mcnemar_p"] == pytest.approx(2 * 5 / 16)
    loss = found.losses["quality_task_accuracy"]
    assert loss["loss"] == pytest.approx(2 / 50) and loss["low"] < 0 < loss["high"]
    assert found.task_failure is None
    reference = record(REFERENCE, ANSWERS, ANSWERS)
    assert set(reference.losses["quality_task_accuracy"].values()) == {0.0}


@pytest.mark.parametrize(
    ("answers", "reference", "failure"),
    [
        (None, ANSWERS, None),
        ("lm-eval exited with 1", ANSWERS, "lm-eval exited with 1"),
        (ANSWERS, None, "the reference has no task results: not asked yet"),
        (ANSWERS, "it broke", "the reference has no task results: it broke"),
        ({"facts": {"0": True}}, ANSWERS, "the reference answered other items"),
        ({"other": {"0": True}}, ANSWERS, "the reference answered other items"),
    ],
)
def test_without_pairs_there_are_no_task_results_but_the_text_counts(
    answers: object, reference: object, failure: str | None
) -> None:
    found = record(NEAR, answers, reference)
    assert (found.tasks, found.task_failure) == ({}, failure)
    assert "quality_task_accuracy" not in found.metrics and found.metrics["quality_kl"] is not None


def test_the_same_result_is_recognized_after_reading_it_again() -> None:
    one = record(NEAR, ANSWERS, ANSWERS)
    again = from_json(to_json(one))
    assert isinstance(again, QualityRecord)
    assert same_but_for_its_time(replace(again, finished_at="later"), one)
    assert not same_but_for_its_time(replace(one, noise_floor_kl=0.002), one)
