"""`sweep run`: wire the stations together for one session of a study."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

from sweep.config import SweepConfig
from sweep.decide.sla import Bound, parse_sla
from sweep.errors import ConfigError, StudyError
from sweep.executor.local import LocalExecutor
from sweep.space.search_space import SearchSpace
from sweep.study.folder import study_folder
from sweep.study.loop import StudyLoop
from sweep.study.plan import make_plan
from sweep.study.progress import Progress
from sweep.study.proposals import load_ladder
from sweep.study.samplers import make_sampler
from sweep.study.tell import OptunaMirror, create_study

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
        study = create_study(
            _storage(config, folder), config.study, config.objectives.metrics, make_sampler(config.sampler)
        )
        labels = [load.label for load in load_ladder(config)]
        mirror = OptunaMirror(study, space, labels, config.objectives.metrics, bounds, config.sampler.kind)
        executor = LocalExecutor(config.hardware, config.executor.max_parallel)
        loop = StudyLoop(config, space, folder, executor, mirror, progress.changed)
        reason = loop.run()
        progress.finished(loop, reason)
    return Session(folder, reason, loop.controller_s, time.monotonic() - began)


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
