"""Arguments are checked against the vLLM that is really there; a missing or broken one is told apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sweep.engine.arguments import check_arguments, known_arguments
from sweep.engine.engine_args import NUMERICS_ARGS
from sweep.errors import ConfigError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def known(engine_python: str, cache: Path) -> dict[str, Any]:
    found = known_arguments(engine_python, cache)
    if found is None:
        pytest.skip(f"{engine_python} has no vLLM")
    return found["arguments"]


def interpreter(folder: Path, packages: Path | None = None) -> str:
    """A Python that sees no installed package, and those of one folder where one is given."""
    program = folder / "python"
    path = f"PYTHONPATH={packages} " if packages else ""
    program.write_text(f'#!/bin/sh\n{path}exec "{sys.executable}" -S "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.engine
def test_the_real_parser_knows_the_knobs_of_the_search_spaces(known: dict[str, Any]) -> None:
    assert known["enable_prefix_caching"]["is_bool"]
    assert not known["max_num_seqs"]["is_bool"]
    assert "fp8" in known["kv_cache_dtype"]["choices"]
    assert "--tensor-parallel-size" in known["tensor_parallel_size"]["flags"]


@pytest.mark.engine
def test_the_probe_runs_once_for_an_installation(known: dict[str, Any], engine_python: str, cache: Path) -> None:
    (stored,) = cache.rglob("*.json")
    marked = {"version": "from the cache", "arguments": {}}
    original = stored.read_text()
    stored.write_text(json.dumps(marked))
    try:
        assert known_arguments(engine_python, cache) == marked
    finally:
        stored.write_text(original)


@pytest.mark.engine
def test_good_arguments_give_no_line(known: dict[str, Any]) -> None:
    args = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": "2k",
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
        "speculative_config": {"method": "ngram"},
        "speculative_config.num_speculative_tokens": 4,
        "quantization": None,
        "cudagraph_capture_sizes": [1, 2, 4],
        "disable_log_stats": True,
        "max_model_len": -1,
        "seed": "7",
        "gpu_memory_utilization": 0.9,
    }
    assert check_arguments(args, known) == []


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("max_num_seq", 8, "no argument 'max_num_seq' (did you mean 'max_num_seqs'"),
        ("qqqqqqqq", 8, "no argument 'qqqqqqqq'"),
        ("speculativ_config.method", "ngram", "no argument 'speculativ_config' (did you mean 'speculative_config'"),
        ("dtype", "float8", "dtype=float8: not among auto, bfloat16"),
        ("enforce_eager", "yes", "enforce_eager=yes: takes true or false"),
        ("max_num_seqs", True, "max_num_seqs=True: takes a value"),
        ("max_num_seqs", "many", "max_num_seqs=many: takes int"),
        ("max_num_seqs", 8.5, "max_num_seqs=8.5: takes int"),
        ("gpu_memory_utilization", "90%", "gpu_memory_utilization=90%: takes float"),
        ("disable_log_stats", False, "disable_log_stats=False: can only be set to true, or left out with null"),
    ],
)
def test_each_mistake_is_one_line_naming_it(known: dict[str, Any], name: str, value: object, line: str) -> None:
    (problem,) = check_arguments({"max_num_seqs": 8, name: value}, known)
    assert problem.startswith(line)
    assert "\n" not in problem


@pytest.mark.engine
def test_every_argument_of_the_numerics_fingerprint_exists(known: dict[str, Any]) -> None:
    assert [name for name in NUMERICS_ARGS if name not in known] == []


def test_a_module_in_the_working_directory_is_not_mistaken_for_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise RuntimeError('not the real one')\n")
    monkeypatch.chdir(tmp_path)
    assert known_arguments(interpreter(tmp_path), tmp_path) is None


def test_an_interpreter_without_vllm_is_no_error(tmp_path: Path) -> None:
    assert known_arguments(interpreter(tmp_path), tmp_path) is None


def test_a_folder_called_vllm_in_the_way_is_not_an_installation(tmp_path: Path) -> None:
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    assert known_arguments(interpreter(tmp_path, tmp_path / "packages"), tmp_path) is None


def test_a_vllm_that_does_not_import_is_an_error_saying_why(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    with pytest.raises(ConfigError, match=r"does not import: RuntimeError: operator torchvision::nms does not exist"):
        known_arguments(interpreter(tmp_path, tmp_path / "packages"), tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_what_is_no_interpreter_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.python=/no/such/python does not run"):
        known_arguments("/no/such/python", tmp_path)
