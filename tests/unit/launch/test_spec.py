"""What a launch is asked to do, written down and read again; engine configs from knobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_launches import make_config

from sweep.config import HardwareConfig
from sweep.engine.engine_args import EngineConfig
from sweep.launch.spec import (
    CONTROL,
    REPEAT,
    LaunchSpec,
    build_engine,
    devices_needed,
    logprobs_path,
    make_spec,
    read_spec,
)
from sweep.study.proposals import load_ladder


def spec_in(storage: Path) -> LaunchSpec:
    config = make_config(storage, quality=True)
    return make_spec(
        config,
        storage / "s",
        launch_id="0001-x",
        engine=EngineConfig("org/m", {"max_num_seqs": 8}, {"A": "1"}),
        params={"max_num_seqs": 8},
        purpose="trial",
        attempt=2,
        loads=load_ladder(config),
        repeat=1,
        quality_runs=("", REPEAT),
    )


def test_a_spec_read_again_is_the_same(tmp_path: Path) -> None:
    spec = spec_in(tmp_path).on_devices((2, 3), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert read_spec(spec.write()) == spec
    assert [p.name for p in spec.folder.iterdir()] == ["spec.json"]


def test_a_spec_of_a_newer_version_is_read(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    path = spec.write()
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "blue"}))
    assert read_spec(path) == spec


def test_marks_tell_studies_apart(tmp_path: Path) -> None:
    assert spec_in(tmp_path / "a").launch_id == spec_in(tmp_path / "b").launch_id
    assert spec_in(tmp_path / "a").mark != spec_in(tmp_path / "b").mark


def test_a_cpu_engine_yields_to_the_load_client_and_a_gpu_engine_need_not(tmp_path: Path) -> None:
    assert spec_in(tmp_path).niceness == 0
    config = make_config(tmp_path)
    config.hardware = HardwareConfig("cpu", "cpu", 1)
    engine = EngineConfig("org/m", {"tensor_parallel_size": 2}, {})
    spec = make_spec(
        config, tmp_path, launch_id="1", engine=engine, params=None, purpose="trial", attempt=0, loads=(), repeat=0,
        quality_runs=(),
    )  # fmt: skip
    assert spec.niceness > 0 and spec.devices == 1


def test_knobs_win_over_the_engines_arguments_and_those_over_the_models(tmp_path: Path) -> None:
    config = make_config(tmp_path, engine_args={"b": 2, "c": 2})
    config.model.args = {"a": 1, "b": 1, "c": 1}
    config.model.env, config.engine.env = {"X": "1", "Y": "1"}, {"Y": "2"}
    engine = build_engine(config, {"c": 3, "Y": "3", "model": "org/other"})
    assert (engine.model, dict(engine.args), dict(engine.env)) == (
        "org/other",
        {"a": 1, "b": 2, "c": 3},
        {"X": "1", "Y": "3"},
    )


def test_null_leaves_an_argument_or_a_variable_out(tmp_path: Path) -> None:
    config = make_config(tmp_path, engine_args={"a": 1})
    config.engine.env = {"X": "1"}
    engine = build_engine(config, {"a": None, "X": None, "NEVER_SET": None})
    assert dict(engine.args) == {} and dict(engine.env) == {}


@pytest.mark.parametrize(("value", "text"), [(True, "1"), (False, "0"), (8, "8"), (0.5, "0.5"), ("0|1", "0|1")])
def test_environment_variables_are_text_as_vllm_reads_it(tmp_path: Path, value: object, text: str) -> None:
    assert build_engine(make_config(tmp_path), {"VLLM_X": value}).env["VLLM_X"] == text


def test_one_device_in_a_direction_is_the_same_configuration_as_saying_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    one = build_engine(config, {"tensor_parallel_size": 1, "data_parallel_size": 1, "pipeline_parallel_size": 1})
    assert one.hash == build_engine(config, {}).hash
    four = build_engine(config, {"tensor_parallel_size": 2, "data_parallel_size": 2})
    assert devices_needed(config, four) == 4 and devices_needed(config, one) == 1


def test_quality_runs_have_names_of_their_own(tmp_path: Path) -> None:
    names = {logprobs_path(tmp_path, "f", run).name for run in ("", REPEAT, CONTROL)}
    assert names == {"f.npz", "f-repeat.npz", "f-control.npz"}
