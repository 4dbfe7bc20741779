"""`sweep verify`: a point launched fresh and put through what production will do to it; pass or fail for each bound.

One launch by the same worker and executor as any other, with stages in place of the load ladder (study/stages.py). It
writes to verifications/<id>/ in the study folder, so that a sweep that is continued later does not take it for work it
left behind, and holds the study's lock meanwhile: devices are never shared with a running sweep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweep.config import SweepConfig
from sweep.decide.opened import Study
from sweep.decide.sla import Sla
from sweep.decide.verdict import Verdict, judge
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause
from sweep.errors import StudyError
from sweep.executor import Job
from sweep.executor.local import LocalExecutor
from sweep.launch.launch import CORPUS_FILE, WORKLOAD_DIR
from sweep.launch.spec import LAUNCHES_DIR, RESOLVED_FILE, LaunchSpec, make_spec
from sweep.measure.corpus import unique_starts
from sweep.measure.windows import windows
from sweep.measure.workload import HELD_OUT_DRAW, Load, WorkloadSpec
from sweep.results.points import OperatingPoint
from sweep.results.records import LaunchRecord, PointRecord, Record, record_from_dict
from sweep.results.verifications import StageResult, Verification, append_verification
from sweep.study.folder import locked
from sweep.study.stages import Stages, build_stages

VERIFICATIONS_DIR = "verifications"
_POLL_S = 0.1
# A window of a soak needs as many requests as its percentiles do.
_WINDOW_REQUESTS = {"p99": 100, "": 20}


def verify(
    study: Study,
    point: OperatingPoint,
    sla: Sla,
    stages: Stages,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Verdict:
    """Launch the point, run the stages, judge and record. sla: bounds as numbers (Sla.resolved).

    Raises StudyError for a point that was not measured, a study that is being run, or a config of another version. An
    interrupt stops the server, records nothing and is raised again.
    """
    if point.state != "measured":
        raise StudyError(
            f"point {point.point_id} is {point.state} ({point.cause}): nothing to verify",
            "choose a measured one: `sweep front` lists the best",
        )
    config, folder = config_of(study), study.path.resolve()
    with locked(folder):
        began = _now()
        spec, asked = _launch_spec(config, folder, point, stages)
        records = _run(LocalExecutor(config.hardware, 1).submit(spec), on_phase)
        launch = next((r for r in records if isinstance(r, LaunchRecord)), None)
        measured = {r.launch_id: r for r in records if isinstance(r, PointRecord)}
        results = [_result(spec, stage, asked[stage["name"]], measured, sla) for stage in spec.stages]
        cause: str | None = FailureCause.unknown.value
        detail: str | None = "the launch process died without a word"
        if launch is not None:
            cause, detail = launch.cause, launch.detail
        verification = Verification(
            verification_id=spec.launch_id,
            point_id=point.point_id,
            config_hash=point.config_hash,
            load_label=point.load_label,
            provenance=spec.provenance,
            sla=str(sla),
            passed=False,
            stages=tuple(results),
            started_at=began,
            finished_at=_now(),
            startup_s=None if launch is None else launch.startup_s,
            vllm_version=None if launch is None else launch.vllm_version,
            cause=cause,
            detail=detail,
        )
        verification = replace(verification, passed=judge(verification, sla, point.metrics).passed)
        append_verification(folder, verification)
    return judge(verification, sla, point.metrics)


def config_of(study: Study) -> SweepConfig:
    """The configuration a study was run with, typed. Raises StudyError where this sweep does not understand it."""
    try:
        typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SweepConfig), study.config))
    except OmegaConfBaseException as error:
        raise StudyError(
            f"the configuration in {study.path / 'study.json'} does not fit this sweep: {str(error).splitlines()[0]}",
            "use the sweep version that wrote it (see 'versions' in the file)",
        ) from error
    assert isinstance(typed, SweepConfig)
    return typed


def _launch_spec(
    config: SweepConfig, folder: Path, point: OperatingPoint, stages: Stages
) -> tuple[LaunchSpec, dict[str, dict[str, float]]]:
    """The launch, and for each stage what it asks more of the engine than the study did."""
    engine = EngineConfig.from_dict(point.engine)
    number = 1 + sum(path.is_dir() for path in (folder / VERIFICATIONS_DIR).glob("*"))
    spec = make_spec(
        config,
        folder,
        launch_id=f"v{number:03d}-{point.config_hash}-{point.load_label}",
        engine=engine,
        params=None,
        purpose="validation",
        attempt=0,
        loads=(),
        repeat=HELD_OUT_DRAW,
        quality_runs=(),
    )
    context = engine.args.get("max_model_len") or _resolved(folder, point).get("model_config.max_model_len")
    built = build_stages(stages, spec.workload, point, context, _texts(folder))
    asked = {stage["name"]: stage.pop("asked") for stage in built}
    return replace(spec, within=VERIFICATIONS_DIR, stages=tuple(built)), asked


def _resolved(folder: Path, point: OperatingPoint) -> dict[str, Any]:
    """What vLLM made of this engine config when it was measured; empty if it never told."""
    path = folder / LAUNCHES_DIR / point.launch_id / RESOLVED_FILE
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {}


def _texts(folder: Path) -> int | None:
    path = folder / WORKLOAD_DIR / CORPUS_FILE
    return len(unique_starts(np.load(path))) if path.exists() else None


def _run(job: Job, on_phase: Callable[[str], None]) -> list[Record]:
    """Wait for the launch to end; its records. Whatever ends the wait, no server is left behind."""
    records: list[Record] = []
    try:
        running = True
        while running:
            running = job.running
            for event in job.poll():
                if event["event"] == "phase":
                    on_phase(event["phase"])
                elif event["event"] == "record":
                    records.append(record_from_dict(event["record"]))
                elif event["event"] == "mistake":
                    raise StudyError(event["message"], event["hint"])
            if running:
                time.sleep(_POLL_S)
    finally:
        job.cancel()
        while job.running:
            time.sleep(_POLL_S)
    return records


def _result(
    spec: LaunchSpec,
    stage: Mapping[str, Any],
    asked: Mapping[str, float],
    measured: Mapping[str, PointRecord],
    sla: Sla,
) -> StageResult:
    load: Load = WorkloadSpec.from_dict(stage["workload"]).loads[0]
    record = measured.get(stage["name"])
    if record is None:
        return StageResult(stage["name"], asked, load.to_dict(), load.label, "failed", "interrupted", "never reached")
    is_soak = stage["name"] == "soak" and record.raw is not None
    return StageResult(
        name=stage["name"],
        asked=asked,
        load=record.load,
        load_label=record.load_label,
        state=record.state,
        cause=record.cause,
        detail=record.detail,
        metrics=record.metrics,
        intervals=record.intervals,
        windows=tuple(_windows(spec, stage, Path(spec.study_dir) / str(record.raw), sla)) if is_soak else (),
        raw=record.raw,
    )


def _windows(spec: LaunchSpec, stage: Mapping[str, Any], raw: Path, sla: Sla) -> list[dict[str, float | None]]:
    tail = any("p99" in b.metric for b in sla.bounds)
    return windows(
        pq.read_table(raw),
        json.loads(raw.with_suffix(".json").read_text()),
        WorkloadSpec.from_dict(stage["workload"]),
        least_requests=_WINDOW_REQUESTS["p99" if tail else ""],
        price_usd_per_device_hour=spec.price_usd_per_device_hour,
        devices=spec.devices,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
