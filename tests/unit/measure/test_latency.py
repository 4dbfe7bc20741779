from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.measure.latency import Run, percentile, summarize, token_gaps, tpot_s
from sweep.measure.workload import LengthDistribution, RequestClass, WorkloadSpec
from sweep.results.metrics import METRICS

SPEC = WorkloadSpec("w", LengthDistribution(value=9), LengthDistribution(value=5), slo_ttft_ms=100, slo_tpot_ms=20)
times = st.floats(0.001, 1e4, allow_nan=False)


@given(st.lists(times, min_size=1, max_size=400), st.sampled_from([50, 90, 99]), st.integers(0, 5))
def test_percentile_is_the_smallest_sample_that_covers_p_percent(samples: list[float], p: int, failures: int) -> None:
    value = percentile(np.array(samples), p, failures=failures)
    n = len(samples) + failures
    covered = [x for x in samples if 100 * sum(y <= x for y in samples) >= p * n]
    expected = min(covered, default=None) if n * (100 - p) >= 100 else None
    assert value == expected


def test_a_p99_takes_100_samples_and_a_p90_ten() -> None:
    assert percentile(np.arange(99.0), 99) is None
    assert percentile(np.arange(100.0), 99) == 98.0
    assert percentile(np.arange(9.0), 90) is None
    assert percentile(np.arange(10.0), 90) == 8.0
    assert percentile(np.array([]), 50) is None


def test_failures_are_the_slowest_and_a_percentile_among_them_is_none() -> None:
    assert percentile(np.arange(99.0), 99, failures=1) == 98.0
    assert percentile(np.arange(98.0), 99, failures=2) is None
    assert percentile(np.arange(98.0), 50, failures=2) == 49.0


@given(st.lists(st.tuples(times, st.integers(1, 6)), min_size=2, max_size=30))
def test_tpot_is_the_mean_of_the_requests_token_gaps(chunks: list[tuple[float, int]]) -> None:
    at = np.cumsum([gap for gap, _ in chunks])
    k = np.array([tokens for _, tokens in chunks])
    gaps, ended, _ = token_gaps(np.zeros(len(k), dtype=np.int64), at, k)
    assert len(gaps) == len(ended) == k[1:].sum()
    assert math.isclose(gaps.sum(), at[-1] - at[0], rel_tol=1e-9)
    tpot = tpot_s(at[:1], at[-1:], np.array([float(k.sum())]), np.array([float(k[0])]))
    assert math.isclose(tpot[0], gaps.mean(), rel_tol=1e-9)


def test_multi_token_chunks_are_split_and_requests_are_not_joined() -> None:
    request = np.array([0, 0, 1, 1, 1])
    gaps, ended, of = token_gaps(request, np.array([1.0, 1.4, 5.0, 5.1, 5.4]), np.array([4, 4, 1, 1, 3]))
    assert gaps == pytest.approx([0.1] * 4 + [0.1] + [0.1] * 3)
    assert ended == pytest.approx([1.4] * 4 + [5.1] + [5.4] * 3)
    assert of.tolist() == [0] * 4 + [1] * 4


def row(sent: float, at: list[float], tokens: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    tokens = tokens or [1] * len(at)
    return {
        "phase": "measured",
        "class": None,
        "due_s": sent,
        "sent_s": sent,
        "first_token_s": at[0] if at else None,
        "last_token_s": at[-1] if at else None,
        "end_s": at[-1] if at else sent,
        "prompt_tokens": 10 if at else None,
        "output_tokens": sum(tokens) if at else None,
        "first_chunk_tokens": tokens[0] if at else None,
        "chunk_times_s": at,
        "chunk_tokens": tokens,
        "status": "ok" if at else "error",
    } | changes


def metrics_of(
    rows: list[dict[str, Any]], window_s: float | None, spec: WorkloadSpec = SPEC
) -> dict[str, float | None]:
    schema = pa.schema(
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
    summary = {"window_s": window_s, "loop_lag_p99_ms": 0.5, "send_lateness_p99_ms": None}
    return summarize(Run(pa.Table.from_pylist(rows, schema), summary), summary, spec)


CLASSES = WorkloadSpec(
    "w", LengthDistribution(value=9), LengthDistribution(value=5),
    classes=(
        RequestClass("chat", LengthDistribution(value=9), LengthDistribution(value=5), slo_ttft_ms=100),
        RequestClass("batch", LengthDistribution(value=9), LengthDistribution(value=5), slo_e2e_ms=200),
        RequestClass("free", LengthDistribution(value=9), LengthDistribution(value=5)),
    ),
)  # fmt: skip


def test_every_class_has_its_own_numbers_and_slo() -> None:
    rows = [
        row(-0.5, [-0.2, 0.3], **{"phase": "warmup", "class": "batch"}),
        row(0.1, [0.15, 0.25], **{"class": "chat"}),  # TTFT 50 ms: meets
        row(0.2, [0.35, 0.36], **{"class": "chat"}),  # TTFT 150 ms: misses
        row(0.3, [0.45, 0.49], **{"class": "batch"}),  # E2E 190 ms: meets, whatever its TTFT
        row(0.3, [], **{"class": "batch"}),  # fails
        row(0.5, [0.9, 0.95], **{"class": "free"}),  # has no SLO: meets
    ]
    m = metrics_of(rows, 1.0, CLASSES)
    assert m["goodput_rps"] == pytest.approx(1 + 2 + 1) and m["slo_attainment"] == pytest.approx(3 / 5)
    assert m["goodput_rps.chat"] == pytest.approx(2 * 1 / 2) and m["slo_attainment.chat"] == pytest.approx(1 / 2)
    # The warm-up's batch request ends in the window and makes up for the measured one that will end after it.
    assert m["goodput_rps.batch"] == pytest.approx(2 * 1) and m["slo_attainment.batch"] == pytest.approx(1 / 2)
    assert m["goodput_rps.free"] is None and m["slo_attainment.free"] is None
    assert (m["requests_completed.chat"], m["requests_failed.batch"]) == (2, 1)
    assert m["ttft_p50_ms.chat"] == pytest.approx(50) and m["ttft_mean_ms.chat"] == pytest.approx(100)
    assert m["itl_mean_ms.chat"] == pytest.approx((100 + 10) / 2)
    assert m["output_throughput_tok_s.batch"] == pytest.approx(1 + 2)
    assert all(name in METRICS for name in m)


def test_classes_of_nothing_are_none_and_workloads_without_classes_have_no_class_metrics() -> None:
    m = metrics_of([row(0.1, [0.15], **{"class": "chat"})], 1.0, CLASSES)
    assert m["goodput_rps.batch"] is None and m["slo_attainment.batch"] is None and m["ttft_mean_ms.batch"] is None
    assert not [name for name in metrics_of([row(0.1, [0.15])], 1.0) if "." in name]


def test_every_number_of_a_small_load_by_hand() -> None:
    rows = [
        row(-0.5, [-0.2, 0.3], phase="warmup"),  # its second token and its end fall into the window
        row(0.0, [0.05, 0.06, 0.07]),  # meets both SLOs
        row(0.3, [0.45, 0.46, 0.47]),  # TTFT 150 ms: misses
        row(0.6, [0.65, 0.73], [2, 2]),  # TPOT 40 ms: misses
        row(0.9, [0.95, 1.05]),  # ends after the window
    ]
    m = metrics_of(rows, 1.0)
    assert m["ttft_mean_ms"] == pytest.approx((50 + 150 + 50 + 50) / 4)
    assert m["ttft_p50_ms"] == pytest.approx(50)
    assert m["ttft_p90_ms"] is None and m["ttft_p99_ms"] is None
    assert m["tpot_mean_ms"] == pytest.approx((10 + 10 + 40 + 100) / 4)
    assert m["e2e_mean_ms"] == pytest.approx((70 + 170 + 130 + 150) / 4)
    assert m["itl_mean_ms"] == pytest.approx((10 + 10 + 10 + 10 + 40 + 40) / 6)  # the gap that ends at 1.05 is outside
    assert m["user_throughput_tok_s"] == pytest.approx(1000 / 10)
    assert m["output_throughput_tok_s"] == pytest.approx(1 + 3 + 3 + 4 + 1)
    assert m["total_throughput_tok_s"] == pytest.approx(12 + 4 * 10)
    assert m["request_throughput_rps"] == pytest.approx(4)
    assert m["goodput_rps"] == pytest.approx(4 * 1 / 4)
    assert m["slo_attainment"] == pytest.approx(1 / 4)
    assert (m["requests_completed"], m["requests_failed"]) == (4, 0)
    assert (m["client_loop_lag_p99_ms"], m["client_send_lateness_p99_ms"]) == (0.5, None)
    assert set(m) <= set(METRICS)


def test_a_lock_step_loop_has_its_true_rate_whatever_the_boundaries_cut() -> None:
    """4 slots, every request takes 1 s and makes a token every 0.1 s: 4 req/s, 40 tok/s, by construction."""
    rows = [
        row(wave + slot * 1e-6, [wave + slot * 1e-6 + 0.1 * (i + 1) for i in range(10)],
            phase="warmup" if wave < 0 else "measured")
        for wave in (-1.0, 0.0, 1.0, 2.0)
        for slot in range(4)
    ]  # fmt: skip
    first_end = rows[12]["end_s"]  # the first of the last wave finds nothing left to send
    m = metrics_of(rows, first_end)
    assert m["request_throughput_rps"] == pytest.approx(4, rel=1e-4)
    assert m["output_throughput_tok_s"] == pytest.approx(40, rel=1e-4)


def test_single_token_requests_have_no_tpot_and_do_not_miss_its_slo() -> None:
    m = metrics_of([row(0.1, [0.12]), row(0.2, [0.22])], 1.0)
    assert m["tpot_p50_ms"] is None and m["itl_mean_ms"] is None and m["user_throughput_tok_s"] is None
    assert m["goodput_rps"] == pytest.approx(2.0)


def test_itl_percentiles_need_as_many_requests_as_samples() -> None:
    one_long = [row(0.1, [0.2 + 0.001 * i for i in range(500)])]
    assert metrics_of(one_long, 1.0)["itl_p50_ms"] is None
    assert metrics_of(one_long * 2, 1.0)["itl_p50_ms"] == pytest.approx(1.0)
    assert metrics_of(one_long * 9, 1.0)["itl_p90_ms"] is None
    assert metrics_of(one_long * 10, 1.0)["itl_p90_ms"] == pytest.approx(1.0)
    two_tokens = [row(0.01 * i, [0.01 * i + 0.002, 0.01 * i + 0.004]) for i in range(100)]
    cut = metrics_of(two_tokens, 0.5)  # half of the tokens arrive after the window: too few samples left
    assert cut["itl_p99_ms"] is None and cut["tpot_p99_ms"] == pytest.approx(2.0)
    assert metrics_of(two_tokens, 1.0)["itl_p99_ms"] == pytest.approx(2.0)


def test_when_everything_failed_no_latency_and_no_rate_is_a_number() -> None:
    m = metrics_of([row(0.1 * i, []) for i in range(200)], 1.0)
    counts = {k: v for k, v in m.items() if v is not None}
    known = {"requests_completed": 0.0, "requests_failed": 200.0, "slo_attainment": 0.0, "client_loop_lag_p99_ms": 0.5}
    assert counts == known


def test_without_a_window_there_are_no_rates() -> None:
    m = metrics_of([row(0.0, [0.1], phase="warmup")], None)
    assert m["output_throughput_tok_s"] is None and m["requests_completed"] == 0.0


def test_failed_requests_push_the_tail() -> None:
    rows = [row(0.001 * i, [0.001 * i + 0.05, 0.001 * i + 0.06]) for i in range(98)]
    assert metrics_of(rows + [row(0.5, [0.55, 0.56])] * 2, 1.0)["ttft_p99_ms"] == pytest.approx(50)
    assert metrics_of(rows + [row(0.5, [])] * 2, 1.0)["ttft_p99_ms"] is None
