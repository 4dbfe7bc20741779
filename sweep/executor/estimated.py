"""Launches that take no time: what the estimator says of each, with its noise and its failures, in virtual hours.

The same contract as on a node: spec in, events out, devices leased for as long as the launch lasts. Only the clock is
another one, so a night's study of eight GPUs takes seconds. Every point is marked "estimated".

A launch reads its checkpoint (the first one of a node from disk, later ones from the page cache), compiles, measures
quality if asked, walks the load ladder and stops. What the kernel data does not cover ends at once, as
unknown_to_estimator: it is never guessed and takes no time. Numerics cost what the simulated engine's table says
(engine/simulated.py); an estimator knows nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sweep.config import SimulationConfig, SweepConfig
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.simulated import VOCABULARY, crash_of, prompt_logprobs, seed_of
from sweep.engine.simulated_scheduler import lognormal
from sweep.errors import ConfigError
from sweep.estimate import Estimate, Lengths, Unknown, estimate
from sweep.estimate.kernels import PACKAGE, VERSION
from sweep.estimate.knobs import scheduling
from sweep.estimate.preview import unavailable
from sweep.estimate.sampled import Requests, Slowdown, sample_load
from sweep.executor.clock import VirtualClock
from sweep.executor.device_pool import DevicePool
from sweep.launch.ladder import LadderRules, LoadPoint, cut_records, next_load
from sweep.launch.quality import quality_spec
from sweep.launch.spec import REPEAT, TASKS, LaunchSpec, logprobs_path
from sweep.measure.quality import PromptLogprobs, save_logprobs
from sweep.measure.workload import Load, WorkloadSpec
from sweep.results.records import LaunchRecord, PointRecord, Record, to_dict

Event = dict[str, Any]
# (seconds until these events, the events)
Course = Iterator[tuple[float, list[Event]]]

# Reading a checkpoint: from a local NVMe disk once, then from memory, every device its own part.
_DISK_GIB_PER_S, _PAGE_CACHE_GIB_PER_S = 1.5, 6.0
_COMPILE_S = 25.0
_STOP_S = 5.0
_QUALITY_TOK_S = 2_000.0
SOURCE = f"{PACKAGE} {VERSION}"


class EstimatedJob:
    """A launch and what it has said by now."""

    def __init__(self, spec: LaunchSpec, course: Course, clock: VirtualClock, done: Callable[[], None]) -> None:
        self.spec = spec
        self.released = False
        self._course = course
        self._clock = clock
        self._done = done
        self._said: list[Event] = []
        self._due_s = clock.monotonic()
        self._next: list[Event] | None = None
        self._step()

    def poll(self) -> list[Event]:
        self._catch_up()
        said, self._said = self._said, []
        return said

    @property
    def running(self) -> bool:
        self._catch_up()
        if self._next is None and not self.released:
            self.released = True
            self._done()
        return self._next is not None

    def cancel(self) -> None:
        """A launch that is cancelled says nothing more; what it was doing is lost."""
        self._next = None

    def _catch_up(self) -> None:
        while self._next is not None and self._due_s <= self._clock.monotonic():
            self._said += self._next
            self._step()

    def _step(self) -> None:
        wait_s, self._next = next(self._course, (0.0, None))
        self._due_s += wait_s
        if self._next is not None:
            self._clock.wake_at(self._due_s)


class EstimatedExecutor:
    """A node of config.hardware in virtual time. Raises ConfigError where nothing can be estimated."""

    def __init__(self, config: SweepConfig, clock: VirtualClock) -> None:
        if (reason := unavailable(config.hardware)) is not None:
            raise ConfigError(f"engine=estimate is {reason}", "install it, or name hardware that has kernel data")
        self.max_parallel = config.executor.max_parallel
        self._node = _Node(config, clock)
        self._clock = clock
        self._pool = DevicePool(config.hardware.devices)
        self._jobs: list[EstimatedJob] = []

    def has_room(self, devices: int) -> bool:
        self._jobs = [job for job in self._jobs if not job.released]
        slots_left = self.max_parallel is None or len(self._jobs) < self.max_parallel
        return slots_left and devices <= self._pool.free

    def submit(self, spec: LaunchSpec) -> EstimatedJob:
        ids = self._pool.acquire(spec.devices)
        if ids is None:
            raise RuntimeError(f"{spec.devices} devices asked, {self._pool.free} free")
        spec = spec.on_devices(ids, {})
        spec.write()
        course = self._node.course(spec, lambda: sum(not job.released for job in self._jobs) - 1)
        job = EstimatedJob(spec, course, self._clock, lambda: self._pool.release(ids))
        self._jobs.append(job)
        return job


@dataclass(frozen=True)
class _Answer:
    """What the estimator says of an engine config at a load, or why it would not run."""

    estimate: Estimate
    failure: LaunchFailure | None


class _Node:
    """What launches on one node have in common: the workload's requests and the checkpoints in the page cache."""

    def __init__(self, config: SweepConfig, clock: VirtualClock) -> None:
        self._config = config
        self._clock = clock
        self._settings = config.engine.simulation or SimulationConfig()
        self._workload = WorkloadSpec.from_dict(asdict(config.workload))
        lengths = Lengths.of(self._workload)
        if isinstance(lengths, Unknown):
            raise ConfigError(
                f"workload '{config.workload.name}' cannot be estimated: {lengths.reason}", "choose another"
            )
        unsteady = [load.label for load in self._workload.loads if load.rate_scale or load.ramp_from_rps is not None]
        if unsteady:
            raise ConfigError(f"loads {', '.join(unsteady)} have no steady state to estimate", "set workload.loads=…")
        self._lengths = lengths
        self._requests: dict[int, Requests] = {}
        self._read: set[str] = set()

    def course(self, spec: LaunchSpec, neighbours: Callable[[], int]) -> Course:
        """One launch from start to stop, facts in the order a real one tells them."""
        launch = _Launch(spec, self._clock)
        loads = [Load.from_dict(load) for load in spec.loads]
        yield 0.0, [{"event": "phase", "phase": "starting"}]
        first = self._ask(spec, (loads or self._workload.loads)[0])
        crash = crash_of(spec.engine_config.nested_args, self._settings)
        failure = first.failure or _crash(crash, ("startup", "first_request"))
        startup_s = 0.0 if _is_unknown(failure) else self._startup_s(spec, failure)
        launch.now_s += startup_s
        if failure is not None:
            failed = [_fact(launch.point(load, failure=failure)) for load in loads]
            yield startup_s, [*failed, launch.end(None, failure)]
            return
        yield (
            startup_s,
            [
                {"event": "phase", "phase": "preparing requests"},
                {"event": "facts", "facts": {"estimated_by": SOURCE}},
            ],
        )
        if spec.quality_runs:
            quality_s = self._measure_quality(spec)
            launch.now_s += quality_s
            yield quality_s, [{"event": "quality"}]
        slowdown = self._slowdown(spec)
        rules, points = LadderRules.of(spec), list[LoadPoint]()
        while (load := next_load(points, loads, rules, self._workload.loads)) is not None:
            yield 0.0, [{"event": "phase", "phase": f"load {load.label}"}]
            answer = self._ask(spec, load)
            failure = answer.failure or _crash(crash, ("load",))
            if failure is not None:
                yield _STOP_S, [_fact(launch.point(load, failure=failure)), launch.end(startup_s, failure)]
                return
            beside = neighbours()
            steps = slowdown.steps * (1.0 + self._settings.interference * (beside > 0))
            took_s, record = self._measured(launch, load, answer, replace(slowdown, steps=steps), startup_s, beside)
            yield took_s, [_fact(record)]
            points.append(LoadPoint.of(record))
        yield 0.0, [_fact(record) for record in cut_records(spec, points, rules, launch.now)]
        launch.now_s += _STOP_S
        yield _STOP_S, [launch.end(startup_s, None)]

    def _ask(self, spec: LaunchSpec, load: Load) -> _Answer:
        engine, hardware = spec.engine_config, self._config.hardware
        found = estimate(engine, hardware, self._lengths, load, acceptance=self._settings.acceptance)
        if isinstance(found, Unknown):
            failure = LaunchFailure(FailureCause.unknown_to_estimator, f"{found.reason} ({SOURCE})")
            return _Answer(Estimate(None, None, None, 0.0, None), failure)
        if found.fits is False:
            fraction = scheduling(engine.nested_args, hardware).gpu_memory_utilization
            usable_gib = fraction * (hardware.memory_gib or 0.0)
            detail = f"by estimate {found.memory_gib:.1f} GiB a device with one sequence of the longest context, "
            detail += f"{usable_gib:.1f} GiB usable at gpu_memory_utilization={fraction:g}"
            return _Answer(found, LaunchFailure(FailureCause.out_of_memory, detail))
        return _Answer(found, None)

    def _startup_s(self, spec: LaunchSpec, failure: LaunchFailure | None) -> float:
        """Until it serves, or fails: reading weights comes before running out of memory for them."""
        engine = spec.engine_config
        weights_gib = self._config.model.weights_gib or 0.0
        if engine.model in self._read:
            reading_s = weights_gib / spec.devices / _PAGE_CACHE_GIB_PER_S
        else:
            reading_s = weights_gib / _DISK_GIB_PER_S
            self._read.add(engine.model)
        compiles = failure is None and not engine.args.get("enforce_eager")
        return self._settings.startup_s + reading_s + (_COMPILE_S if compiles else 0.0)

    def _slowdown(self, spec: LaunchSpec) -> Slowdown:
        """The launch's own luck, as of the simulated engine."""
        rng = np.random.default_rng(seed_of(self._settings.seed, spec.launch_id, spec.engine_config.hash))
        steps = lognormal(rng, self._settings.tpot_cv)
        extra = math.sqrt(max(self._settings.ttft_cv**2 - self._settings.tpot_cv**2, 0.0))
        return Slowdown(steps, lognormal(rng, extra))

    def _measured(
        self, launch: _Launch, load: Load, answer: _Answer, slowdown: Slowdown, startup_s: float, beside: int
    ) -> tuple[float, PointRecord]:
        """(seconds, the record) of one load."""
        spec = launch.spec
        if spec.repeat not in self._requests:
            self._requests[spec.repeat] = Requests.of(self._workload, spec.repeat)
        sampled = sample_load(
            answer.estimate,
            self._workload,
            load,
            self._requests[spec.repeat],
            devices=spec.devices,
            price_usd_per_device_hour=spec.price_usd_per_device_hour,
            slowdown=slowdown,
        )
        if sampled is None:
            limit_s = self._workload.max_load_s
            failure = LaunchFailure(FailureCause.load_timeout, f"no request ends within max_load_s={limit_s:g}")
            return limit_s, launch.point(load, failure=failure, took_s=limit_s)
        proof = {
            "estimate": {
                "source": SOURCE,
                "memory_gib": answer.estimate.memory_gib,
                "too_close_to_call": answer.estimate.fits is None,
                "launches_beside": beside,
            }
        }
        metrics = {**sampled.metrics, "startup_s": startup_s}
        return sampled.duration_s, launch.point(load, metrics=metrics, proof=proof, took_s=sampled.duration_s)

    def _measure_quality(self, spec: LaunchSpec) -> float:
        """Leave the simulated log-probabilities where a real launch leaves its own; returns the seconds it took."""
        asked = quality_spec(spec.quality)
        for run in spec.quality_runs:
            if run != TASKS:
                path = logprobs_path(Path(spec.study_dir), spec.engine_config.fingerprint, run)
                path.parent.mkdir(exist_ok=True)
                save_logprobs(path, self._logprobs(spec.engine_config, run, asked.top_logprobs))
        return len(spec.quality_runs) * asked.num_prompts * asked.prompt_tokens / _QUALITY_TOK_S

    def _logprobs(self, engine: EngineConfig, run: str, k: int) -> PromptLogprobs:
        if run == REPEAT:  # the same engine, batched in another way: another engine's rounding
            engine = EngineConfig(engine.model, engine.args, {**engine.env, "SWEEP_REPEAT": "1"})
        rows = [prompt_logprobs(prompt, k, engine, self._settings.seed) for prompt in self._prompts]
        flat = [row for prompt in rows for row in prompt]
        actual = np.array([token for prompt in self._prompts for token in prompt[1:]], np.int64)
        return PromptLogprobs(
            token_ids=np.array([list(row)[:k] for row in flat], np.int64),
            logprobs=np.array([list(row.values())[:k] for row in flat]),
            actual_ids=actual,
            actual_logprobs=np.array([row[int(token)] for row, token in zip(flat, actual, strict=True)]),
            prompt_index=np.repeat(np.arange(len(rows)), [len(prompt) for prompt in rows]),
        )

    @cached_property
    def _prompts(self) -> list[Sequence[int]]:
        """Any tokens will do for an engine that has no text."""
        quality = self._config.quality
        rng = np.random.default_rng(quality.seed)
        return list(rng.integers(VOCABULARY, size=(quality.num_prompts, quality.prompt_tokens)).tolist())


class _Launch:
    """The records of one launch; now_s: where in virtual time it has got to."""

    def __init__(self, spec: LaunchSpec, clock: VirtualClock) -> None:
        self.spec = spec
        self._clock = clock
        self._began_s = self.now_s = clock.monotonic()

    @property
    def now(self) -> str:
        return self._clock.iso(self.now_s)

    def point(
        self,
        load: Load,
        *,
        failure: LaunchFailure | None = None,
        metrics: dict[str, float | None] | None = None,
        proof: dict[str, Any] | None = None,
        took_s: float = 0.0,
    ) -> PointRecord:
        began_s, self.now_s = self.now_s, self.now_s + took_s
        return PointRecord(
            **self.spec.point_identity(load),
            state="measured" if failure is None else "failed",
            cause=None if failure is None else failure.cause.value,
            detail=None if failure is None else failure.detail,
            transient=failure is not None and failure.cause.transient,
            metrics=metrics or {},
            proof=proof or {},
            started_at=self._clock.iso(began_s),
            finished_at=self.now,
        )

    def end(self, startup_s: float | None, failure: LaunchFailure | None) -> Event:
        record = LaunchRecord(
            **self.spec.identity,
            device_ids=self.spec.device_ids,
            state="ok" if failure is None else "failed",
            cause=None if failure is None else failure.cause.value,
            detail=None if failure is None else failure.detail,
            transient=failure is not None and failure.cause.transient,
            startup_s=startup_s,
            duration_s=self.now_s - self._began_s,
            started_at=self._clock.iso(self._began_s),
            finished_at=self.now,
            attempt=self.spec.attempt,
            repeat=self.spec.repeat,
        )
        return _fact(record)


def _fact(record: Record) -> Event:
    return {"event": "record", "record": to_dict(record)}


def _is_unknown(failure: LaunchFailure | None) -> bool:
    return failure is not None and failure.cause is FailureCause.unknown_to_estimator


def _crash(crash: str | None, when: Sequence[str]) -> LaunchFailure | None:
    causes = {
        "startup": FailureCause.died_at_startup,
        "first_request": FailureCause.first_request_failed,
        "load": FailureCause.engine_died,
    }
    return LaunchFailure(causes[crash], "simulated crash region") if crash is not None and crash in when else None
