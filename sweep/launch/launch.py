"""One launch, station by station: start, corpus, quality, load ladder. Facts leave as events the moment they exist."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.resolved import differences, fetch_resolved
from sweep.engine.server import Server
from sweep.launch.cross_check import cross_check
from sweep.launch.ladder import LadderRules, LoadPoint, cut_records, next_load
from sweep.launch.proof import broken_proof, gather
from sweep.launch.quality import check_under_load, measure_quality, verified_speculation
from sweep.launch.spec import RESOLVED_FILE, LaunchSpec
from sweep.measure.cache_state import ask_once, shared_beginnings, with_cold_warmup
from sweep.measure.load import measure_load
from sweep.measure.telemetry import await_idle
from sweep.measure.workload import Load, RequestSet, WorkloadSpec, build_requests, tokenize_corpus
from sweep.results.records import PointRecord, PointState, Record

WORKLOAD_DIR = "workload"
CORPUS_FILE = "corpus.npy"


class EventSink(Protocol):
    """Where facts go; launch/worker.py writes them to events.jsonl."""

    def write(self, event: str, **data: Any) -> None: ...

    def record(self, record: Record) -> None: ...


def run_launch(spec: LaunchSpec, server: Server, events: EventSink) -> LaunchFailure | None:
    """Everything between start and stop. Returns what ended the launch early, or None; the caller stops the server."""
    loads = [Load.from_dict(load) for load in spec.loads]
    events.write("phase", phase="starting")
    began = _now()
    try:
        server.start()
        events.write("phase", phase="preparing requests")
        _save_resolved(spec, server)
        corpus = _corpus(spec, server)
    except LaunchFailure as failure:
        for load in loads:
            events.record(_point(spec, load, began, "failed", failure=failure))
        return failure
    if spec.stages:
        return _run_stages(spec, server, corpus, events)
    workload = WorkloadSpec.from_dict(spec.workload)
    requests = build_requests(workload, corpus, draw=spec.repeat)
    events.write("facts", facts={"workload_checksum": requests.checksum, "vllm_version": server.vllm_version})
    if spec.quality_runs:
        failure_or_none = measure_quality(spec, server, corpus, events)
        if failure_or_none is not None:
            return failure_or_none
    spec = verified_speculation(spec, server, corpus, events)
    if (death := server.died()) is not None:
        return death
    closed = next((load for load in loads if load.concurrency is not None), None)
    if spec.quality["enabled"] and spec.quality["under_load"] and _is_first_baseline(spec) and closed is not None:
        try:
            check_under_load(spec, server, corpus, requests, closed, events)
        except LaunchFailure as failure:
            events.write("facts", facts={"quality_under_load": {"failed": str(failure)}})
            if (death := server.died()) is not None:
                return death
    if spec.proof["cross_check"] and _is_first_baseline(spec) and closed is not None and not requests.is_text:
        events.write("phase", phase="cross-check with vLLM's bench")
        try:
            events.write("facts", facts={"cross_check": cross_check(spec, server, workload, requests, corpus, closed)})
        except LaunchFailure as failure:
            events.write("facts", facts={"cross_check": {"failed": str(failure)}})
            if (death := server.died()) is not None:
                return death
    return _walk(spec, server, workload, requests, events)


def _walk(
    spec: LaunchSpec, server: Server, workload: WorkloadSpec, requests: RequestSet, events: EventSink
) -> LaunchFailure | None:
    """The loads, each chosen by what was measured before it (launch/ladder.py); those that were cut are facts too."""
    asked, rules, points = [Load.from_dict(load) for load in spec.loads], LadderRules.of(spec), list[LoadPoint]()
    while (load := next_load(points, asked, rules, workload.loads)) is not None:
        events.write("phase", phase=f"load {load.label}")
        record, failure = _measure_point(spec, server, workload, requests, load)
        events.record(record)
        if failure is not None:
            return failure
        points.append(LoadPoint.of(record))
    for record in cut_records(spec, points, rules, _now()):
        events.record(record)
    return None


def _run_stages(
    spec: LaunchSpec, server: Server, corpus: np.ndarray[Any, np.dtype[np.int64]], events: EventSink
) -> LaunchFailure | None:
    """The stages of a verification in order, each a point of its own on the same server."""
    for stage in spec.stages:
        events.write("phase", phase=f"stage {stage['name']}")
        staged = spec.at_stage(stage)
        staged.folder.mkdir(exist_ok=True)
        workload = WorkloadSpec.from_dict(staged.workload)
        requests = build_requests(workload, corpus, draw=staged.repeat)
        record, failure = _measure_point(staged, server, workload, requests, workload.loads[0])
        events.record(record)
        if failure is not None:
            return failure
    return None


def _is_first_baseline(spec: LaunchSpec) -> bool:
    return spec.purpose == "baseline" and spec.attempt == 0


def _save_resolved(spec: LaunchSpec, server: Server) -> None:
    resolved = fetch_resolved(server.base_url)
    if resolved is not None:
        temporary = (spec.folder / RESOLVED_FILE).with_suffix(".tmp")
        temporary.write_text(json.dumps(resolved, indent=1))
        temporary.replace(spec.folder / RESOLVED_FILE)


def resolved_differently(spec: LaunchSpec) -> dict[str, Any]:
    """Arguments of a launch that vLLM resolved to something else: name -> [asked, resolved]; empty if it never told."""
    path = spec.folder / RESOLVED_FILE
    return differences(spec.engine_config.nested_args, json.loads(path.read_text())) if path.exists() else {}


def _measure_point(
    spec: LaunchSpec, server: Server, workload: WorkloadSpec, requests: RequestSet, load: Load
) -> tuple[PointRecord, LaunchFailure | None]:
    """One operating point. A failure that leaves the server dead ends the launch; others are facts of this point."""
    began = _now()
    raw = spec.folder / f"{load.label}-r{spec.repeat}.parquet"
    try:
        drained_s = await_idle(server.base_url, spec.proof["max_drain_s"])
        prepared, cache = prepare_cache(server, workload, requests)
        result = measure_load(
            server.base_url,
            server.served_model,
            workload,
            load,
            prepared,
            raw,
            devices=spec.devices,
            device_ids=server.device_ids,
            price_usd_per_device_hour=spec.price_usd_per_device_hour,
        )
    except LaunchFailure as failure:
        death = server.died()
        ends = death or (failure if failure.cause is FailureCause.load_timeout else None)
        return _point(spec, load, began, "failed", failure=death or failure), ends
    death = server.died()
    if death is not None:
        return _point(spec, load, began, "failed", failure=death), death
    proof = gather(result, server, workload, load, cache, drained_s)
    broken = broken_proof(proof, spec.proof)
    record = _point(
        spec,
        load,
        began,
        "measured" if broken is None else "quarantined",
        failure=broken,
        metrics={
            **result.metrics,
            "startup_s": server.startup_s,
            "first_request_ms": server.first_request_ms,
        },
        intervals=result.intervals,
        proof=proof,
        raw=str(raw.relative_to(spec.study_dir)),
    )
    return record, None


def prepare_cache(server: Server, workload: WorkloadSpec, requests: RequestSet) -> tuple[RequestSet, dict[str, Any]]:
    """The prefix cache as workload.cache wants it; returns the requests to send and what was really done.

    state is None where the server cannot forget its cache, and so whatever came before is in it.
    """
    forgotten = server.reset_prefix_cache()
    done: dict[str, Any] = {"asked": workload.cache, "state": workload.cache if forgotten else None, "reset": forgotten}
    if workload.cache == "cold":
        return with_cold_warmup(requests), done
    if workload.cache == "steady":
        shared = shared_beginnings(requests)
        ask_once(server.base_url, server.served_model, shared, workload.request_timeout_s)
        await_idle(server.base_url, workload.request_timeout_s)
        done |= {"primed_prefixes": len(shared), "primed_tokens": sum(map(len, shared))}
    return requests, done


def _corpus(spec: LaunchSpec, server: Server) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids of the corpus under the served tokenizer, made once for a study: every launch asks the same text."""
    path = Path(spec.study_dir) / WORKLOAD_DIR / CORPUS_FILE
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{spec.launch_id}.tmp.npy")
        np.save(temporary, tokenize_corpus(server.base_url, server.served_model))
        temporary.replace(path)
    tokens: np.ndarray[Any, np.dtype[np.int64]] = np.load(path)
    return tokens


def _point(
    spec: LaunchSpec,
    load: Load,
    started_at: str,
    state: PointState,
    *,
    failure: LaunchFailure | None = None,
    metrics: dict[str, float | None] | None = None,
    intervals: dict[str, tuple[float, float]] | None = None,
    proof: dict[str, Any] | None = None,
    raw: str | None = None,
) -> PointRecord:
    return PointRecord(
        **spec.point_identity(load),
        state=state,
        cause=None if failure is None else failure.cause.value,
        detail=None if failure is None else failure.detail,
        transient=failure is not None and failure.cause.transient,
        metrics=metrics or {},
        intervals=intervals or {},
        proof=proof or {},
        started_at=started_at,
        finished_at=_now(),
        raw=raw,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
