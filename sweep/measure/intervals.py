"""How far one run's own requests leave a metric open: 95 % intervals by a circular moving-block bootstrap.

Requests that run side by side share batches, so neighbours are correlated and must be resampled together (Künsch 1989;
circular blocks: Politis & Romano 1992). Latencies resample blocks of ceil(n^(1/3)) consecutive requests in order of
sending, tokens with their request; rates resample blocks of the window, cut into at most 64 slices of equal length. A
percentile keeps latency.percentile's definition. The interval holds the middle 95 % of the resampled values (Efron's
percentile method), stretched to the measured value where that lies outside.

It says what another draw of requests in the same launch could have shown. It knows nothing of what differs between two
launches; results.uncertainty adds that from repeats. The tail of a resample never exceeds the tail that was seen, so
the upper end of a p99 from few requests is low.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sweep.measure.latency import PERCENTILES, Run
from sweep.results.metrics import PER_CLASS

if TYPE_CHECKING:
    from sweep.measure.workload import WorkloadSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Interval = tuple[float, float]

COVERAGE = 0.95
RESAMPLES = 400
# Sorting is done once, but each resample walks all tokens: many tokens need fewer resamples for a steady interval.
TOKEN_RESAMPLES = 100
MIN_REQUESTS = 8
_SLICES = 64


def intervals(run: Run, spec: WorkloadSpec, metrics: Mapping[str, float | None]) -> dict[str, Interval]:
    """95 % interval of each metric of `metrics` (latency.summarize) that one run can support, (low, high) in its unit.

    Fewer than 8 measured requests support none. Deterministic: the same run gives the same intervals.
    """
    classes = spec.request_classes
    met = np.ones(len(run.ok), dtype=bool)
    for c in classes:
        met &= run.met(c) | ~run.belongs_to(c)
    found = _Resampled(run, np.ones(len(run.ok), dtype=bool), met).intervals()
    for c in classes if spec.classes else ():
        of_class = _Resampled(run, run.belongs_to(c), met).intervals()
        found |= {f"{name}.{c.name}": of_class[name] for name in PER_CLASS if name in of_class}
    known = {name: value for name, value in metrics.items() if value is not None}
    return {name: _around(known[name], *ends) for name, ends in found.items() if name in known}


def _around(value: float, low: float, high: float) -> Interval:
    return min(low, value), max(high, value)


class _Resampled:
    """The requests chosen by `of`, (rows,), resampled. met: which requests keep every SLO of theirs, (rows,)."""

    def __init__(self, run: Run, of: BoolArray, met: BoolArray) -> None:
        self.run = run
        self.of = of
        self.met = met
        rows = np.flatnonzero(of & run.measured)
        self.rows = rows[np.argsort(run.sent[rows], kind="stable")]
        self.rng = np.random.default_rng(0)
        n = len(self.rows)
        self.counts = block_counts(n, RESAMPLES, self.rng) if n >= MIN_REQUESTS else None

    def intervals(self) -> dict[str, Interval]:
        if self.counts is None:
            return {}
        found = {name: _middle(values) for name, values in {**self._latencies(), **self._rates()}.items()}
        return {name: ends for name, ends in found.items() if ends is not None}

    def _latencies(self) -> dict[str, FloatArray]:
        assert self.counts is not None
        found: dict[str, FloatArray] = {}
        for key, every in self.run.latency_ms.items():
            values = every[self.rows].copy()
            failed = ~self.run.ok[self.rows]
            values[failed] = np.inf  # slower than all others, as in latency.percentile
            known = ~np.isnan(values)
            found |= _statistics(key, values[known], self.counts[:, known])
        found |= self._itl()
        if "tpot_p50_ms" in found:
            found["user_throughput_tok_s"] = 1000 / found["tpot_p50_ms"]
        return found

    def _itl(self) -> dict[str, FloatArray]:
        """Tokens follow their request into a resample."""
        assert self.counts is not None
        run, place = self.run, np.full(len(self.run.ok), -1)
        place[self.rows] = np.arange(len(self.rows))
        used = (place[run.gap_of] >= 0) & run.ok[run.gap_of] & run.inside(run.gap_end_s)
        if not used.any():
            return {}
        owner = place[run.gap_of[used]]
        return _statistics("itl", run.gap_s[used] * 1e3, self.counts[:TOKEN_RESAMPLES], owner)

    def _rates(self) -> dict[str, FloatArray]:
        """Of what happened inside the window, by time; see latency."""
        assert self.counts is not None
        run, window_s = self.run, self.run.window_s
        if not window_s:
            return {}
        ok = self.of & run.ok
        arrived = ok[run.chunk_of] & run.inside(run.chunk_s)
        prompted, ended = ok & run.inside(run.first), ok & run.inside(run.end)
        n_slices = max(1, min(_SLICES, int(ended.sum())))
        edges = np.linspace(0.0, window_s, n_slices + 1)

        def per_slice(times_s: FloatArray, weights: npt.NDArray[Any] | None = None) -> FloatArray:
            return np.histogram(times_s, edges, weights=weights)[0].astype(float)

        out = per_slice(run.chunk_s[arrived], run.chunk_tokens[arrived])
        prompts = per_slice(run.first[prompted], run.prompt_tokens[prompted])
        requests = per_slice(run.end[ended])
        times = block_counts(n_slices, RESAMPLES, self.rng)
        met, good = (flags[self.rows].astype(float) for flags in (self.met & run.ok, run.ok))
        rate = times @ requests / window_s
        with np.errstate(invalid="ignore"):
            goodput = rate * (self.counts @ met) / (self.counts @ good)
        return {
            "output_throughput_tok_s": times @ out / window_s,
            "total_throughput_tok_s": times @ (out + prompts) / window_s,
            "request_throughput_rps": rate,
            "slo_attainment": self.counts @ met / len(self.rows),
            "goodput_rps": goodput,
        }


def block_counts(n: int, resamples: int, rng: np.random.Generator) -> IntArray:
    """How often each of n items in order is drawn, (resamples, n): circular blocks of ceil(n^(1/3)), n draws each."""
    length = int(np.ceil(round(n ** (1 / 3), 9)))
    starts = rng.integers(n, size=(resamples, -(-n // length)))
    drawn = ((starts[:, :, None] + np.arange(length)) % n).reshape(resamples, -1)[:, :n]
    rows = np.arange(resamples)[:, None] * n
    counts: IntArray = np.bincount((drawn + rows).ravel(), minlength=resamples * n).reshape(resamples, n)
    return counts


def _statistics(key: str, values: FloatArray, counts: IntArray, owner: IntArray | None = None) -> dict[str, FloatArray]:
    """Mean and percentiles of each resample; values (n,) belong to column owner (n,) of counts, their own if None.

    A percentile among failures is infinite. Means are over the finite ones.
    """
    order = np.argsort(values, kind="stable")
    ordered, owner = values[order], order if owner is None else owner[order]
    finite = int(np.isfinite(ordered).sum())
    found = {f"{key}_{name}_ms": np.full(len(counts), np.nan) for name in ("mean", *(f"p{p}" for p in PERCENTILES))}
    for b, drawn in enumerate(counts):
        below = np.cumsum(drawn[owner])
        total = int(below[-1]) if len(below) else 0
        if not total or not finite:
            continue
        if below[finite - 1]:
            found[f"{key}_mean_ms"][b] = drawn[owner[:finite]] @ ordered[:finite] / below[finite - 1]
        for p in PERCENTILES:
            rank = -(-total * p // 100)
            found[f"{key}_p{p}_ms"][b] = ordered[np.searchsorted(below, rank)]
    return found


def _middle(values: FloatArray) -> Interval | None:
    """The middle 95 %; None where a resample is infinite or unknown: an interval with one end is none."""
    if not len(values) or not np.isfinite(values).all():
        return None
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)
