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

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

    from sweep.measure.workload import WorkloadSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_PERCENTILES = (50, 90, 99)


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


def summarize(table: pa.Table, summary: Mapping[str, Any], spec: WorkloadSpec) -> dict[str, float | None]:
    """Metrics of results.metrics.METRICS that a client can know. What was not measured is None."""
    column = {name: table[name].to_numpy() for name in table.column_names if not name.startswith("chunk_")}
    ok = column["status"] == "ok"
    measured = column["phase"] == "measured"
    good = ok & measured
    failed = int((measured & ~ok).sum())
    window_s: float | None = summary["window_s"]

    sent, first, last = (column[name].astype(float) for name in ("sent_s", "first_token_s", "last_token_s"))
    output = column["output_tokens"].astype(float)
    ttft_ms, e2e_ms = (first - sent) * 1e3, (last - sent) * 1e3
    tpot_ms = tpot_s(first, last, output, column["first_chunk_tokens"].astype(float)) * 1e3

    request, times_s, tokens = _chunks(table)
    gap_s, at_s, of = token_gaps(request, times_s, tokens)
    inside = good[of] & (at_s > 0) & (at_s <= (window_s or 0.0))

    metrics: dict[str, float | None] = {}
    has_tpot = good & ~np.isnan(tpot_ms)
    for key, samples in (("ttft", ttft_ms[good]), ("tpot", tpot_ms[has_tpot]), ("e2e", e2e_ms[good])):
        metrics[f"{key}_mean_ms"] = _mean(samples)
        for p in _PERCENTILES:
            metrics[f"{key}_p{p}_ms"] = percentile(samples, p, failures=failed)
    itl_ms = gap_s[inside] * 1e3
    metrics["itl_mean_ms"] = _mean(itl_ms)
    for p in _PERCENTILES:
        metrics[f"itl_p{p}_ms"] = None if metrics[f"tpot_p{p}_ms"] is None else percentile(itl_ms, p)

    tpot_p50_ms = metrics["tpot_p50_ms"]
    metrics["user_throughput_tok_s"] = 1000 / tpot_p50_ms if tpot_p50_ms else None
    metrics |= dict.fromkeys(
        ("request_throughput_rps", "output_throughput_tok_s", "total_throughput_tok_s", "goodput_rps")
    )
    if window_s and good.any():
        out = tokens[ok[request] & (times_s > 0) & (times_s <= window_s)].sum()
        prompts = column["prompt_tokens"][ok & (first > 0) & (first <= window_s)].sum()
        ended = ok & (column["end_s"] > 0) & (column["end_s"] <= window_s)
        rate = float(ended.sum()) / window_s
        metrics["request_throughput_rps"] = rate
        metrics["output_throughput_tok_s"] = float(out) / window_s
        metrics["total_throughput_tok_s"] = float(out + prompts) / window_s
        if spec.slo_ttft_ms is not None or spec.slo_tpot_ms is not None:
            met = (ttft_ms <= _bound(spec.slo_ttft_ms)) & ~(tpot_ms > _bound(spec.slo_tpot_ms))  # no TPOT, no miss
            metrics["goodput_rps"] = rate * float(met[good].mean())
    metrics["requests_completed"] = float(good.sum())
    metrics["requests_failed"] = float(failed)
    metrics["client_loop_lag_p99_ms"] = summary["loop_lag_p99_ms"]
    metrics["client_send_lateness_p99_ms"] = summary["send_lateness_p99_ms"]
    return metrics


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


def _bound(slo: float | None) -> float:
    return np.inf if slo is None else slo
