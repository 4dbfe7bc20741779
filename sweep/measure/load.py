"""One load on one running server: the client's process, the engine's counters around it, and what they add up to."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.client import Job
from sweep.measure.cost import cost_usd_per_mtok
from sweep.measure.intervals import Interval, intervals
from sweep.measure.latency import summarize
from sweep.measure.telemetry import EngineReport, Telemetry
from sweep.measure.workload import Load, RequestSet, WorkloadSpec

# What the client may take beyond the load itself: starting Python, parsing and writing the rows.
_CLIENT_MARGIN_S = 60.0
_POLL_S = 0.1
_PACKAGE_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class LoadResult:
    """metrics: keys of results.metrics.METRICS. intervals: 95 % (low, high) of those that one run supports.

    completed, failed: measured requests; warmup_failed beside them. error_examples: the most frequent error texts,
    "12 x HTTP 400: …". engine: counters around the load, warm-up included. summary: the client's own JSON (window rule,
    counts, loop lag). shared_prefix_share: the prefix-cache hit rate that the requests sent cause at most, warm-up
    included. raw: the Parquet file, one row a request.
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
    python: str = sys.executable,
    should_stop: Callable[[], bool] | None = None,
) -> LoadResult:
    """Run the load client against a ready server and sum up what it and the engine saw.

    out: Parquet path; the job (.job.json), the request set (.requests.npz, removed afterwards), the client's log (.log)
    and its summary (.json) lie beside it. should_stop is asked every 0.1 s. Failed requests are counted, never raised.
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
        with Telemetry(server_base_url) as telemetry:
            _run_client(job, out, python, should_stop)
    finally:
        request_path.unlink(missing_ok=True)
    summary = json.loads(out.with_suffix(".json").read_text())
    counts = summary["counts"]
    if not counts["ok"] + counts["error"] + counts["timeout"]:
        raise LaunchFailure(
            FailureCause.load_timeout,
            f"{load.label}: max_load_s={spec.max_load_s:g} ended before the warm-up of {counts['warmup']} requests did",
        )
    return _result(out, summary, spec, requests, telemetry.report(), price_usd_per_device_hour, devices)


def _run_client(job: Job, out: Path, python: str, should_stop: Callable[[], bool] | None) -> None:
    job_path, log_path = out.with_suffix(".job.json"), out.with_suffix(".log")
    job_path.write_text(json.dumps(asdict(job), indent=1))
    limit_s = job.max_load_s + job.request_timeout_s + _CLIENT_MARGIN_S
    began = time.monotonic()
    with log_path.open("wb") as log:
        client = subprocess.Popen(
            [python, "-m", "sweep.measure.client", str(job_path)],
            cwd=_PACKAGE_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            while client.poll() is None:
                if should_stop is not None and should_stop():
                    raise LaunchFailure(FailureCause.interrupted, "stopped during the load")
                if time.monotonic() - began > limit_s:
                    raise LaunchFailure(FailureCause.load_timeout, f"the load client did not end within {limit_s:g} s")
                time.sleep(_POLL_S)
        finally:
            if client.poll() is None:
                client.kill()
                client.wait()
    if client.returncode != 0:
        last = log_path.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise LaunchFailure(FailureCause.unknown, f"the load client exited with {client.returncode}: {last[0]}")


def _result(
    out: Path,
    summary: Mapping[str, Any],
    spec: WorkloadSpec,
    requests: RequestSet,
    engine: EngineReport,
    price_usd_per_device_hour: float,
    devices: int,
) -> LoadResult:
    import pyarrow.parquet as pq

    table = pq.read_table(out)
    metrics = {**summarize(table, summary, spec), **engine.metrics}
    throughput = metrics["output_throughput_tok_s"]
    metrics["output_throughput_per_device_tok_s"] = None if throughput is None else throughput / devices
    metrics["cost_usd_per_mtok"] = cost_usd_per_mtok(price_usd_per_device_hour, devices, throughput)
    ends = intervals(table, summary, spec, metrics)
    if (rates := ends.get("output_throughput_tok_s")) is not None:
        ends["output_throughput_per_device_tok_s"] = (rates[0] / devices, rates[1] / devices)
        costs = [cost_usd_per_mtok(price_usd_per_device_hour, devices, rate) for rate in reversed(rates)]
        if costs[0] is not None and costs[1] is not None:
            ends["cost_usd_per_mtok"] = (costs[0], costs[1])
    errors = Counter(text for text in table["error"].to_pylist() if text is not None)
    counts = summary["counts"]
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
    )
