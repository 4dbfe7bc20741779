"""What must hold for a measurement to be believed. A point that fails is quarantined: visible, never on the front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.load import LoadResult


def broken_proof(result: LoadResult, limits: Mapping[str, Any]) -> LaunchFailure | None:
    """The first proof that fails, as cause and evidence, or None. limits: fields of config.ProofConfig."""
    metrics = result.metrics
    if result.failed:
        return LaunchFailure(
            FailureCause.request_errors,
            f"{result.failed} of {result.failed + result.completed} requests failed: {result.first_error}",
        )
    lag, ttft = metrics.get("client_loop_lag_p99_ms"), metrics.get("ttft_p50_ms")
    if lag is not None and ttft is not None:
        limit = max(limits["max_loop_lag_ms"], limits["max_loop_lag_share"] * ttft)
        if lag > limit:
            return LaunchFailure(
                FailureCause.proof_failed,
                f"the load client was late: its event loop lagged {lag:.1f} ms at p99, more than {limit:.1f} ms",
            )
    hits = metrics.get("prefix_cache_hit_rate")
    expected = result.shared_prefix_share
    if hits is not None and hits > expected + limits["max_unexpected_hit_rate"]:
        return LaunchFailure(
            FailureCause.proof_failed,
            f"{hits:.0%} prefix-cache hits where the workload shares {expected:.0%}: the cache was warm",
        )
    return None
