"""What is worth a launch next: the baseline, a sampler's suggestion, another look at an open point, a finalist.

Everything here reads the ledger and returns Work; starting it is the loop's business. What a sampler is told of a
suggestion that needs no launch (a rule forbids it, it is known already) is told here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import optuna

from sweep.config import SweepConfig
from sweep.engine.engine_args import EngineConfig
from sweep.launch.ladder import busiest_first
from sweep.launch.spec import build_engine, devices_needed
from sweep.measure.workload import Load, WorkloadSpec
from sweep.results.front import front
from sweep.results.metrics import get_metric
from sweep.results.records import Purpose
from sweep.search import Evidence
from sweep.space.search_space import Params, SearchSpace
from sweep.study.ledger import Ledger
from sweep.study.own_search import OwnSearch
from sweep.study.repeats import Repeat, next_repeat
from sweep.study.tell import UNSETTLED, OptunaMirror
from sweep.study.warm import Hint

# How often a sampler may repeat itself or break a rule before an unvisited configuration is drawn instead.
MAX_FRUITLESS_ASKS = 20
MAX_DRAWS = 10_000
# A grid is walked in blocks of this many configurations, each shuffled: no knob's effect is the hour of the night.
GRID_BLOCK = 10_000


@dataclass
class Work:
    """A configuration whose loads are to be measured; trial: the Optuna trial that asked for it at asked_load.

    repeat: which draw of the requests; 0 for the first measurement. why: for the log, or "".
    """

    engine: EngineConfig
    params: Params | None
    purpose: Purpose
    loads: tuple[Load, ...]
    trial: optuna.Trial | None = None
    asked_load: str | None = None
    attempt: int = 0
    overtaken: int = 0
    repeat: int = 0
    why: str = ""


class Proposals:
    """Proposes work for one session of a study. visited: hashes of the engine configs that were proposed before."""

    def __init__(
        self, config: SweepConfig, space: SearchSpace, mirror: OptunaMirror, ledger: Ledger, session: int
    ) -> None:
        self.config = config
        self.space = space
        self.mirror = mirror
        self.ledger = ledger
        self.ladder = load_ladder(config)
        self.reference = build_engine(config, space.baseline()[1])
        self.visited: set[str] = set()
        self._rng = np.random.default_rng([config.sampler.seed, session])
        self._grid = _in_blocks(space.enumerate(), self._rng) if config.sampler.kind == "grid" else None
        self._own = OwnSearch(config, space, self.ladder, ledger) if config.sampler.kind == "sweep" else None
        self._first: deque[Hint] = deque()
        self._doubted: dict[str, str] = {}
        self._repeated: set[tuple[str, str, int]] = set()
        self._nothing_to_repeat: tuple[int, float] | None = None  # (records, running_s) this is known of
        self._validating: set[str] = set()

    def begin_with(self, hints: Sequence[Hint]) -> None:
        """What earlier studies suggest: their fronts before anything else, what failed there after everything else.

        A grid leaves nothing out for it, and our own search weighs all of it as evidence of what will run here.
        """
        self._first = deque(hint for hint in hints if hint.weight == 1.0)
        failed = [hint for hint in hints if hint.cause is not None]
        self._doubted = {self._engine(h.params).hash: h.why for h in failed}
        if self._grid is not None:
            self._grid = _doubted_last(self._grid, lambda params: self._engine(params).hash in self._doubted)
        if self._own is not None:
            self._own.learn([Evidence(h.params, h.cause, h.same) for h in hints])

    def baseline(self) -> Work | None:
        """vLLM's defaults, unless they were proposed before."""
        if self.reference.hash in self.visited:
            return None
        params, _ = self.space.baseline()
        return self._visit(Work(self.reference, params, "baseline", self.ladder))

    def trial(self) -> Work | None:
        """The next configuration worth a launch, or None when none is left."""
        while self._first:
            hint = self._first.popleft()
            if (work := self._unvisited(hint.params)) is not None:
                work.why = hint.why
                return work
        if self._own is not None:
            return self._searched(self._own)
        if self._grid is not None:
            return next((w for p in self._grid if (w := self._unvisited(p)) is not None), None)
        for _ in range(MAX_FRUITLESS_ASKS):
            trial, params, load_label = self.mirror.ask()
            reasons = self._reasons_against(params)
            config_hash = self._engine(params).hash
            doubt = self._doubted.get(config_hash)
            if reasons or doubt is not None:
                self.mirror.reject(trial, reasons or [doubt or ""])
                continue
            work = self._unvisited(params)
            if work is not None:
                work.trial, work.asked_load = trial, load_label
                return work
            known = self.ledger.outcome(config_hash, load_label)
            self.mirror.tell(trial, known or UNSETTLED)
        for _ in range(MAX_DRAWS):
            params = self.space.sample(self._rng)
            if self._engine(params).hash not in self._doubted:
                work = self._unvisited(params)
                if work is not None:
                    return work
        if self._doubted:
            self._doubted = {}
            return self.trial()
        return None

    @property
    def ended(self) -> str | None:
        """Why the search itself proposes nothing more, or None."""
        return None if self._own is None else self._own.ended

    def _searched(self, own: OwnSearch) -> Work | None:
        """What our own search suggests: perhaps further loads of a configuration that was launched before."""
        suggestion = own.next()
        if suggestion is None:
            return None
        engine = self._engine(suggestion.params)
        why = f"{suggestion.stage}: {suggestion.why}"
        return self._visit(Work(engine, suggestion.params, "trial", suggestion.loads, why=why))

    def repeat(self, running_s: float) -> Work | None:
        """Another measurement where it would settle most; None while their share of the time is spent.

        running_s: expected seconds of the repeats in flight.
        """
        now = len(self.ledger.records), running_s
        if now == self._nothing_to_repeat:
            return None  # asked at every look of the loop, and the draws behind the answer cost more than a look
        found = next_repeat(
            self.ledger, self.config.objectives.metrics, self.config.repeats, self.reference.hash, self.ladder,
            bounds=self.mirror.bounds, running_s=running_s, exclude=self._repeated,
        )  # fmt: skip
        if found is None:
            self._nothing_to_repeat = now
            return None
        return self._repeat_work(found)

    def finalists(self) -> list[Work]:
        """Configs of the front to validate, the best of each objective first; each is tried once."""
        points = self.ledger.operating_points()
        best = front(points, self.config.objectives.metrics)
        ranked = []
        for name in self.config.objectives.metrics:
            ranked.append(sorted(best, key=lambda p: get_metric(name).sign * p.metrics[name]))
        chosen = list(dict.fromkeys(p.config_hash for row in zip(*ranked, strict=True) for p in row))
        works = []
        for config_hash in chosen[: self.config.validation.finalists]:
            mine = [p for p in best if p.config_hash == config_hash]
            labels = {p.load_label for p in mine if not self.ledger.validated(config_hash, p.load_label)}
            loads = busiest_first(Load.from_dict(p.load) for p in mine if p.load_label in labels)
            if loads and config_hash not in self._validating:
                self._validating.add(config_hash)
                works.append(Work(EngineConfig.from_dict(mine[0].engine), None, "validation", loads))
        return works

    def engine_of(self, fingerprint: str) -> EngineConfig:
        """An engine config with these numerics that is known to run, if there is one."""
        measured = [r for r in self.ledger.measured() if r.fingerprint == fingerprint]
        if not measured or any(r.config_hash == self.reference.hash for r in measured):
            return self.reference
        return EngineConfig.from_dict(measured[0].engine)

    def _engine(self, params: Params) -> EngineConfig:
        return build_engine(self.config, self.space.settings(params))

    def _visit(self, work: Work) -> Work:
        self.visited.add(work.engine.hash)
        return work

    def _unvisited(self, params: Params) -> Work | None:
        if self._reasons_against(params):
            return None
        engine = self._engine(params)
        return None if engine.hash in self.visited else self._visit(Work(engine, params, "trial", self.ladder))

    def _reasons_against(self, params: Params) -> list[str]:
        """Why this configuration cannot be launched. The model's and the engine's own arguments count too."""
        needed = devices_needed(self.config, self._engine(params))
        devices = self.config.hardware.devices
        too_wide = [f"needs {needed} devices, the node has {devices}"] if needed > devices else []
        return self.space.violations(params) or too_wide

    def _repeat_work(self, found: Repeat) -> Work:
        point = found.points[0]
        labels = [p.load_label for p in found.points]
        self._repeated.update((point.config_hash, label, found.repeat) for label in labels)
        return Work(
            EngineConfig.from_dict(point.engine),
            None if point.params is None else dict(point.params),
            point.purpose,
            busiest_first(Load.from_dict(p.load) for p in found.points),
            repeat=found.repeat,
            why=found.why,
        )


def load_ladder(config: SweepConfig) -> tuple[Load, ...]:
    """Every load of the workload, busiest first: a configuration that fails under load fails early."""
    return WorkloadSpec.from_dict(asdict(config.workload)).loads


def _doubted_last(members: Iterator[Params], doubted: Callable[[Params], bool]) -> Iterator[Params]:
    put_off = []
    for params in members:
        if doubted(params):
            put_off.append(params)
        else:
            yield params
    yield from put_off


def _in_blocks(members: Iterator[Params], rng: np.random.Generator) -> Iterator[Params]:
    while block := list(itertools.islice(members, GRID_BLOCK)):
        for index in rng.permutation(len(block)):
            yield block[index]
