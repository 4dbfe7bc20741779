"""A long load in windows: each is what a load of that length would have been, and together they are all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sweep.measure.latency import Run, summarize
from sweep.measure.windows import windows
from sweep.measure.workload import LengthDistribution, WorkloadSpec

SPEC = WorkloadSpec("w", LengthDistribution(value=9), LengthDistribution(value=4))
SUMMARY = {"window_s": 40.0, "loop_lag_p99_ms": 0.1, "send_lateness_p99_ms": 0.1}


def table(ttft_s: list[float]) -> pa.Table:
    """One request every 0.1 s with four tokens 0.01 s apart; two warm-up requests before the window."""
    rows: list[dict[str, Any]] = []
    for i, first in enumerate([0.5, 0.5, *ttft_s]):
        sent = (i - 2) * 0.1
        at = [sent + first + 0.01 * k for k in range(4)]
        rows.append(
            {
                "phase": "warmup" if i < 2 else "measured", "class": None, "due_s": sent, "sent_s": sent,
                "first_token_s": at[0], "last_token_s": at[-1], "end_s": at[-1], "prompt_tokens": 9,
                "output_tokens": 4, "first_chunk_tokens": 1, "chunk_times_s": at, "chunk_tokens": [1] * 4,
                "status": "ok", "error": None,
            }
        )  # fmt: skip
    kinds = {"class": pa.string(), "error": pa.string(), "chunk_tokens": pa.list_(pa.int32())}
    columns = {name: pa.array([r[name] for r in rows], kinds.get(name)) for name in rows[0]}
    return pa.table(columns)


def cut(data: pa.Table, least: int) -> list[dict[str, float | None]]:
    return windows(data, SUMMARY, SPEC, least_requests=least, price_usd_per_device_hour=3.6, devices=2)


def test_a_rise_is_seen_window_by_window() -> None:
    found = cut(table(np.repeat([0.1, 0.2, 0.3, 0.4], 100).tolist()), 100)
    assert [w["ttft_p99_ms"] for w in found] == pytest.approx([100.0, 200.0, 300.0, 400.0])
    assert [w["requests_completed"] for w in found] == [100.0] * 4
    assert found[0]["cost_usd_per_mtok"] == pytest.approx(3.6 * 2 / 3600 / found[0]["output_throughput_tok_s"] * 1e6)


def test_windows_add_up_to_the_whole() -> None:
    data = table(np.random.default_rng(0).uniform(0.05, 0.3, 400).tolist())
    whole, parts = summarize(Run(data, SUMMARY), SUMMARY, SPEC), cut(data, 80)
    assert len(parts) == 5
    for name in ("output_throughput_tok_s", "request_throughput_rps", "total_throughput_tok_s", "ttft_mean_ms"):
        assert np.mean([p[name] for p in parts]) == pytest.approx(whole[name])
    assert cut(data, 1000)[0]["ttft_p99_ms"] == whole["ttft_p99_ms"], "too few for two windows: one is all of it"


def test_never_more_than_ten_and_none_of_nothing() -> None:
    assert len(cut(table([0.1] * 400), 5)) == 10
    assert windows(table([]), SUMMARY, SPEC, least_requests=5, price_usd_per_device_hour=1, devices=1) == []
