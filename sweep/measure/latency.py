"""Latency and throughput of one load, from the rows and the summary its client wrote.

Percentiles are observed values: the p-th is the smallest sample that at least p % of all samples do not exceed
(the inverse of the empirical distribution, definition 1 of Hyndman & Fan 1996), which is what an SLA "p99 <= x" says;
interpolation would invent a value between two requests. A p-th percentile is None unless at least one sample is
expected beyond it, n (100 - p) / 100 >= 1: p99 takes 100 samples, p90 takes 10, the median 2.

TTFT, TPOT and E2E have one sample per measured request. A failed request counts as slower than all others, so a
configuration cannot improve its tail by failing; a percentile that falls among failures is None. (Means are over the
completed.) Requests that end after the window are included: leaving them out would favour short ones.
ITL has one sample per token that arrived inside the window. Tokens of one request share its fate, and one slow request
must not be the whole tail, so an ITL percentile also needs as many requests as the same TPOT percentile.

Rates count what happened inside the window, by time stamp, whichever request it belongs to: warm-up requests still in
flight when it opens make up for measured ones still in flight when it closes. Prompt tokens count at the first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sweep.results.metrics import PER_CLASS

if TYPE_CHECKING:
    import pyarrow as pa

    from sweep.measure.workload import RequestClass, WorkloadSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

PERCENTILES = (50, 90, 95, 99)


def percentile(samples: FloatArray, p: int, *, failures: int = 0) -> float | None:
    """The p-th percentile (p in whole percent) of samples (n,) and `failures` more at infinity, or None (see above)."""
    n = len(samples) + failures
    rank = -(-n * p // 100)  # ceil in integers: 0.99 * n is not exact
    if n * (100 - p) < 100 or rank > len(samples):
        return None
    return float(np.partition(samples, rank - 1)[rank - 1])


def tpot_s(first_token_s: FloatArray, last_token_s: FloatArray, tokens: FloatArray, first: FloatArray) -> FloatArray:
    """Seconds per output token after the first chunk, (n,): (t_last - t_first) / (tokens - first).

    `first` tokens came with the first chunk, so only the others took the time after it. (Dividing by tokens - 1 is low
    under speculative decoding.) NaN for a request whose only chunk was its first.
    """
    later = tokens - first
    result: FloatArray = np.full(len(later), np.nan)
    return np.divide(last_token_s - first_token_s, later, out=result, where=later > 0)


def token_gaps(request: IntArray, times_s: FloatArray, tokens: IntArray) -> tuple[FloatArray, FloatArray, IntArray]:
    """Gaps between tokens: (gap in seconds, time it ended, request), one entry per token after each first chunk.

    request, times_s, tokens: (chunks,), in order of time within a request. A chunk of k tokens, g seconds after the
    one before it, gives k samples of g / k: a client that shows tokens evenly needs them at that pace.
    """
    follows = request[1:] == request[:-1]
    k = tokens[1:][follows]
    gaps = np.diff(times_s)[follows] / k
    return np.repeat(gaps, k), np.repeat(times_s[1:][follows], k), np.repeat(request[1:][follows], k)


def summarize(run: Run, summary: Mapping[str, Any], spec: WorkloadSpec) -> dict[str, float | None]:
    """Metrics of results.metrics.METRICS that a client can know. What was not measured is None.

    Where the workload has request classes, each metric of PER_CLASS also exists for each, as "<metric>.<class>".
    """
    classes = spec.request_classes
    of_classes = [run.metrics(run.belongs_to(c), c) for c in classes]
    if spec.classes:
        metrics = run.metrics(np.ones(len(run.ok), dtype=bool), None) | _together(classes, of_classes)
        for c, of_class in zip(classes, of_classes, strict=True):
            metrics |= {f"{name}.{c.name}": of_class[name] for name in PER_CLASS}
    else:
        (metrics,) = of_classes
    metrics["client_loop_lag_p99_ms"] = summary["loop_lag_p99_ms"]
    metrics["client_send_lateness_p99_ms"] = summary["send_lateness_p99_ms"]
    return metrics


def _together(
    classes: Sequence[RequestClass], of_classes: Sequence[Mapping[str, float | None]]
) -> dict[str, float | None]:
    """Goodput and attainment of all classes: the sums over each. What has no SLO meets it once completed."""
    if not any(c.has_slo for c in classes):
        return {"goodput_rps": None, "slo_attainment": None}
    good_rps = [
        m["goodput_rps" if c.has_slo else "request_throughput_rps"] for c, m in zip(classes, of_classes, strict=True)
    ]
    sizes = [(m["requests_completed"] or 0.0) + (m["requests_failed"] or 0.0) for m in of_classes]
    met = [
        (m["slo_attainment"] or 0.0) * size if c.has_slo else m["requests_completed"] or 0.0
        for c, m, size in zip(classes, of_classes, sizes, strict=True)
    ]
    known = [rate for rate in good_rps if rate is not None]
    return {
        "goodput_rps": sum(known) if known else None,
        "slo_attainment": sum(met) / sum(sizes) if sum(sizes) else None,
    }


class Run:
    """One load, column by column: (rows,) arrays, and one entry per token gap and per chunk.

    ok, measured: whether the request completed, and whether it counts. sent, first, end: seconds since the window
    opened. latency_ms: "ttft", "tpot", "e2e", NaN where there is none. gap_s, gap_end_s, gap_of: see token_gaps.
    """

    def __init__(self, table: pa.Table, summary: Mapping[str, Any]) -> None:
        column = {name: table[name].to_numpy() for name in table.column_names if not name.startswith("chunk_")}
        self.window_s: float | None = summary["window_s"]
        self.ok = column["status"] == "ok"
        self.measured = column["phase"] == "measured"
        self.class_names = column.get("class", np.full(len(self.ok), None))
        self.sent, self.first, last = (
            column[name].astype(float) for name in ("sent_s", "first_token_s", "last_token_s")
        )
        self.end, self.prompt_tokens = column["end_s"], column["prompt_tokens"]
        output, first_chunk = column["output_tokens"].astype(float), column["first_chunk_tokens"].astype(float)
        self.latency_ms = {
            "ttft": (self.first - self.sent) * 1e3,
            "tpot": tpot_s(self.first, last, output, first_chunk) * 1e3,
            "e2e": (last - self.sent) * 1e3,
        }
        self.chunk_of, self.chunk_s, self.chunk_tokens = _chunks(table)
        self.gap_s, self.gap_end_s, self.gap_of = token_gaps(self.chunk_of, self.chunk_s, self.chunk_tokens)

    def metrics(self, of: BoolArray, slo: RequestClass | None) -> dict[str, float | None]:
        """Of the requests chosen by `of`, (rows,), against the SLO of this class."""
        good, failed = of & self.ok & self.measured, int((of & self.measured & ~self.ok).sum())
        metrics = self._latencies(good, failed)
        metrics |= dict.fromkeys(("request_throughput_rps", "output_throughput_tok_s", "total_throughput_tok_s"))
        metrics |= {"goodput_rps": None, "slo_attainment": None}
        met = self.met(slo) if slo is not None and slo.has_slo else None
        if met is not None and good.sum() + failed:
            metrics["slo_attainment"] = float((met & good).sum() / (good.sum() + failed))
        if self.window_s and good.any():
            ok = of & self.ok
            arrived = ok[self.chunk_of] & self.inside(self.chunk_s)
            out = float(self.chunk_tokens[arrived].sum())
            prompts = float(self.prompt_tokens[ok & self.inside(self.first)].sum())
            rate = float((ok & self.inside(self.end)).sum()) / self.window_s
            metrics["request_throughput_rps"] = rate
            metrics["output_throughput_tok_s"] = out / self.window_s
            metrics["total_throughput_tok_s"] = (out + prompts) / self.window_s
            if met is not None:
                metrics["goodput_rps"] = rate * float(met[good].mean())
        metrics["requests_completed"] = float(good.sum())
        metrics["requests_failed"] = float(failed)
        return metrics

    def _latencies(self, good: BoolArray, failed: int) -> dict[str, float | None]:
        metrics: dict[str, float | None] = {}
        for key, every in self.latency_ms.items():
            samples = every[good & ~np.isnan(every)]
            metrics[f"{key}_mean_ms"] = _mean(samples)
            for p in PERCENTILES:
                metrics[f"{key}_p{p}_ms"] = percentile(samples, p, failures=failed)
        itl_ms = self.gap_s[good[self.gap_of] & self.inside(self.gap_end_s)] * 1e3
        metrics["itl_mean_ms"] = _mean(itl_ms)
        for p in PERCENTILES:
            metrics[f"itl_p{p}_ms"] = None if metrics[f"tpot_p{p}_ms"] is None else percentile(itl_ms, p)
        tpot_p50_ms = metrics["tpot_p50_ms"]
        metrics["user_throughput_tok_s"] = 1000 / tpot_p50_ms if tpot_p50_ms else None
        return metrics

    def inside(self, times_s: FloatArray) -> BoolArray:
        """Which times lie in the measured window."""
        inside: BoolArray = (times_s > 0) & (times_s <= (self.window_s or 0.0))
        return inside

    def belongs_to(self, request_class: RequestClass) -> BoolArray:
        """Which requests are of this class, (rows,); all, if it has no name."""
        belongs: BoolArray = self.class_names == request_class.name
        return belongs if request_class.name else np.ones(len(self.ok), dtype=bool)

    def met(self, slo: RequestClass) -> BoolArray:
        """Which requests met every SLO, (rows,). One without a TPOT cannot miss it."""
        missed = np.zeros(len(self.ok), dtype=bool)
        for key, bound in (("ttft", slo.slo_ttft_ms), ("tpot", slo.slo_tpot_ms), ("e2e", slo.slo_e2e_ms)):
            if bound is not None:
                missed |= self.latency_ms[key] > bound
        return ~missed


def _chunks(table: pa.Table) -> tuple[IntArray, FloatArray, IntArray]:
    """Row number, time and tokens of every chunk, end to end."""
    import pyarrow.compute as pc

    times, tokens = table["chunk_times_s"], table["chunk_tokens"]
    counts = pc.list_value_length(times).to_numpy()
    flat_times = times.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    flat_tokens = tokens.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(len(counts)), counts), flat_times, flat_tokens.astype(np.int64)


def _mean(samples: FloatArray) -> float | None:
    return float(samples.mean()) if len(samples) else None
