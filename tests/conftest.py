"""Fixtures for all tests. Engine tests use a real vLLM server and a real small model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_DEFAULT_MODEL = _CACHE / "sweep" / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (scripts/prepare_smollm2.py makes it)."""
    path = Path(os.environ.get("SWEEP_TEST_MODEL") or _DEFAULT_MODEL)
    if not (path / "config.json").is_file():
        pytest.skip(f"no model at {path}: run scripts/prepare_smollm2.py")
    return path


@pytest.fixture(scope="session")
def engine_python() -> str:
    """An interpreter that holds vLLM."""
    return os.environ.get("SWEEP_ENGINE_PYTHON") or sys.executable
