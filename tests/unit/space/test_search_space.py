from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sweep.config import HardwareConfig, ModelConfig, ParamConfig, SpaceConfig
from sweep.errors import ConfigError
from sweep.space.params import Choice, make_param
from sweep.space.search_space import SearchSpace, make_search_space

MOE = ModelConfig(
    name="moe", path="org/moe", num_attention_heads=32, num_hidden_layers=48, is_moe=True, weights_gib=57.0
)
DENSE = ModelConfig(name="dense", path="org/dense", num_attention_heads=32, num_hidden_layers=32, weights_gib=15.0)
NODE = HardwareConfig(name="h100x8", devices=8, memory_gib=79.6)


def space(
    params: dict[str, dict[str, Any]],
    constraints: list[str] | None = None,
    model: ModelConfig = DENSE,
    hardware: HardwareConfig = NODE,
) -> SearchSpace:
    config = SpaceConfig("test", {k: ParamConfig(**v) for k, v in params.items()}, constraints or [])
    return make_search_space(config, model, hardware)


PARALLEL = {"joint": ["tensor_parallel_size", "data_parallel_size"], "choices": [[1, 1], [2, 1], [2, 2], [4, 4]]}


def test_log_range_multiplies_and_linear_range_adds() -> None:
    log = make_param("m", ParamConfig(low=16, high=1024, log=True, step=2))
    linear = make_param("m", ParamConfig(low=2, high=8, step=3))
    assert isinstance(log, Choice) and log.labels == (16, 32, 64, 128, 256, 512, 1024) and log.ordered
    assert isinstance(linear, Choice) and linear.labels == (2, 5, 8)


def test_joint_knobs_are_set_together() -> None:
    s = space({"parallel": PARALLEL})
    (label, *_) = [p["parallel"] for p in s.enumerate() if s.settings(p)["data_parallel_size"] == 2]
    assert label == "tensor_parallel_size=2,data_parallel_size=2"
    assert s.settings({"parallel": label}) == {"tensor_parallel_size": 2, "data_parallel_size": 2}


def test_device_count_and_heads_are_known_rules() -> None:
    s = space({"parallel": PARALLEL})
    size = s.size()
    assert (size.total, size.valid) == (4, 3)
    assert dict(size.invalid) == {"needs 16 devices, the node has 8": 1}
    nine_heads = ModelConfig(name="m", path="o/m", num_attention_heads=9)
    reasons = space({"parallel": PARALLEL}, model=nine_heads).violations(
        {"parallel": "tensor_parallel_size=2,data_parallel_size=1"}
    )
    assert reasons == ["9 attention heads do not divide by tensor_parallel_size=2"]


def test_weights_that_cannot_fit_are_not_launched_and_quantization_makes_them_fit() -> None:
    big = ModelConfig(name="b", path="o/b", num_attention_heads=64, weights_gib=100.0)
    s = space(
        {"weights": {"bundles": {"checkpoint": {}, "fp8": {"quantization": "fp8"}, "awq": {"model": "o/b-awq"}}}},
        model=big,
    )
    assert s.violations({"weights": "checkpoint"}) == ["weights need 100 GiB per device, vLLM may use 73 GiB"]
    assert s.violations({"weights": "fp8"}) == []
    assert s.violations({"weights": "awq"}) == []  # another checkpoint: unknown, so not refused


def test_condition_removes_the_dimension() -> None:
    params = {
        "parallel": PARALLEL,
        "enable_expert_parallel": {"choices": [None, True], "when": "model.is_moe and tensor_parallel_size > 1"},
    }
    dense, moe = space(params), space(params, model=MOE)
    assert all("enable_expert_parallel" not in p for p in dense.enumerate())
    assert [p for p in moe.enumerate() if p["parallel"].startswith("tensor_parallel_size=1")] == [
        {"parallel": "tensor_parallel_size=1,data_parallel_size=1"}
    ]
    assert sum("enable_expert_parallel" in p for p in moe.enumerate()) == 6


def test_bundle_sets_arguments_environment_and_checkpoint() -> None:
    bundles = {"base": {}, "awq": {"model": "org/awq", "VLLM_X": "1", "dtype": "half"}}
    s = space({"weights": {"bundles": bundles}})
    assert s.settings({"weights": "awq"}) == {"model": "org/awq", "VLLM_X": "1", "dtype": "half"}


def test_baseline_is_the_narrowest_default_that_fits() -> None:
    params = {"parallel": PARALLEL, "max_num_seqs": {"choices": [64, None]}}
    assert space(params).baseline() == (
        {"parallel": "tensor_parallel_size=1,data_parallel_size=1", "max_num_seqs": None},
        {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_num_seqs": None},
    )
    large = ModelConfig(name="b", path="o/b", num_attention_heads=64, weights_gib=130.0)
    chosen, settings = space(params, model=large).baseline()
    assert chosen is not None and settings["tensor_parallel_size"] == 2


def test_baseline_outside_the_space_is_still_a_configuration_that_fits() -> None:
    large = ModelConfig(name="b", path="o/b", num_attention_heads=64, weights_gib=130.0)
    assert space({"max_num_seqs": {"low": 16, "high": 64}}, model=large).baseline() == (
        None,
        {"tensor_parallel_size": 2},
    )


def test_sample_gives_members() -> None:
    params = {
        "a": {"low": 0.5, "high": 2.0, "log": True},
        "b": {"choices": [None, 1, 2]},
        "c": {"low": 1, "high": 3, "when": "b == 1"},
    }
    s = space(params)
    rng = np.random.default_rng(0)
    draws = [s.sample(rng) for _ in range(200)]
    assert all(("c" in d) == (d["b"] == 1) and 0.5 <= float(d["a"] or 0) <= 2.0 for d in draws)  # type: ignore[arg-type]
    assert {d["b"] for d in draws} == {None, 1, 2}
    assert s.size().total is None and s.size().sampled == 2000 and s.size().launchable is None


def test_fingerprint_changes_with_a_choice_and_a_constraint_only() -> None:
    base = space({"a": {"choices": [1, 2]}})
    assert base.fingerprint == space({"a": {"choices": [1, 2]}}).fingerprint
    assert base.fingerprint != space({"a": {"choices": [1, 3]}}).fingerprint
    assert base.fingerprint != space({"a": {"choices": [1, 2]}}, ["a < 2"]).fingerprint


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ({}, "exactly one of"),
        ({"choices": [1], "low": 1, "high": 2}, "exactly one of"),
        ({"choices": []}, "no choices"),
        ({"choices": [1, 1]}, "lists a choice twice"),
        ({"low": 5, "high": 5}, "not a range"),
        ({"low": 0, "high": 8, "log": True}, "cannot start at 0"),
        ({"low": 1, "high": 8, "log": True, "step": 1}, "does not advance"),
        ({"joint": ["a", "b"], "choices": [[1]]}, "does not match joint"),
        ({"bundles": {"x": 3}}, "is not a mapping"),
    ],
)
def test_a_wrong_parameter_is_named(param: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_param("my_knob", ParamConfig(**param))
    assert "my_knob" in error.value.message


def test_unknown_names_in_conditions_and_constraints_are_errors() -> None:
    with pytest.raises(ConfigError, match="max_num_seqz"):
        space({"max_num_seqs": {"choices": [1]}}, ["max_num_seqz < 2"])
    with pytest.raises(ConfigError, match="neither a parameter before it"):
        space({"a": {"choices": [1], "when": "b == 1"}, "b": {"choices": [1]}})
