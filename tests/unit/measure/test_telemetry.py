from __future__ import annotations

from typing import Any

import pytest

from sweep.measure.telemetry import Telemetry, parse_prometheus


def report(
    before: dict[str, list[float]] | None, after: dict[str, list[float]] | None, during: list[Any] | None = None
) -> Any:
    telemetry = Telemetry("http://unused")
    telemetry._before, telemetry._after, telemetry._during = before, after, during or []
    return telemetry.report()


def test_prometheus_text_with_labels_comments_and_odd_values() -> None:
    text = """# HELP vllm:x_total Things {that} count.
# TYPE vllm:x_total counter
vllm:x_total{engine="0",model_name="a \\"quoted\\" } brace"} 3.0
vllm:x_total{engine="1"} 4e2 1700000000
vllm:plain 7
vllm:inf_bucket{le="+Inf"} +Inf
"""
    assert parse_prometheus(text) == {
        "vllm:x_total": [3.0, 400.0],
        "vllm:plain": [7.0],
        "vllm:inf_bucket": [float("inf")],
    }


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_counters_are_differences_under_either_name(suffix: str) -> None:
    before = {f"vllm:num_preemptions{suffix}": [1.0, 2.0], f"vllm:prefix_cache_hits{suffix}": [10.0],
              f"vllm:prefix_cache_queries{suffix}": [100.0]}  # fmt: skip
    after = {f"vllm:num_preemptions{suffix}": [1.0, 4.0], f"vllm:prefix_cache_hits{suffix}": [60.0],
             f"vllm:prefix_cache_queries{suffix}": [300.0]}  # fmt: skip
    metrics = report(before, after).metrics
    assert metrics["preemptions"] == 2.0
    assert metrics["prefix_cache_hit_rate"] == 0.25


def test_queue_time_is_a_mean_over_the_requests_of_this_load() -> None:
    sums = [{"vllm:request_queue_time_seconds_sum": [s], "vllm:request_queue_time_seconds_count": [n]}
            for s, n in ((1.0, 10.0), (3.0, 50.0))]  # fmt: skip
    assert report(*sums).metrics["queue_time_mean_ms"] == pytest.approx(50.0)
    assert report(sums[0], sums[0]).metrics["queue_time_mean_ms"] is None


def test_what_is_missing_or_went_backwards_is_none_not_zero() -> None:
    backwards = report({"vllm:num_preemptions_total": [5.0]}, {"vllm:num_preemptions_total": [0.0]})
    for made in (report({}, {}), report(None, {"vllm:num_preemptions_total": [5.0]}), report({}, None), backwards):
        assert set(made.metrics.values()) == {None}
        assert made.running_max is None


def test_gauges_take_the_worst_engine_and_sum_the_queues() -> None:
    during = [
        {"vllm:kv_cache_usage_perc": [0.2, 0.6], "vllm:num_requests_running": [3.0, 4.0]},
        {"vllm:kv_cache_usage_perc": [0.5, 0.1], "vllm:num_requests_running": [1.0, 1.0]},
    ]
    made = report({}, {}, during)
    assert made.metrics["kv_cache_usage_max"] == 0.6
    assert made.running_max == 7.0
    assert made.waiting_max is None
    assert report({}, {}, [{"vllm:gpu_cache_usage_perc": [0.3]}]).metrics["kv_cache_usage_max"] == 0.3


def test_a_server_that_does_not_answer_gives_none() -> None:
    with Telemetry("http://127.0.0.1:9") as telemetry:
        pass
    assert set(telemetry.report().metrics.values()) == {None}
