"""Finalists on held-out requests: never on a front, always beside what the search saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sweep.results.points import operating_points
from sweep.results.records import PointRecord
from sweep.results.validation import validations

FIRST = PointRecord(
    point_id="p", launch_id="1", config_hash="c", fingerprint="f", engine={"model": "m", "args": {}, "env": {}},
    load={"concurrency": 8}, load_label="c8", params={}, purpose="trial", devices=1, state="measured",
    metrics={"ttft_p99_ms": 100.0, "output_throughput_tok_s": 50.0},
)  # fmt: skip
OBJECTIVES = ["ttft_p99_ms", "output_throughput_tok_s", "quality_kl"]


def test_a_validation_is_no_repeat_and_no_point() -> None:
    again = replace(FIRST, purpose="validation", metrics={"ttft_p99_ms": 999.0})
    (point,) = operating_points([FIRST, again])
    assert point.metrics["ttft_p99_ms"] == 100.0 and point.n_repeats == 1
    assert operating_points([again]) == []


def test_worse_and_better_follow_the_direction_of_the_metric() -> None:
    held_out = replace(FIRST, purpose="validation", metrics={"ttft_p99_ms": 110.0, "output_throughput_tok_s": 45.0})
    (found,) = validations([FIRST, held_out], OBJECTIVES)
    assert found.worse_by("ttft_p99_ms") == pytest.approx(0.1)
    assert found.worse_by("output_throughput_tok_s") == pytest.approx(0.1)
    assert found.worse_by("quality_kl") is None


def test_the_newest_validation_counts_and_a_failed_one_has_no_numbers() -> None:
    good = replace(FIRST, purpose="validation", metrics={"ttft_p99_ms": 90.0})
    failed = replace(FIRST, purpose="validation", state="failed", cause="engine_died", metrics={})
    (found,) = validations([FIRST, good, failed], OBJECTIVES)
    assert (found.state, found.cause, found.held_out) == ("failed", "engine_died", {})
    assert found.worse_by("ttft_p99_ms") is None
    assert validations([FIRST], OBJECTIVES) == []
