from __future__ import annotations

from pathlib import Path

import pytest
from example_study import write_meta, write_study


@pytest.fixture(scope="session")
def study_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study. Tests that change files copy it first."""
    return write_study(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def empty_study_dir(tmp_path: Path) -> Path:
    """A study that has just been created: study.json and nothing else."""
    folder = tmp_path / "empty"
    folder.mkdir()
    write_meta(folder)
    return folder
