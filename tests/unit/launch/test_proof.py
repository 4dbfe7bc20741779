"""What a measurement must prove before it is believed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sweep.config import ProofConfig
from sweep.launch.proof import broken_proof
from sweep.measure.load import LoadResult


def result(*, failed: int = 0, share: float = 0.0, **metrics: float | None) -> LoadResult:
    empty: Any = None
    return LoadResult(metrics, {}, 100 - failed, failed, 0, ("3 x HTTP 500: dead",), empty, {}, share, Path("x"))


LIMITS = asdict(ProofConfig(max_loop_lag_ms=5.0, max_loop_lag_share=0.1, max_unexpected_hit_rate=0.05))


@pytest.mark.parametrize(
    "good",
    [
        result(),
        result(client_loop_lag_p99_ms=5.0, ttft_p50_ms=10.0),
        result(client_loop_lag_p99_ms=20.0, ttft_p50_ms=200.0),
        result(client_loop_lag_p99_ms=20.0, ttft_p50_ms=None),
        result(prefix_cache_hit_rate=0.05),
        result(prefix_cache_hit_rate=0.52, share=0.5),
        result(prefix_cache_hit_rate=None),
    ],
)
def test_a_good_measurement_is_believed(good: LoadResult) -> None:
    assert broken_proof(good, LIMITS) is None


@pytest.mark.parametrize(
    ("bad", "cause", "evidence"),
    [
        (result(failed=3), "request_errors", "3 of 100 requests failed: 3 x HTTP 500: dead"),
        (
            result(client_loop_lag_p99_ms=5.1, ttft_p50_ms=10.0),
            "proof_failed",
            "lagged 5.1 ms at p99, more than 5.0 ms",
        ),
        (result(client_loop_lag_p99_ms=20.1, ttft_p50_ms=200.0), "proof_failed", "more than 20.0 ms"),
        (result(prefix_cache_hit_rate=0.06), "proof_failed", "6% prefix-cache hits where the workload shares 0%"),
        (result(prefix_cache_hit_rate=0.6, share=0.5), "proof_failed", "the cache was warm"),
    ],
)
def test_a_broken_proof_names_its_evidence(bad: LoadResult, cause: str, evidence: str) -> None:
    broken = broken_proof(bad, LIMITS)
    assert broken is not None and broken.cause.value == cause and evidence in broken.detail
