"""The study loop: ask, check, launch, collect, record, tell. One thread, no waiting for batches.

    proposals -> executor -> events -> records.jsonl -> Optuna

One trial is one operating point; one launch measures the whole load ladder, and the points nobody asked for are told
as well. Anything a crash interrupts is found again from the launch folders: a launch that was begun and whose loads
are not settled is simply work still to do.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sweep.config import SweepConfig
from sweep.decide.wording import engine_items
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause
from sweep.errors import ConfigError
from sweep.executor import Executor, Job
from sweep.executor.clock import WALL, Clock
from sweep.executor.packing import MAX_OVERTAKEN, NodeState, Waiting, choose
from sweep.launch.ladder import LadderRules
from sweep.launch.spec import WORKER_LOG, devices_needed, make_spec
from sweep.measure.workload import HELD_OUT_DRAW, Load
from sweep.results.points import settings
from sweep.results.records import LaunchRecord, PointRecord, Record, RecordStore, record_from_dict
from sweep.space.search_space import SearchSpace
from sweep.study.budget import Budget
from sweep.study.folder import update_study
from sweep.study.ledger import Ledger
from sweep.study.levels import ladder_rules, next_level
from sweep.study.proposals import Proposals, Work
from sweep.study.quality_book import QualityBook
from sweep.study.recover import lost_point, read_specs, recover_records, vanished
from sweep.study.tell import UNSETTLED, OptunaMirror

POLL_S = 0.2
# How many launches may wait for devices while a narrower one is looked for: a sampler asked far ahead knows less.
MAX_WAITING = 4
# What a front needs to be worth reading; it is done after the budget has ended.
AFTER_THE_BUDGET = ("reference", "validation")


@dataclass
class Active:
    """A launch in flight, and what it has said so far. quality_failures: run -> (cause, detail).

    extra: levels it may place itself; added: those it has measured.
    """

    job: Job
    work: Work
    started: float
    phase: str = "starting"
    points: int = 0
    extra: int = 0
    added: int = 0
    quality_failures: dict[str, tuple[str, str]] = field(default_factory=dict)
    ended: LaunchRecord | None = None


def _measures_first(work: Work) -> bool:
    """Whether it asks for a configuration's own loads: no repeat, no reference, no validation."""
    return work.purpose not in AFTER_THE_BUDGET and not work.repeat


class StudyLoop:
    """One session of a study. on_change(loop, message or None) is called after every event. clock: the executor's."""

    def __init__(
        self,
        config: SweepConfig,
        space: SearchSpace,
        folder: Path,
        executor: Executor,
        mirror: OptunaMirror,
        on_change: Callable[[StudyLoop, str | None], None],
        clock: Clock = WALL,
    ) -> None:
        self.config = config
        self.space = space
        self.folder = folder
        self.executor = executor
        self.mirror = mirror
        self.store = RecordStore(folder)
        self.ledger = Ledger(
            self.store.read(),
            config.objectives.metrics,
            config.executor.retries,
            config.quality.enabled,
            config.quality.non_inferiority,
        )
        known_ids = [spec.launch_id for spec in read_specs(folder)] + [r.launch_id for r in self.ledger.launches]
        self._launch_number = max((int(launch_id.partition("-")[0]) for launch_id in known_ids), default=0)
        self.proposals = Proposals(config, space, mirror, self.ledger, self._launch_number)
        self.ladder, self.reference = self.proposals.ladder, self.proposals.reference
        self.clock = clock
        self.budget = Budget(config.budget, config.hardware, self.ledger.active_hours(), clock)
        self.quality = QualityBook(
            config.quality.enabled,
            folder,
            self.reference.fingerprint,
            self.reference.hash,
            self.ledger,
            self.record,
            config.executor.retries,
            tasks=bool(config.quality.tasks),
        )
        self.active: list[Active] = []
        self.queue: deque[Work] = deque()
        self.stop_reason: str | None = None
        self.controller_s = 0.0
        self._interrupted = False
        self._exhausted = False
        self._untold: list[Work] = []
        self._on_change = on_change

    def run(self) -> str:
        """Run until the budget ends, the space is exhausted or an interrupt; returns which, in words.

        No launch is left behind, whatever ends it.
        """
        previous = [(s, signal.signal(s, self._interrupt)) for s in (signal.SIGINT, signal.SIGTERM)]
        try:
            self._recover()
            if (baseline := self.proposals.baseline()) is not None:
                self.queue.append(baseline)
            while True:
                began = time.perf_counter()
                self._collect()
                self._fill()
                self.controller_s += time.perf_counter() - began
                if self.stop_reason is not None and not self.active and (self._interrupted or not self.queue):
                    self._drop_queue()
                    return self.stop_reason
                self.clock.sleep(POLL_S)
        finally:
            self._cancel_all()
            while any(active.job.running for active in self.active):
                self.clock.sleep(POLL_S)
            for signum, handler in previous:
                signal.signal(signum, handler)

    def record(self, record: Record) -> None:
        """Make a fact durable, then known."""
        self.store.append(record)
        self.ledger.add(record)

    def points_in_flight(self) -> int:
        """Operating points of running launches that are not settled yet, levels they may still place included."""
        asked = sum(
            not self.ledger.settled(a.work.engine.hash, load.label)
            for a in self.active
            if a.work.purpose != "validation"
            for load in a.work.loads
        )
        return asked + sum(a.extra - a.added for a in self.active)

    def configs_tried(self) -> int:
        return len(self.proposals.visited)

    def eta_s(self, configs_left: int | None) -> float | None:
        """Expected seconds to the end of the study; None before the first launch ended, or without any bound."""
        mean_s = self.ledger.mean_launch_s()
        if mean_s is None:
            return None
        running = [max(0.0, mean_s - (self.clock.monotonic() - a.started)) for a in self.active if a.ended is None]
        points = self.budget.points_left(self.ledger, self.points_in_flight())
        bounds = [
            None if configs_left is None else configs_left + len(self.queue),
            None if points is None else -(-points // len(self.ladder)),
        ]
        launches = min((n for n in bounds if n is not None), default=None)
        side_by_side = max(1, len(self.active))
        by_launches = None if launches is None else max(running, default=0.0) + mean_s * launches / side_by_side
        hours_left = self.budget.hours_left()
        by_hours = None if hours_left is None else 3600.0 * hours_left
        return min((t for t in (by_launches, by_hours) if t is not None), default=None)

    def describe(self, engine: Mapping[str, Any]) -> str:
        """How an engine config differs from the baseline, for people."""
        mine, baseline = settings(engine), settings(self.reference.to_dict())
        same = {name: value for name, value in mine.items() if baseline.get(name) == value}
        left_to_vllm = [f"{name.partition('.')[2]}=default" for name in baseline if name not in mine]
        return " ".join([*engine_items(engine, same), *left_to_vllm]) or "vLLM's defaults"

    def _describe_point(self, record: PointRecord) -> str:
        held_out = " on held-out requests" if record.purpose == "validation" else ""
        where = f"{self.describe(record.engine)} at {record.load_label}{held_out}"
        if record.state != "measured":
            return f"{record.state}: {where}: {record.cause}: {record.detail}"
        shown = [*self.config.objectives.metrics, "output_throughput_tok_s"]
        values = [(name, record.metrics.get(name)) for name in shown]
        return f"measured: {where}: " + " ".join(f"{k}={v:.4g}" for k, v in values if v is not None)

    def _interrupt(self, *_: object) -> None:
        """Only noted here: a signal may come at any line, between a launch's start and its entry in `active` too."""
        self._interrupted = True
        self.stop_reason = "interrupted; the same command continues it"

    def _cancel_all(self) -> None:
        for active in self.active:
            active.job.cancel()

    # ------------------------------------------------------------ choosing what to launch

    def _fill(self) -> None:
        """Start every launch that fits now, and ask for more only where devices would stay idle."""
        while not self._interrupted:
            in_flight = self.points_in_flight()
            if self.stop_reason is None:
                self.stop_reason = self.budget.ended(self.ledger)
            if self.stop_reason is not None:
                self._drop_queue()
            elif in_flight and self.budget.points_left(self.ledger, in_flight) == 0:
                return  # enough if all of them settle; a transient failure among them leaves room for its retry
            work = self._next_fitting()
            if work is not None:
                self._launch(work)
            elif not self._find_work():
                return
        self._cancel_all()

    def _drop_queue(self) -> None:
        """Forget what waits for devices, but for what the front still needs and what there is time for."""
        for work in self.queue:
            if work.trial is not None:
                self.mirror.tell(work.trial, UNSETTLED)
        in_time = self.budget.out_of_time(self.ledger) is None
        self.queue = deque(w for w in self.queue if w.purpose in AFTER_THE_BUDGET or (w.repeat and in_time))

    def _next_fitting(self) -> Work | None:
        """The queued launch that executor.packing chooses for what is free now."""
        waiting = [Waiting(devices_needed(self.config, w.engine), w.engine.model, w.overtaken) for w in self.queue]
        index = choose(waiting, self._node_state()) if waiting else None
        if index is None:
            return None
        work = self.queue[index]
        del self.queue[index]
        for overtaken in list(self.queue)[:index]:
            overtaken.overtaken += 1
        return work

    def _node_state(self) -> NodeState:
        """What is free, and which checkpoints the running and the ended launches have brought."""
        free = (n for n in range(self.config.hardware.devices, 0, -1) if self.executor.has_room(n))
        obtained = {str(launch.engine["model"]) for launch in self.ledger.launches}
        obtained |= {a.work.engine.model for a in self.active if a.phase != "starting"}
        in_memory = {a.work.engine.model for a in self.active}
        newest = {str(launch.engine["model"]) for launch in self.ledger.launches[-1:]}
        local = {m for m in in_memory | {w.engine.model for w in self.queue} if Path(m).is_dir()}
        return NodeState(next(free, 0), in_memory | newest, obtained | local, in_memory - obtained - local)

    def _find_work(self) -> bool:
        """Queue another launch if that makes sense now; False when there is nothing to do but wait or end."""
        if self.stop_reason is None:
            blocked = any(work.overtaken >= MAX_OVERTAKEN for work in self.queue)
            if blocked or len(self.queue) >= MAX_WAITING or not self.executor.has_room(1):
                return False
            work = self._repeat() or (None if self._exhausted else self.proposals.trial())
            if work is not None:
                self.queue.append(work)
                return True
            self._exhausted = True
        if self.active or self.queue:
            return False
        self.queue.extend(self._after_the_search())
        return bool(self.queue)

    def _repeat(self) -> Work | None:
        """Another measurement of an open point, as long as repeats have time left."""
        mean_s = self.ledger.mean_launch_s() or 0.0
        in_flight = [*(a.work for a in self.active), *self.queue]
        return self.proposals.repeat(mean_s * sum(work.repeat > 0 for work in in_flight))

    def _after_the_search(self) -> list[Work]:
        """What the front still needs, one kind after the other: qualities, repeats, finalists. Empty: the end."""
        missing = self.quality.unmeasured()
        if missing:
            return [Work(self.proposals.engine_of(fingerprint), None, "reference", ()) for fingerprint in missing]
        if self.stop_reason is None:
            self.stop_reason = self.proposals.ended or "every configuration of the space is settled"
        repeat = self._repeat() if self.budget.out_of_time(self.ledger) is None else None
        return [repeat] if repeat is not None else self.proposals.finalists()

    # ------------------------------------------------------------ launching and collecting

    def _launch(self, work: Work) -> None:
        rules = LadderRules()
        if _measures_first(work):
            left = self.budget.points_left(self.ledger, self.points_in_flight())
            work.loads = work.loads[:left]
            rules = self._rules(work.engine)
            extra = max(0, rules.extra - len({*work.loads} - {*self.ladder}))
            rules = replace(rules, extra=extra if left is None else min(extra, left - len(work.loads)))
            if work.purpose == "baseline":
                rules = replace(rules, rivals=())  # what everything is compared with is measured whole
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
            repeat=HELD_OUT_DRAW if work.purpose == "validation" else work.repeat,
            quality_runs=self.quality.claim(work.engine.fingerprint, work.engine.hash),
            ladder={} if rules == LadderRules() else asdict(rules),
        )
        self.active.append(Active(self.executor.submit(spec), work, self.clock.monotonic(), extra=rules.extra))
        why = f"; {work.why}" if work.why else ""
        self._on_change(self, f"launch {spec.launch_id} ({work.purpose}): {self.describe(spec.engine)}{why}")

    def _rules(self, engine: EngineConfig) -> LadderRules:
        """What a launch of this engine config may make of its ladder."""
        return ladder_rules(
            self.config.ladder, self.ledger, self.config.objectives.metrics, self.mirror.bounds, self.ladder,
            engine.hash, engine.fingerprint,
        )  # fmt: skip

    def _unplaced(self, engine: EngineConfig) -> tuple[Load, ...]:
        """The level that a launch of this engine config, its ladder settled, was to place when its machine let it down.

        One that its own configuration ended is not started again for another level.
        """
        rules = self._rules(engine)
        load = next_level(self.ledger.settled_of(engine.hash), self.ladder, rules)
        return () if load is None else (load,)

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
            case "mistake":
                raise ConfigError(event["message"], event["hint"])
            case "quality_failed":
                active.quality_failures[event["run"]] = event["cause"], event["detail"]
                message = f"quality of {active.job.spec.launch_id} failed: {event['cause']}: {event['detail']}"
            case "record":
                record = record_from_dict(event["record"])
                self.record(record)
                if isinstance(record, PointRecord):
                    active.points += 1
                    active.added += record.load_label not in {load.label for load in active.work.loads}
                    message = self._describe_point(record)
                elif isinstance(record, LaunchRecord):
                    active.ended = record
                    if record.state == "failed":
                        message = f"launch {record.launch_id} failed: {record.cause}: {record.detail}"
        self._on_change(self, message)

    def _follow_up(self, active: Active) -> None:
        """Queue again what a launch left unsettled. Nothing is given up silently, and nothing repeated for ever."""
        spec, work = active.job.spec, active.work
        ended = active.ended or self._vanished(active)
        silent = active.points == 0 and not active.quality_failures
        if not self._interrupted and (active.ended is None or silent):
            for load in work.loads:
                if not self.ledger.settled(work.engine.hash, load.label):
                    self.record(lost_point(spec, load, ended))
        if active.ended is None:
            self.record(ended)
        if work.purpose == "reference" and not self._interrupted:
            failure = ended.cause or FailureCause.unknown.value, ended.detail or "the launch left no measurement"
            active.quality_failures.setdefault("", failure)
        self.quality.release(work.engine.fingerprint, spec.launch_id, spec.quality_runs, active.quality_failures)
        if work.purpose == "validation" or work.repeat:
            return  # its points are settled; what a repeat could not measure, another may
        left = tuple(load for load in work.loads if not self.ledger.settled(work.engine.hash, load.label))
        settled = tuple(load for load in work.loads if load not in left)
        if not left and ended.transient and _measures_first(work):
            left = self._unplaced(work.engine)
        again = work.asked_load in [load.label for load in left] and not self._interrupted
        self._untold.append(replace(work, loads=settled, trial=None if again else work.trial))
        if left and not self._interrupted:
            trial = work.trial if again else None
            self.queue.append(replace(work, loads=left, trial=trial, attempt=work.attempt + 1, overtaken=0))

    def _vanished(self, active: Active) -> LaunchRecord:
        """The end of a worker that died without a word: a fault of ours or of the machine."""
        spec = active.job.spec
        if self._interrupted:
            return vanished(spec, "stopped with the sweep")
        log = spec.folder / WORKER_LOG
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return vanished(spec, f"the launch process died: {lines[-1] if lines else 'no output'}", FailureCause.unknown)

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
                self.mirror.tell(work.trial, asked or UNSETTLED)
            for label, outcome in outcomes.items():
                if outcome is not None and work.params is not None:
                    self.mirror.add(work.params, label, outcome)
        self._untold = waiting

    def _begun(self, config_hash: str) -> tuple[Load, ...]:
        """The loads that launches of this configuration were given: our own search may want a part of the ladder."""
        specs = [spec for spec in read_specs(self.folder) if spec.engine_config.hash == config_hash]
        asked = {Load.from_dict(load).label for spec in specs for load in spec.loads}
        return tuple(load for load in self.ladder if load.label in asked)

    def _recover(self) -> None:
        """Take in what earlier sessions left, rebuild Optuna's view of it, and queue what was begun and not settled."""
        for record in recover_records(self.folder, self.ledger):
            self.record(record)
        self.budget.hours_before = self.ledger.active_hours()
        self.quality.compare_all()
        first_looks = [r for r in self.ledger.launches if r.purpose not in AFTER_THE_BUDGET and not r.repeat]
        last_launch = {r.config_hash: r for r in first_looks}
        for launch in last_launch.values():
            self.proposals.visited.add(launch.config_hash)
            params = None if launch.params is None else dict(launch.params)
            work = Work(EngineConfig.from_dict(launch.engine), params, launch.purpose, (), attempt=launch.attempt)
            begun = self.ladder if self.config.sampler.kind != "sweep" else self._begun(launch.config_hash)
            left = tuple(load for load in begun if not self.ledger.settled(launch.config_hash, load.label))
            untold = tuple(
                load
                for load in begun
                if load not in left and self.ledger.outcome(launch.config_hash, load.label) is None
            )
            if not left and launch.transient:
                left = self._unplaced(work.engine)
            if left:
                self.queue.append(replace(work, loads=left, attempt=launch.attempt + 1))
            if untold:
                self._untold.append(replace(work, loads=untold))
        self.mirror.add_all(
            [
                (record.params, record.load_label, outcome)
                for record in self.ledger.newest_points()
                if record.params is not None
                and (outcome := self.ledger.outcome(record.config_hash, record.load_label)) is not None
            ]
        )
