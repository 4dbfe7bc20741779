"""Intervals of one run: what they cover, what they refuse, and how blocks are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.measure.intervals import block_counts, intervals
from sweep.measure.latency import Run, summarize
from sweep.measure.lengths import LengthDistribution
from sweep.measure.workload import RequestClass, WorkloadSpec

LENGTH = LengthDistribution(value=9)
SPEC = WorkloadSpec("w", LENGTH, LENGTH, slo_ttft_ms=100.0)
SCHEMA = pa.schema(
    [
        ("phase", pa.string()),
        ("class", pa.string()),
        *((name, pa.float64()) for name in ("due_s", "sent_s", "first_token_s", "last_token_s", "end_s")),
        *((name, pa.int32()) for name in ("prompt_tokens", "output_tokens", "first_chunk_tokens")),
        ("chunk_times_s", pa.list_(pa.float64())),
        ("chunk_tokens", pa.list_(pa.int32())),
        ("status", pa.string()),
    ]
)


def run_of(ttft_s: np.ndarray[Any, Any], *, gap_s: float = 0.01, ok: bool = True, of_class: str | None = None) -> list:
    """One request every 0.1 s, three tokens each."""
    rows = []
    for i, ttft in enumerate(ttft_s):
        sent = 0.1 * i + 0.001
        times = [sent + ttft + k * gap_s for k in range(3)] if ok else []
        rows.append({
            "phase": "measured", "class": of_class, "due_s": sent, "sent_s": sent,
            "first_token_s": times[0] if ok else None, "last_token_s": times[-1] if ok else None, "end_s": sent + ttft,
            "prompt_tokens": 9, "output_tokens": len(times), "first_chunk_tokens": int(ok), "chunk_times_s": times,
            "chunk_tokens": [1] * len(times), "status": "ok" if ok else "error",
        })  # fmt: skip
    return rows


def both(rows: list, window_s: float, spec: WorkloadSpec = SPEC) -> tuple[dict, dict]:
    table = pa.Table.from_pylist(rows, SCHEMA)
    summary = {"window_s": window_s, "loop_lag_p99_ms": 0.5, "send_lateness_p99_ms": None}
    run = Run(table, summary)
    metrics = summarize(run, summary, spec)
    return metrics, intervals(run, spec, metrics)


@given(st.integers(1, 200), st.integers(1, 20))
def test_every_resample_draws_as_many_as_there_are(n, resamples):
    counts = block_counts(n, resamples, np.random.default_rng(0))
    assert counts.shape == (resamples, n) and (counts.sum(axis=1) == n).all()


def test_neighbours_are_drawn_together():
    """Of 1000 items in blocks of 10, what is drawn has a drawn neighbour far more often than single draws would."""
    counts = block_counts(1000, 50, np.random.default_rng(1))
    drawn = counts > 0
    assert (drawn[:, 1:] & drawn[:, :-1]).sum() / drawn[:, 1:].sum() > 0.9


def test_the_mean_is_covered_as_often_as_stated():
    """150 runs of 120 independent exponential TTFTs around 50 ms: near 95 % of the intervals hold 50 ms."""
    rng, covered = np.random.default_rng(3), []
    for _ in range(150):
        _, found = both(run_of(rng.exponential(0.05, 120)), 12.0)
        low, high = found["ttft_mean_ms"]
        covered.append(low <= 50 <= high)
    assert 0.85 <= np.mean(covered) <= 0.99


def test_every_interval_holds_its_value_and_constants_have_no_width():
    rng = np.random.default_rng(0)
    metrics, found = both(run_of(rng.exponential(0.05, 200)), 20.0)
    assert {"ttft_p99_ms", "itl_p50_ms", "e2e_mean_ms", "output_throughput_tok_s", "goodput_rps"} <= set(found)
    for name, (low, high) in found.items():
        assert low <= metrics[name] <= high
    assert found["itl_p50_ms"] == pytest.approx((10.0, 10.0))
    assert found["ttft_p50_ms"][1] - found["ttft_p50_ms"][0] > 5


def test_what_has_no_value_has_no_interval():
    metrics, found = both(run_of(np.full(20, 0.05)), 2.0, WorkloadSpec("w", LENGTH, LENGTH))
    assert metrics["ttft_p99_ms"] is None and "ttft_p99_ms" not in found
    assert "goodput_rps" not in found and "slo_attainment" not in found
    assert both(run_of(np.full(7, 0.05)), 1.0)[1] == {}


def test_failures_leave_the_tail_without_an_upper_end():
    rows = run_of(np.full(195, 0.05)) + run_of(np.full(5, 0.05), ok=False)
    metrics, found = both(rows, 20.0)
    assert metrics["ttft_p50_ms"] is not None and "ttft_p50_ms" in found
    assert "ttft_p99_ms" not in found
    assert found["slo_attainment"][0] < 195 / 200 <= found["slo_attainment"][1]


def test_each_class_has_intervals_of_its_own():
    classes = (RequestClass("chat", LENGTH, LENGTH, slo_ttft_ms=100.0), RequestClass("batch", LENGTH, LENGTH))
    spec = WorkloadSpec("w", LENGTH, LENGTH, classes=classes)
    rng = np.random.default_rng(0)
    rows = run_of(rng.exponential(0.05, 60), of_class="chat") + run_of(rng.exponential(0.5, 60), of_class="batch")
    metrics, found = both(rows, 10.0, spec)
    assert found["ttft_mean_ms.chat"][1] < found["ttft_mean_ms.batch"][0]
    assert found["goodput_rps.chat"][0] <= metrics["goodput_rps.chat"] <= found["goodput_rps.chat"][1]
    assert "goodput_rps.batch" not in found and "goodput_rps" in found
