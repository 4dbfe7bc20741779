"""Whether a load had settled before it was measured: the change from the first to the second half of the window.

A closed loop or a stationary stream of arrivals has a steady state; latencies that still rise while they are measured
belong to the length of the run, not to the deployment (arrivals beyond capacity queue without end, a warm-up was too
short, a device heats up). A ramp or a trace changes on purpose and is not judged.

The change of a median is (second half / first half - 1), halves by order of sending; that of a rate likewise by time.
Its 95 % interval comes from the circular block bootstrap of measure.intervals within each half, so that a short noisy
run is not called drifting: a change counts as shown when the interval excludes zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sweep.measure.intervals import RESAMPLES, block_counts
from sweep.measure.latency import Run

FloatArray = npt.NDArray[np.float64]

# Halves of fewer requests say nothing: their medians jump.
MIN_REQUESTS_PER_HALF = 16


@dataclass(frozen=True)
class Drift:
    """change: of the second half against the first, as a fraction. low, high: its 95 % interval."""

    metric: str
    change: float
    low: float
    high: float

    @property
    def shown(self) -> bool:
        """Whether the change is beyond what chance explains."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def drifts(run: Run) -> list[Drift]:
    """Drift of the median TTFT and TPOT over the measured requests, or nothing where a half has fewer than 16."""
    rows = np.flatnonzero(run.measured & run.ok)
    rows = rows[np.argsort(run.sent[rows], kind="stable")]
    found = []
    for name in ("ttft", "tpot"):
        values = run.latency_ms[name][rows]
        values = values[~np.isnan(values)]
        if len(values) >= 2 * MIN_REQUESTS_PER_HALF:
            found.append(_drift(f"{name}_p50_ms", values))
    return found


def _drift(metric: str, values: FloatArray) -> Drift:
    """values: (n,), in order of sending, all positive."""
    rng = np.random.default_rng(0)
    halves = np.array_split(values, 2)
    first, second = (float(np.median(half)) for half in halves)
    medians = [_medians(half, rng) for half in halves]
    low, high = np.quantile(medians[1] / medians[0] - 1, [0.025, 0.975])
    return Drift(metric, second / first - 1, float(low), float(high))


def _medians(half: FloatArray, rng: np.random.Generator) -> FloatArray:
    """The median of each resample of a half, (RESAMPLES,)."""
    counts = block_counts(len(half), RESAMPLES, rng)
    order = np.argsort(half)
    below = np.cumsum(counts[:, order], axis=1)
    middle = (below >= -(-len(half) // 2)).argmax(axis=1)
    medians: FloatArray = half[order][middle]
    return medians
