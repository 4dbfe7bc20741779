"""Planning and running from Python: the same overrides as on the command line, objects instead of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.compose import load_config
from sweep.decide.opened import Study, open_study
from sweep.space.search_space import SearchSpace, make_search_space

if TYPE_CHECKING:
    from sweep.config import SweepConfig
    from sweep.study.plan import Plan


def plan(*overrides: str, config_dir: str | Path | None = None) -> Plan:
    """What a sweep would do, checked without launching anything: `print(sweep.plan("model=local", …).text())`.

    config_dir: a folder of your own config groups, as --config-dir. Raises SweepError as `sweep plan` would print it.
    """
    from sweep.study.plan import make_plan

    return make_plan(*_composed(overrides, config_dir), cache_dir=cache_dir())


def run(*overrides: str, config_dir: str | Path | None = None) -> Study:
    """Run or continue a sweep until its budget ends, and open what it measured.

    Interrupting it (Ctrl-C, a notebook's stop button) ends it in order; the same call continues it. Raises SweepError
    for anything found wrong before a launch.
    """
    from sweep.study.run import run_study

    return open_study(run_study(*_composed(overrides, config_dir), cache_dir=cache_dir()).folder)


def cache_dir() -> Path:
    """Where measurements that all studies share are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sweep"


def _composed(overrides: tuple[str, ...], config_dir: str | Path | None) -> tuple[SweepConfig, SearchSpace]:
    config = load_config(overrides, None if config_dir is None else Path(config_dir))
    return config, make_search_space(config.space, config.model, config.hardware)
