"""The study loop: ask, check, launch, collect, record, tell. One thread, no waiting for batches.

    baseline -> ask the sampler -> rules -> already known? -> executor -> events -> records.jsonl -> Optuna

One trial is one operating point; one launch measures the whole load ladder, and the points nobody asked for are told
as well. Anything a crash interrupts is found again from the launch folders: a launch that was begun and whose loads
are not settled is simply work still to do.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from sweep.config import SweepConfig
from sweep.decide.wording import engine_items
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause
from sweep.executor import Executor, Job
from sweep.launch.spec import WORKER_LOG, build_engine, devices_needed, make_spec
from sweep.measure.workload import Load, WorkloadSpec
from sweep.results.points import settings
from sweep.results.records import LaunchRecord, PointRecord, Purpose, Record, RecordStore, record_from_dict
from sweep.space.search_space import Params, SearchSpace
from sweep.study.budget import Budget
from sweep.study.folder import update_study
from sweep.study.ledger import Ledger
from sweep.study.quality_book import QualityBook
from sweep.study.recover import read_specs, recover_records, vanished
from sweep.study.tell import OptunaMirror, Outcome

POLL_S = 0.2
# How often a sampler may repeat itself or break a rule before an unvisited configuration is drawn instead.
MAX_FRUITLESS_ASKS = 20
MAX_DRAWS = 10_000
# A launch that needs more devices than are free lets this many narrower ones pass; then devices are kept for it.
MAX_OVERTAKEN = 3


@dataclass
class Work:
    """A configuration whose loads are to be measured; trial: the Optuna trial that asked for it at asked_load."""

    engine: EngineConfig
    params: Params | None
    purpose: Purpose
    loads: tuple[Load, ...]
    trial: optuna.Trial | None = None
    asked_load: str | None = None
    attempt: int = 0
    overtaken: int = 0


@dataclass
class Active:
    """A launch in flight."""

    job: Job
    work: Work
    started: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    closed: bool = False
    quality_failure: tuple[str, str] | None = None


class StudyLoop:
    """One session of a study. on_change(loop, message or None) is called after every event."""

    def __init__(
        self,
        config: SweepConfig,
        space: SearchSpace,
        folder: Path,
        executor: Executor,
        mirror: OptunaMirror,
        on_change: Callable[[StudyLoop, str | None], None],
    ) -> None:
        self.config = config
        self.space = space
        self.folder = folder
        self.executor = executor
        self.mirror = mirror
        self.store = RecordStore(folder)
        self.ledger = Ledger(
            self.store.read(), config.objectives.metrics, config.executor.retries, config.quality.enabled
        )
        self.budget = Budget(config.budget, config.hardware, self.ledger.active_hours())
        self.ladder = load_ladder(config)
        self.reference = build_engine(config, space.baseline()[1])
        self.quality = QualityBook(
            config.quality.enabled,
            folder,
            self.reference.fingerprint,
            self.reference.hash,
            self.ledger,
            self.record,
            config.executor.retries,
        )
        self.active: list[Active] = []
        self.queue: deque[Work] = deque()
        self.stop_reason: str | None = None
        self.controller_s = 0.0
        self._interrupted = False
        self._untold: list[Work] = []
        self._visited: set[str] = set()
        self._launch_number = len(read_specs(folder))
        self._rng = np.random.default_rng([config.sampler.seed, self._launch_number])
        self._grid: Iterator[Params] | None = space.enumerate() if config.sampler.kind == "grid" else None
        self._on_change = on_change

    def run(self) -> str:
        """Run until the budget ends, the space is exhausted or an interrupt; returns which, in words."""
        previous = [(s, signal.signal(s, self._interrupt)) for s in (signal.SIGINT, signal.SIGTERM)]
        try:
            self._recover()
            self._start_with_baseline()
            while True:
                began = time.perf_counter()
                self._collect()
                if not self._interrupted:
                    self._fill()
                self.controller_s += time.perf_counter() - began
                if self.stop_reason is not None and not self.active and (self._interrupted or not self.queue):
                    return self.stop_reason
                time.sleep(POLL_S)
        finally:
            for signum, handler in previous:
                signal.signal(signum, handler)

    def record(self, record: Record) -> None:
        """Make a fact durable, then known."""
        self.store.append(record)
        self.ledger.add(record)

    def points_in_flight(self) -> int:
        """Operating points of running launches that are not settled yet."""
        return sum(
            not self.ledger.settled(a.work.engine.hash, load.label) for a in self.active for load in a.work.loads
        )

    def configs_tried(self) -> int:
        return len(self._visited)

    def eta_s(self, configs_left: int | None) -> float | None:
        """Expected seconds to the end of the study; None before the first launch ended, or without any bound."""
        mean_s = self.ledger.mean_launch_s()
        if mean_s is None:
            return None
        running = [max(0.0, mean_s - (time.monotonic() - a.started)) for a in self.active]
        points = self.budget.points_left(self.ledger, self.points_in_flight())
        bounds = [configs_left, None if points is None else -(-points // len(self.ladder))]
        launches = min((n for n in bounds if n is not None), default=None)
        side_by_side = max(1, len(self.active))
        by_launches = None if launches is None else max(running, default=0.0) + mean_s * launches / side_by_side
        hours_left = self.budget.hours_left()
        by_hours = None if hours_left is None else 3600.0 * hours_left
        return min((t for t in (by_launches, by_hours) if t is not None), default=None)

    def describe(self, engine: Mapping[str, Any]) -> str:
        """How an engine config differs from the baseline, for people."""
        return " ".join(engine_items(engine, settings(self.reference.to_dict()))) or "vLLM's defaults"

    def _describe_point(self, record: PointRecord) -> str:
        where = f"{self.describe(record.engine)} at {record.load_label}"
        if record.state != "measured":
            return f"{record.state}: {where}: {record.cause}: {record.detail}"
        shown = [*self.config.objectives.metrics, "output_throughput_tok_s"]
        values = [(name, record.metrics.get(name)) for name in shown]
        return f"measured: {where}: " + " ".join(f"{k}={v:.4g}" for k, v in values if v is not None)

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        self.stop_reason = "interrupted; the same command continues it"
        for active in self.active:
            active.job.cancel()

    # ------------------------------------------------------------ choosing what to launch

    def _start_with_baseline(self) -> None:
        params, _ = self.space.baseline()
        if self.reference.hash not in self._visited:
            self._enqueue(Work(self.reference, params, "baseline", self.ladder))

    def _fill(self) -> None:
        """Start every launch that fits now, and ask for more only where devices would stay idle."""
        while True:
            if self.stop_reason is None:
                self.stop_reason = self.budget.ended(self.ledger, self.points_in_flight())
            if self.stop_reason is not None:
                self.queue = deque(work for work in self.queue if work.purpose == "reference")
            work = self._next_fitting()
            if work is not None:
                self._launch(work)
            elif not self._find_work():
                return

    def _next_fitting(self) -> Work | None:
        """The first queued launch that fits; narrower ones may overtake a wide one only so often."""
        for index, work in enumerate(self.queue):
            if self.executor.has_room(devices_needed(self.config, work.engine)):
                del self.queue[index]
                if index > 0:
                    self.queue[0].overtaken += 1
                return work
            if index == 0 and work.overtaken >= MAX_OVERTAKEN:
                return None
        return None

    def _find_work(self) -> bool:
        """Queue another launch if that makes sense now; False when there is nothing to do but wait or end."""
        if self.stop_reason is None:
            blocked = bool(self.queue) and self.queue[0].overtaken >= MAX_OVERTAKEN
            if blocked or not self.executor.has_room(1):
                return False
            proposed = self._propose()
            if proposed is not None:
                self._enqueue(proposed)
                return True
        if self.active or self.queue:
            return False
        missing = self.quality.unmeasured()
        for fingerprint in missing:
            self.queue.append(Work(self._engine_of(fingerprint), None, "reference", ()))
        if not missing and self.stop_reason is None:
            self.stop_reason = "every configuration of the space is settled"
        return bool(missing)

    def _propose(self) -> Work | None:
        """The next configuration worth a launch, or None when none is left."""
        if self._grid is not None:
            return next((w for p in self._grid if (w := self._unvisited(p)) is not None), None)
        for _ in range(MAX_FRUITLESS_ASKS):
            trial, params, load_label = self.mirror.ask()
            reasons = self.space.violations(params)
            if reasons:
                self.mirror.reject(trial, reasons)
                continue
            work = self._unvisited(params)
            if work is not None:
                work.trial, work.asked_load = trial, load_label
                return work
            config_hash = build_engine(self.config, self.space.settings(params)).hash
            known = self.ledger.outcome(config_hash, load_label)
            self.mirror.tell(trial, known or Outcome(None, False, {}, {"state": "in flight"}))
        for _ in range(MAX_DRAWS):
            work = self._unvisited(self.space.sample(self._rng))
            if work is not None:
                return work
        return None

    def _unvisited(self, params: Params) -> Work | None:
        if self.space.violations(params):
            return None
        engine = build_engine(self.config, self.space.settings(params))
        return None if engine.hash in self._visited else Work(engine, params, "trial", self.ladder)

    def _enqueue(self, work: Work) -> None:
        self._visited.add(work.engine.hash)
        self.queue.append(work)

    def _engine_of(self, fingerprint: str) -> EngineConfig:
        """Some engine config with these numerics."""
        if fingerprint == self.reference.fingerprint:
            return self.reference
        record = next(r for r in self.ledger.newest_points() if r.fingerprint == fingerprint)
        return EngineConfig.from_dict(record.engine)

    # ------------------------------------------------------------ launching and collecting

    def _launch(self, work: Work) -> None:
        left = self.budget.points_left(self.ledger, self.points_in_flight())
        work.loads = work.loads[:left]
        self._launch_number += 1
        spec = make_spec(
            self.config,
            self.folder,
            launch_id=f"{self._launch_number:04d}-{work.engine.hash}",
            engine=work.engine,
            params=work.params,
            purpose=work.purpose,
            attempt=work.attempt,
            loads=work.loads,
            quality_runs=self.quality.claim(work.engine.fingerprint, work.engine.hash),
        )
        self.active.append(Active(self.executor.submit(spec), work))
        self._on_change(self, f"launch {spec.launch_id} ({work.purpose}): {self.describe(spec.engine)}")

    def _collect(self) -> None:
        """Take in every event, and follow up on launches that ended."""
        for active in list(self.active):
            running = active.job.running
            for event in active.job.poll():
                self._take(active, event)
            if not running:
                self.active.remove(active)
                self._follow_up(active)
        self._tell_settled()

    def _take(self, active: Active, event: Mapping[str, Any]) -> None:
        message = None
        match event["event"]:
            case "phase":
                active.phase = event["phase"]
            case "facts":
                update_study(self.folder, **event["facts"])
            case "quality":
                self.quality.compare_all()
            case "quality_failed":
                if event["run"] == "":
                    active.quality_failure = event["cause"], event["detail"]
                message = f"quality of {active.job.spec.launch_id} failed: {event['cause']}: {event['detail']}"
            case "record":
                record = record_from_dict(event["record"])
                self.record(record)
                if isinstance(record, PointRecord):
                    message = self._describe_point(record)
                elif isinstance(record, LaunchRecord):
                    active.closed = True
                    if record.state == "failed":
                        message = f"launch {record.launch_id} failed: {record.cause}: {record.detail}"
        self._on_change(self, message)

    def _follow_up(self, active: Active) -> None:
        """Queue again what a launch left unsettled. Nothing is given up silently."""
        spec, work = active.job.spec, active.work
        if not active.closed:
            self._record_vanished(active)
        self.quality.release(work.engine.fingerprint, spec.launch_id, active.quality_failure)
        self._untold.append(work)
        left = tuple(load for load in work.loads if not self.ledger.settled(work.engine.hash, load.label))
        if left and not self._interrupted:
            self.queue.append(Work(work.engine, work.params, work.purpose, left, attempt=work.attempt + 1))

    def _record_vanished(self, active: Active) -> None:
        """A worker that died without a word: a fault of ours or of the machine, worth the usual retry."""
        spec = active.job.spec
        if self._interrupted:
            self.record(vanished(spec, "stopped with the sweep"))
            return
        log = spec.folder / WORKER_LOG
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        launch = vanished(spec, f"the launch process died: {lines[-1] if lines else 'no output'}", FailureCause.unknown)
        for load in active.work.loads:
            if self.ledger.settled(spec.engine_config.hash, load.label):
                continue
            self.record(
                PointRecord(
                    point_id=f"{spec.launch_id}-{load.label}",
                    launch_id=spec.launch_id,
                    config_hash=launch.config_hash,
                    fingerprint=launch.fingerprint,
                    engine=spec.engine,
                    load=load.to_dict(),
                    load_label=load.label,
                    params=spec.params,
                    purpose=spec.purpose,
                    devices=spec.devices,
                    state="failed",
                    cause=launch.cause,
                    detail=launch.detail,
                    transient=True,
                    started_at=launch.started_at,
                    finished_at=launch.finished_at,
                )
            )
        self.record(launch)

    def _tell_settled(self) -> None:
        """Tell Optuna of every ended launch whose points are all known, quality included."""
        waiting = []
        for work in self._untold:
            outcomes = {load.label: self.ledger.outcome(work.engine.hash, load.label) for load in work.loads}
            if None in outcomes.values() and self.quality.pending(work.engine.fingerprint) and not self._interrupted:
                waiting.append(work)
                continue
            if work.trial is not None:
                asked = outcomes.pop(work.asked_load or "", None)
                self.mirror.tell(work.trial, asked or Outcome(None, False, {}, {"state": "unsettled"}))
            for label, outcome in outcomes.items():
                if outcome is not None and work.params is not None:
                    self.mirror.add(work.params, label, outcome)
        self._untold = waiting

    def _recover(self) -> None:
        """Take in what earlier sessions left, rebuild Optuna's view of it, and queue what was begun and not settled."""
        for record in recover_records(self.folder, self.ledger):
            self.record(record)
        self.quality.compare_all()
        for spec in read_specs(self.folder):
            engine = spec.engine_config
            if spec.purpose == "reference" or engine.hash in self._visited:
                continue
            self._visited.add(engine.hash)
            left = tuple(load for load in self.ladder if not self.ledger.settled(engine.hash, load.label))
            if left:
                params = None if spec.params is None else dict(spec.params)
                self.queue.append(Work(engine, params, spec.purpose, left, attempt=spec.attempt + 1))
        self.mirror.add_all(
            [
                (record.params, record.load_label, outcome)
                for record in self.ledger.newest_points()
                if record.params is not None
                and (outcome := self.ledger.outcome(record.config_hash, record.load_label)) is not None
            ]
        )


def load_ladder(config: SweepConfig) -> tuple[Load, ...]:
    """Every load of the workload, busiest first: a configuration that fails under load fails early."""
    return WorkloadSpec.from_dict(asdict(config.workload)).loads
