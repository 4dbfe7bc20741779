"""Launches without servers, for everything a single small machine cannot provoke: many GPUs, every order of events.

A *script* is a function of a LaunchSpec that yields lists of events, one list for each time the loop looks.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from sweep.config import (
    BudgetConfig,
    ExecutorConfig,
    HardwareConfig,
    LengthConfig,
    LoadsConfig,
    ModelConfig,
    ObjectivesConfig,
    ParamConfig,
    QualityConfig,
    SamplerConfig,
    SpaceConfig,
    StorageConfig,
    SweepConfig,
    WorkloadConfig,
)
from sweep.engine.failures import FailureCause
from sweep.executor.device_pool import DevicePool
from sweep.launch.spec import REPEAT, LaunchSpec, logprobs_path
from sweep.measure.quality import PromptLogprobs, save_logprobs
from sweep.measure.workload import Load
from sweep.results.records import LaunchRecord, PointRecord, to_dict
from sweep.space.search_space import SearchSpace, make_search_space
from sweep.study.folder import study_folder
from sweep.study.loop import StudyLoop
from sweep.study.proposals import load_ladder
from sweep.study.samplers import make_sampler
from sweep.study.tell import OptunaMirror, create_study

Event = dict[str, Any]
Script = Callable[[LaunchSpec], Iterable[list[Event]]]

OBJECTIVES = ["output_throughput_tok_s", "ttft_p99_ms"]
WITH_QUALITY = [*OBJECTIVES, "quality_kl"]
SEQS = {"max_num_seqs": ParamConfig(choices=[None, 4, 8])}


def make_config(
    storage: Path,
    *,
    params: dict[str, ParamConfig] | None = None,
    devices: int = 1,
    loads: tuple[int, ...] = (8, 2, 1),
    sampler: str = "random",
    retries: int = 1,
    quality: bool = False,
    engine_args: dict[str, Any] | None = None,
    **budget: float | None,
) -> SweepConfig:
    """A GPU node of `devices` at 2 USD per device-hour."""
    config = SweepConfig(
        study="s",
        model=ModelConfig(name="m", path="org/m"),
        hardware=HardwareConfig(name="node", device="gpu", devices=devices, price_usd_per_device_hour=2.0),
        workload=WorkloadConfig(
            name="w",
            prompt_tokens=LengthConfig(value=16),
            output_tokens=LengthConfig(value=4),
            loads=LoadsConfig(concurrency=list(loads)),
        ),
        space=SpaceConfig("space", SEQS if params is None else params),
        objectives=ObjectivesConfig(metrics=list(WITH_QUALITY if quality else OBJECTIVES)),
        executor=ExecutorConfig(retries=retries),
        storage=StorageConfig(dir=str(storage)),
        sampler=SamplerConfig(sampler, startup_trials=4),
        budget=BudgetConfig(**budget),  # type: ignore[arg-type]
        quality=QualityConfig(enabled=quality),
    )
    config.engine.args = engine_args or {}
    config.validation.finalists = 0
    return config


def make_space(config: SweepConfig) -> SearchSpace:
    return make_search_space(config.space, config.model, config.hardware)


class Session:
    """One session of a study in its real folder, with Optuna in memory. loop, executor: for assertions afterwards."""

    def __init__(self, config: SweepConfig, script: Script, *, limit: int = 60) -> None:
        self.config = config
        self.space = make_space(config)
        self.executor = FakeExecutor(config.hardware.devices, script, limit)
        self.messages: list[str] = []

    def run(self) -> str:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        metrics = self.config.objectives.metrics
        with study_folder(self.config, self.space.fingerprint) as self.folder:
            sampler = make_sampler(self.config.sampler)
            self.study = create_study(optuna.storages.InMemoryStorage(), "s", metrics, sampler)
            labels = [load.label for load in load_ladder(self.config)]
            kind, margins = self.config.sampler.kind, list(self.config.quality.non_inferiority)
            mirror = OptunaMirror(self.study, self.space, labels, metrics, (), kind, margins)
            self.loop = StudyLoop(self.config, self.space, self.folder, self.executor, mirror, self._changed)
            return self.loop.run()

    def _changed(self, loop: StudyLoop, message: str | None) -> None:
        if message is not None:
            self.messages.append(message)

    @property
    def specs(self) -> list[LaunchSpec]:
        """Every launch of this session, in order of starting."""
        return self.executor.submitted

    def points(self, state: str | None = None) -> list[PointRecord]:
        records = [r for r in self.loop.ledger.records if isinstance(r, PointRecord)]
        return [r for r in records if state in (None, r.state)]

    def launched(self) -> list[tuple[str, tuple[str, ...]]]:
        """(engine arguments, load labels) of every launch of this session."""
        return [(engine_text(s), tuple(labels(s))) for s in self.specs]


class FakeExecutor:
    """Runs scripts on a real device pool. Fails the test when more than `limit` launches are asked for."""

    def __init__(self, devices: int, script: Script, limit: int) -> None:
        self.pool = DevicePool(devices)
        self.submitted: list[LaunchSpec] = []
        self.jobs: list[FakeJob] = []
        self._script = script
        self._limit = limit

    def has_room(self, devices: int) -> bool:
        return devices <= self.pool.free

    def submit(self, spec: LaunchSpec) -> FakeJob:
        assert len(self.submitted) < self._limit, "the loop does not end"
        ids = self.pool.acquire(spec.devices)
        assert ids is not None, "submitted without room"
        spec = spec.on_devices(ids, {})
        spec.write()
        self.submitted.append(spec)
        job = FakeJob(spec, iter(self._script(spec)), self.pool)
        self.jobs.append(job)
        return job


class FakeJob:
    def __init__(self, spec: LaunchSpec, steps: Iterator[list[Event]], pool: DevicePool) -> None:
        self.spec = spec
        self.cancelled = False
        self._steps = steps
        self._pool = pool
        self._done = False

    @property
    def running(self) -> bool:
        """As of a local job: its devices come free when somebody asks."""
        if self._done:
            self._pool.release(self.spec.device_ids)
        return not self._done

    def poll(self) -> list[Event]:
        step = next(self._steps, None)
        self._done = self._done or step is None
        return step or []

    def cancel(self) -> None:
        """What a worker does on SIGTERM, at once."""
        if not self._done:
            self.cancelled = self._done = True
            self._steps = iter([[ended(self.spec, FailureCause.interrupted)]])


# ------------------------------------------------------------ events


def labels(spec: LaunchSpec) -> list[str]:
    return [Load.from_dict(load).label for load in spec.loads]


def engine_text(spec: LaunchSpec) -> str:
    return " ".join(f"{k}={v}" for k, v in sorted(spec.engine["args"].items())) or "defaults"


def point(spec: LaunchSpec, label: str, cause: FailureCause | None = None) -> Event:
    """A measured point whose numbers follow from its load and batch size, or a failed one."""
    load = next(Load.from_dict(x) for x in spec.loads if Load.from_dict(x).label == label)
    seqs = float(spec.engine["args"].get("max_num_seqs") or 16)
    metrics: dict[str, float | None] = {
        "output_throughput_tok_s": 10.0 * min(load.concurrency or 1, seqs),
        "ttft_p99_ms": 100.0 * (load.concurrency or 1) / seqs,
    }
    record = PointRecord(
        point_id=f"{spec.launch_id}-{label}-r{spec.repeat}",
        launch_id=spec.launch_id,
        config_hash=spec.engine_config.hash,
        fingerprint=spec.engine_config.fingerprint,
        engine=spec.engine,
        load=load.to_dict(),
        load_label=label,
        params=spec.params,
        purpose=spec.purpose,
        devices=spec.devices,
        state="measured" if cause is None else "failed",
        cause=cause and cause.value,
        detail=cause and f"scripted {cause}",
        transient=cause is not None and cause.transient,
        metrics=metrics if cause is None else {},
        repeat=spec.repeat,
        started_at="2026-01-01T00:00:00+00:00",
        finished_at="2026-01-01T00:00:10+00:00",
    )
    return {"event": "record", "record": to_dict(record)}


def ended(spec: LaunchSpec, cause: FailureCause | None = None, *, duration_s: float = 60.0) -> Event:
    hour, minute = divmod(int(spec.launch_id[:4]), 60)
    record = LaunchRecord(
        launch_id=spec.launch_id,
        config_hash=spec.engine_config.hash,
        fingerprint=spec.engine_config.fingerprint,
        engine=spec.engine,
        params=spec.params,
        purpose=spec.purpose,
        devices=spec.devices,
        device_ids=spec.device_ids,
        state="ok" if cause is None else "failed",
        cause=cause and cause.value,
        detail=cause and f"scripted {cause}",
        transient=cause is not None and cause.transient,
        startup_s=20.0 if cause is None else None,
        duration_s=duration_s,
        started_at=f"2026-01-01T{hour:02d}:{minute:02d}:00+00:00",
        finished_at=f"2026-01-01T{hour:02d}:{minute:02d}:30+00:00",
        attempt=spec.attempt,
        repeat=spec.repeat,
        vllm_version="0" if cause is None else None,
    )
    return {"event": "record", "record": to_dict(record)}


# ------------------------------------------------------------ scripts


def good(spec: LaunchSpec, *, ticks: int = 1, duration_s: float = 60.0) -> Iterator[list[Event]]:
    """Everything works. ticks: how often the loop looks before it ends."""
    yield [{"event": "phase", "phase": phase} for phase in ("starting", "preparing requests")]
    yield from itertools.repeat([], ticks - 1)
    yield [{"event": "facts", "facts": {"workload_checksum": "abc", "vllm_version": "0"}}]
    if spec.quality_runs:
        yield [measure_quality(spec)]
    for label in labels(spec):
        yield [{"event": "phase", "phase": f"load {label}"}, point(spec, label)]
    yield [ended(spec, duration_s=duration_s)]


def dies_at_startup(spec: LaunchSpec, cause: FailureCause) -> Iterator[list[Event]]:
    yield [*(point(spec, label, cause) for label in labels(spec)), ended(spec, cause)]


def dies_at_first_load(spec: LaunchSpec, cause: FailureCause) -> Iterator[list[Event]]:
    if spec.quality_runs:
        yield [measure_quality(spec)]
    yield [*(point(spec, label, cause) for label in labels(spec)[:1]), ended(spec, cause)]


def quality_fails(spec: LaunchSpec, cause: FailureCause = FailureCause.request_errors) -> Iterator[list[Event]]:
    """Only the quality measurement fails; the loads are measured."""
    for run in spec.quality_runs[:1]:
        yield [{"event": "quality_failed", "run": run, "cause": cause.value, "detail": f"scripted {cause}"}]
    yield from good(replace(spec, quality_runs=()))


def vanishes(spec: LaunchSpec, after: int = 0) -> Iterator[list[Event]]:
    """The worker dies without a word once `after` points are measured."""
    for label in labels(spec)[:after]:
        yield [point(spec, label)]


def measure_quality(spec: LaunchSpec) -> Event:
    """Leave the log-probabilities of what was asked for in the study's folder, as a launch does."""
    for run in spec.quality_runs:
        path = logprobs_path(Path(spec.study_dir), spec.engine_config.fingerprint, run)
        save_logprobs(path, logprobs(0.0 if spec.engine["args"].get("quantization") is None else 0.5, run))
    return {"event": "quality"}


def logprobs(shift: float, run: str = "") -> PromptLogprobs:
    """Two prompts of four positions; the further the shift, the further from the reference."""
    first = np.log(0.6) - shift - (0.01 if run == REPEAT else 0.0)
    rows = np.tile([first, np.log(0.2)], (8, 1))
    return PromptLogprobs(
        token_ids=np.tile(np.array([1, 2], np.int64), (8, 1)),
        logprobs=rows,
        actual_ids=np.full(8, 1, np.int64),
        actual_logprobs=rows[:, 0],
        prompt_index=np.repeat(np.array([0, 1], np.int64), 4),
    )


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
