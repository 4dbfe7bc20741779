"""One load on one running server: the client's processes, the engine's counters around it, and what they add up to."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.client import Job
from sweep.measure.cost import cost_usd_per_mtok, energy_j_per_token, per_device_metrics
from sweep.measure.fleet import run_clients
from sweep.measure.intervals import Interval, intervals
from sweep.measure.latency import Run, summarize
from sweep.measure.steadiness import Drift, drifts
from sweep.measure.telemetry import DeviceReport, EngineReport, Telemetry
from sweep.measure.workload import Load, RequestSet, WorkloadSpec

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class LoadResult:
    """metrics: keys of results.metrics.METRICS. intervals: 95 % (low, high) of those that one run supports.

    completed, failed: measured requests; warmup_failed beside them. error_examples: the most frequent error texts,
    "12 x HTTP 400: …". engine: counters around the load, warm-up included. summary: the client's own JSON (window rule,
    counts, loop lag). shared_prefix_share: the prefix-cache hit rate that the requests sent cause at most, warm-up
    included. raw: the Parquet file, one row a request. short: measured requests with fewer tokens than were asked for;
    None where the model may stop by itself, and then cut_off is how many ran into their limit instead. prompt_tokens,
    output_tokens: of all requests, warm-up included, by the answers' own count. devices: empty without a driver.
    drifts: of the medians from the first to the second half of the run; empty where there are too few requests.
    """

    metrics: dict[str, float | None]
    intervals: dict[str, Interval]
    completed: int
    failed: int
    warmup_failed: int
    error_examples: tuple[str, ...]
    engine: EngineReport
    summary: Mapping[str, Any]
    shared_prefix_share: float
    raw: Path
    short: int | None = None
    cut_off: int | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    devices: tuple[DeviceReport, ...] = ()
    drifts: tuple[Drift, ...] = ()

    @property
    def first_error(self) -> str | None:
        return self.error_examples[0] if self.error_examples else None


def measure_load(
    server_base_url: str,
    model: str,
    spec: WorkloadSpec,
    load: Load,
    requests: RequestSet,
    out: Path,
    *,
    price_usd_per_device_hour: float,
    devices: int,
    device_ids: Sequence[str] = (),
    python: str = sys.executable,
    should_stop: Callable[[], bool] | None = None,
) -> LoadResult:
    """Run the load client against a ready server and sum up what it and the engine saw.

    out: Parquet path; the job (.job.json), the request set (.requests.npz, removed afterwards), the client's log (.log)
    and its summary (.json) lie beside it. device_ids: as in CUDA_VISIBLE_DEVICES, to be watched. should_stop is asked
    every 0.1 s. Failed requests are counted, never raised.
    Raises LaunchFailure: load_timeout when the client hangs or nothing could be measured within max_load_s, interrupted
    when should_stop says so, unknown when the client dies.
    """
    out = out.resolve()
    request_path = out.with_suffix(".requests.npz")
    requests.save(request_path)
    job = Job(
        base_url=server_base_url,
        model=model,
        requests=str(request_path),
        load=load.to_dict(),
        temperature=spec.temperature,
        num_requests=spec.num_requests,
        warmup_requests=spec.warmup_requests,
        max_load_s=spec.max_load_s,
        request_timeout_s=spec.request_timeout_s,
        seed=int(requests.checksum[:8], 16),  # each draw has its own arrivals
        out=str(out),
        ignore_eos=spec.ignore_eos,
    )
    try:
        with Telemetry(server_base_url, device_ids) as telemetry:
            run_clients(job, processes=spec.client_processes, python=python, should_stop=should_stop)
    finally:
        request_path.unlink(missing_ok=True)
    summary = json.loads(out.with_suffix(".json").read_text())
    counts = summary["counts"]
    if not counts["ok"] + counts["error"] + counts["timeout"]:
        raise LaunchFailure(
            FailureCause.load_timeout,
            f"{load.label}: max_load_s={spec.max_load_s:g} ended before the warm-up of {counts['warmup']} requests did",
        )
    return _result(out, summary, spec, requests, telemetry, price_usd_per_device_hour, devices)


def _result(
    out: Path,
    summary: Mapping[str, Any],
    spec: WorkloadSpec,
    requests: RequestSet,
    telemetry: Telemetry,
    price_usd_per_device_hour: float,
    devices: int,
) -> LoadResult:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(out)
    engine = telemetry.report()
    watched = telemetry.devices(summary["window_began_unix_s"], summary["window_s"])
    run = Run(table, summary)
    metrics = {**summarize(run, summary, spec), **engine.metrics}
    throughput = metrics["output_throughput_tok_s"]
    metrics["energy_j_per_token"] = energy_j_per_token(_total_power_w(watched), throughput)
    total = metrics["total_throughput_tok_s"]
    metrics["cost_usd_per_mtok_total"] = cost_usd_per_mtok(price_usd_per_device_hour, devices, total)
    metrics |= per_device_metrics(price_usd_per_device_hour, devices, throughput)
    ends = intervals(run, spec, metrics)
    if (rates := ends.get("output_throughput_tok_s")) is not None:
        low, high = (per_device_metrics(price_usd_per_device_hour, devices, rate) for rate in rates)
        for name, one in low.items():
            other = high[name]
            if one is not None and other is not None:
                ends[name] = (min(one, other), max(one, other))
    if (rates := ends.get("total_throughput_tok_s")) is not None and rates[0] > 0:
        costs = [cost_usd_per_mtok(price_usd_per_device_hour, devices, rate) or 0.0 for rate in reversed(rates)]
        ends["cost_usd_per_mtok_total"] = (costs[0], costs[1])
    errors = Counter(text for text in table["error"].to_pylist() if text is not None)
    counts = summary["counts"]
    short, cut_off = _cut_short(table, requests, spec.ignore_eos)
    return LoadResult(
        metrics=metrics,
        intervals=ends,
        completed=counts["ok"],
        failed=counts["error"] + counts["timeout"],
        warmup_failed=counts["warmup_failed"],
        error_examples=tuple(f"{n} x {text}" for text, n in errors.most_common(3)),
        engine=engine,
        summary=summary,
        shared_prefix_share=requests.prefix_share(table["index"].to_pylist()),
        raw=out,
        short=short,
        cut_off=cut_off,
        prompt_tokens=pc.sum(table["prompt_tokens"]).as_py() or 0,
        output_tokens=pc.sum(table["output_tokens"]).as_py() or 0,
        devices=tuple(watched),
        drifts=tuple(drifts(run)),
    )


def _total_power_w(watched: Sequence[DeviceReport]) -> float | None:
    """Of all devices together; None unless each of them was measured."""
    powers = [device.power_mean_w for device in watched]
    return sum(p for p in powers if p is not None) if powers and None not in powers else None


def _cut_short(table: pa.Table, requests: RequestSet, ignore_eos: bool) -> tuple[int | None, int | None]:
    """(short, cut_off) of the measured requests, see LoadResult."""
    rows = table.select(["index", "phase", "output_tokens"]).to_pylist()
    answers = [(r["output_tokens"], int(requests.max_tokens[r["index"]])) for r in rows if r["phase"] == "measured"]
    short = sum(got is not None and got < asked for got, asked in answers)
    full = sum(got is not None and got >= asked for got, asked in answers)
    return (short, None) if ignore_eos else (None, full)
