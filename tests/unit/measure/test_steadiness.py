"""Drift within a run: shown where it is there, not where there is only noise or too little data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sweep.measure.steadiness import drifts


def run_of(ttft_ms: np.ndarray[Any, Any], tpot_ms: np.ndarray[Any, Any] | None = None) -> Any:
    n = len(ttft_ms)
    order = np.random.default_rng(5).permutation(n)  # rows lie in any order
    sent = np.arange(n, dtype=float)[order]
    tpot = np.full(n, np.nan) if tpot_ms is None else tpot_ms[order]
    return SimpleNamespace(
        measured=np.ones(n, bool), ok=np.ones(n, bool), sent=sent, latency_ms={"ttft": ttft_ms[order], "tpot": tpot}
    )


def test_a_queue_that_grows_is_shown_with_its_size() -> None:
    rng = np.random.default_rng(0)
    (found,) = drifts(run_of(100 + 10 * np.arange(100) + rng.normal(0, 5, 100)))
    first, second = 100 + 10 * 24.5, 100 + 10 * 74.5
    assert found.metric == "ttft_p50_ms" and found.shown and found.low > 0.5
    assert found.change == pytest.approx(second / first - 1, rel=0.05)


def test_a_fall_is_shown_too() -> None:
    rng = np.random.default_rng(0)
    found = drifts(run_of(np.full(80, 50.0), np.where(np.arange(80) < 40, 20.0, 10.0) + rng.normal(0, 0.5, 80)))
    assert [(d.metric, d.shown) for d in found] == [("ttft_p50_ms", False), ("tpot_p50_ms", True)]
    assert found[1].high < -0.3


def test_noise_is_rarely_called_drift() -> None:
    rng = np.random.default_rng(1)
    shown = [drifts(run_of(rng.lognormal(4, 0.5, 60)))[0].shown for _ in range(200)]
    assert np.mean(shown) < 0.15


def test_too_few_requests_say_nothing() -> None:
    assert drifts(run_of(np.arange(1.0, 32.0))) == []
    assert len(drifts(run_of(np.arange(1.0, 33.0)))) == 1


def test_failures_and_warm_up_do_not_count() -> None:
    run = run_of(np.arange(1.0, 41.0))
    run.ok[:5], run.measured[5:10] = False, False
    assert drifts(run) == []
