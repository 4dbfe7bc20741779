"""One launch, station by station: start, corpus, quality, load ladder. Facts leave as events the moment they exist."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.resolved import differences, fetch_resolved
from sweep.engine.server import Server
from sweep.launch.cross_check import cross_check
from sweep.launch.proof import broken_proof
from sweep.launch.spec import CONTROL, REPEAT, RESOLVED_FILE, LaunchSpec, logprobs_path
from sweep.measure.load import measure_load
from sweep.measure.quality import (
    QualitySpec,
    cache_path,
    load_logprobs,
    measure_logprobs,
    quality_prompts,
    save_logprobs,
)
from sweep.measure.workload import Load, RequestSet, WorkloadSpec, bos_token_id, build_requests, tokenize_corpus
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
    workload = WorkloadSpec.from_dict(spec.workload)
    requests = build_requests(workload, corpus, draw=spec.repeat)
    events.write("facts", facts={"workload_checksum": requests.checksum, "vllm_version": server.vllm_version})
    if spec.quality_runs:
        failure_or_none = _measure_quality(spec, server, corpus, events)
        if failure_or_none is not None:
            return failure_or_none
    closed = next((load for load in loads if load.concurrency is not None), None)
    if (
        spec.proof["cross_check"]
        and spec.purpose == "baseline"
        and spec.attempt == 0
        and closed is not None
        and not requests.is_text
    ):
        events.write("phase", phase="cross-check with vLLM's bench")
        try:
            events.write("facts", facts={"cross_check": cross_check(spec, server, workload, requests, corpus, closed)})
        except LaunchFailure as failure:
            events.write("facts", facts={"cross_check": {"failed": str(failure)}})
            if (death := server.died()) is not None:
                return death
    for load in loads:
        events.write("phase", phase=f"load {load.label}")
        failure_or_none = _measure_point(spec, server, workload, requests, load, events)
        if failure_or_none is not None:
            return failure_or_none
    return None


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
    spec: LaunchSpec, server: Server, workload: WorkloadSpec, requests: RequestSet, load: Load, events: EventSink
) -> LaunchFailure | None:
    """One operating point. A failure that leaves the server dead ends the launch; others are facts of this point."""
    began = _now()
    raw = spec.folder / f"{load.label}-r{spec.repeat}.parquet"
    try:
        server.reset_prefix_cache()
        result = measure_load(
            server.base_url,
            server.served_model,
            workload,
            load,
            requests,
            raw,
            devices=spec.devices,
            price_usd_per_device_hour=spec.price_usd_per_device_hour,
        )
    except LaunchFailure as failure:
        death = server.died()
        events.record(_point(spec, load, began, "failed", failure=death or failure))
        return death or (failure if failure.cause is FailureCause.load_timeout else None)
    death = server.died()
    if death is not None:
        events.record(_point(spec, load, began, "failed", failure=death))
        return death
    broken = broken_proof(result, spec.proof)
    events.record(
        _point(
            spec,
            load,
            began,
            "measured" if broken is None else "quarantined",
            failure=broken,
            metrics={**result.metrics, "startup_s": server.startup_s},
            intervals=result.intervals,
            raw=str(raw.relative_to(spec.study_dir)),
        )
    )
    return None


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


def _measure_quality(
    spec: LaunchSpec, server: Server, corpus: np.ndarray[Any, np.dtype[np.int64]], events: EventSink
) -> LaunchFailure | None:
    """The quality runs asked for, into the study folder. Returns a failure only if it left the server dead."""
    for run in spec.quality_runs:
        events.write("phase", phase=f"quality {run}".strip())
        try:
            cached = _cached_logprobs(spec, server, corpus, run)
        except LaunchFailure as failure:
            death = server.died()
            found = death or failure
            events.write("quality_failed", run=run, cause=found.cause.value, detail=found.detail)
            return death
        target = logprobs_path(Path(spec.study_dir), spec.engine_config.fingerprint, run)
        target.parent.mkdir(exist_ok=True)
        temporary = target.with_suffix(f".{spec.launch_id}.tmp")  # no name that a reader of *.npz would take up
        shutil.copyfile(cached, temporary)
        temporary.replace(target)
    events.write("quality")
    return None


def _cached_logprobs(spec: LaunchSpec, server: Server, corpus: np.ndarray[Any, np.dtype[np.int64]], run: str) -> Path:
    """Log-probabilities of this engine in the cache that all studies share; measured now if they are not there."""
    engine = spec.engine_config
    values = {k: v for k, v in spec.quality.items() if k != "enabled"}
    quality_spec = QualitySpec(**{**values, **({"concurrency": 1} if run == REPEAT else {})})
    bos = bos_token_id(server.base_url, server.served_model)
    prompts = quality_prompts(corpus, quality_spec, bos_token_id=bos)
    path = cache_path(
        prompts,
        quality_spec,
        model=engine.model,
        fingerprint={"": engine.fingerprint, CONTROL: f"{engine.hash}-{run}"}.get(run, f"{engine.fingerprint}-{run}"),
        engine_version=server.vllm_version or "unknown",
        device=spec.device_name,
    )
    if load_logprobs(path) is None:
        server.reset_prefix_cache()
        save_logprobs(path, measure_logprobs(server.base_url, server.served_model, prompts, quality_spec))
    return path


def _point(
    spec: LaunchSpec,
    load: Load,
    started_at: str,
    state: PointState,
    *,
    failure: LaunchFailure | None = None,
    metrics: dict[str, float | None] | None = None,
    intervals: dict[str, tuple[float, float]] | None = None,
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
        started_at=started_at,
        finished_at=_now(),
        raw=raw,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
