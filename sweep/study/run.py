"""`sweep run`: wire the stations together for one session of a study."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from sweep.config import SweepConfig
from sweep.decide.sla import Bound, parse_sla
from sweep.errors import ConfigError, StudyError
from sweep.executor import Executor
from sweep.executor.clock import WALL, Clock, VirtualClock
from sweep.executor.estimated import EstimatedExecutor
from sweep.executor.local import LocalExecutor
from sweep.results.records import LaunchRecord, RecordStore
from sweep.space.search_space import SearchSpace
from sweep.study.folder import STUDY_FILE, study_folder, update_study
from sweep.study.interference import check_interference
from sweep.study.loop import StudyLoop
from sweep.study.plan import make_plan
from sweep.study.progress import Progress
from sweep.study.proposals import load_ladder
from sweep.study.samplers import make_sampler
from sweep.study.tell import OptunaMirror, create_study
from sweep.study.warm import Here, open_earlier, provenance, summary, warm_prior

JOURNAL_FILE = "optuna.journal"
# Counting a larger space takes longer than its answer is worth for an ETA.
_COUNT_LIMIT = 5_000


@dataclass(frozen=True)
class Session:
    """How a session ended. controller_s: the controller's own work, of wall_s seconds in all."""

    folder: Path
    reason: str
    controller_s: float
    wall_s: float

    @property
    def interrupted(self) -> bool:
        return self.reason.startswith("interrupted")


def run_study(config: SweepConfig, space: SearchSpace, cache_dir: Path) -> Session:
    """Run or continue a study until its budget ends. Raises SweepError for anything found wrong before a launch."""
    began = time.monotonic()
    plan = make_plan(config, space, cache_dir)
    if plan.arguments_checked is None and config.engine.kind == "vllm":
        raise ConfigError(
            f"engine.python={config.engine.python or sys.executable} cannot import vllm",
            "install it there (pip install 'sweep-llm[gpu]' or scripts/setup_cpu.sh), or name another interpreter",
        )
    if plan.problems:
        raise ConfigError(f"vLLM {plan.arguments_checked} refuses: {'; '.join(plan.problems)}", "correct or remove it")
    bounds: tuple[Bound, ...] = tuple(b for text in config.constraints.bounds for b in parse_sla(text).bounds)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with (
        study_folder(config, space.fingerprint) as folder,
        Progress(folder, space.size(_COUNT_LIMIT).launchable) as progress,
        _storage_errors(config),
    ):
        for warning in plan.warnings:
            progress.warn(warning)
        study = create_study(
            _storage(config, folder), config.study, config.objectives.metrics, make_sampler(config.sampler)
        )
        labels = [load.label for load in load_ladder(config)]
        mirror = OptunaMirror(
            study,
            space,
            labels,
            config.objectives.metrics,
            bounds,
            config.sampler.kind,
            margins=list(config.quality.non_inferiority),
        )
        executor, clock = _executor(config, folder)
        loop = StudyLoop(config, space, folder, executor, mirror, progress.changed, clock)
        _warm_start(config, space, loop, progress, plan.arguments_checked)
        if (why := _exclusive(loop)) is not None:
            executor.max_parallel = 1
            progress.warn(f"launches run one at a time: {why}")
        reason = loop.run()
        progress.finished(loop, reason)
    return Session(folder, reason, loop.controller_s, time.monotonic() - began)


def _executor(config: SweepConfig, folder: Path) -> tuple[Executor, Clock]:
    """The node, real or estimated. Virtual time goes on where an earlier session of the study stopped."""
    if config.engine.kind != "estimate":
        return LocalExecutor(config.hardware, config.executor.max_parallel), WALL
    ends = [datetime.fromisoformat(r.finished_at) for r in RecordStore(folder).read() if isinstance(r, LaunchRecord)]
    clock = VirtualClock(max([datetime.now(UTC), *ends]))
    return EstimatedExecutor(config, clock), clock


def _warm_start(
    config: SweepConfig, space: SearchSpace, loop: StudyLoop, progress: Progress, vllm_version: str | None
) -> None:
    """Let earlier studies say where to begin; study.json notes which."""
    earlier = open_earlier(config.warm_start)
    hints = warm_prior(earlier, space, config.objectives.metrics, Here(config, vllm_version))
    loop.proposals.begin_with(hints)
    if earlier:
        update_study(loop.folder, warm_start=provenance(earlier, hints))
        progress.changed(loop, summary(hints))


def _exclusive(loop: StudyLoop) -> str | None:
    """Why launches must not run side by side, or None. Measured once for a study, and noted in study.json."""
    mode = loop.config.executor.interference
    if mode != "auto":
        return "executor.interference=exclusive" if mode == "exclusive" else None
    known = json.loads((loop.folder / STUDY_FILE).read_text()).get("interference")
    if known is None:
        found = check_interference(loop.config, loop.folder, loop.executor, loop.clock, loop.reference, loop.ladder[0])
        known = found.to_dict()
        update_study(loop.folder, interference=known)
    return str(known["why"]) if known["verdict"] == "distorts" else None


def _storage(config: SweepConfig, folder: Path) -> BaseStorage:
    """Optuna's storage. The journal is started anew: records.jsonl is the truth and refills it."""
    if config.storage.optuna is None:
        path = folder / JOURNAL_FILE
        path.unlink(missing_ok=True)
        # Left by a sweep killed while writing; Optuna would wait 30 s for its owner, and we hold the study's own lock.
        path.with_name(f"{JOURNAL_FILE}.lock").unlink(missing_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    try:
        return optuna.storages.get_storage(config.storage.optuna)
    except Exception as error:  # SQLAlchemy's and the drivers' errors share no base class
        raise _storage_error(config, error) from error


@contextmanager
def _storage_errors(config: SweepConfig) -> Iterator[None]:
    """Optuna wraps what a database refuses later, when it is locked or gone."""
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        raise _storage_error(config, error.__cause__ or error) from error


def _storage_error(config: SweepConfig, error: BaseException) -> StudyError:
    return StudyError(
        f"storage.optuna={config.storage.optuna} cannot be used: {str(error).splitlines()[0]}",
        "check the URL, the database, its driver and who else writes to it; storage.optuna=null needs none of them",
    )
