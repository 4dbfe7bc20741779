"""Engine configs: the command line says what was meant, equal meaning has one identity, numerics have their own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.engine.engine_args import EngineConfig
from sweep.errors import ConfigError

BASE = {"max_model_len": 512, "dtype": "bfloat16"}


def engine(args: dict[str, object] | None = None, env: dict[str, str] | None = None) -> EngineConfig:
    return EngineConfig("m", {**BASE, **(args or {})}, env or {})


def test_argv_is_sorted_and_spells_each_kind_of_value_as_vllm_reads_it() -> None:
    config = EngineConfig(
        "m",
        {
            "max_num_seqs": 8,
            "enforce_eager": True,
            "async_scheduling": False,
            "seed": None,
            "hf_overrides": {"b": 1, "a": [1]},
            "lora_modules": ["x=y", {"name": "z"}],
        },
        {},
    )
    assert config.argv() == [
        "--no-async-scheduling",
        "--enforce-eager",
        "--hf-overrides", '{"a": [1], "b": 1}',
        "--lora-modules", "x=y", '{"name": "z"}',
        "--max-num-seqs", "8",
    ]  # fmt: skip


def test_a_list_becomes_as_many_values_as_vllm_takes() -> None:
    config = EngineConfig("m", {"cudagraph_capture_sizes": [1, 2, 4], "served_model_name": ("a", "b c")}, {})
    assert config.argv() == ["--cudagraph-capture-sizes", "1", "2", "4", "--served-model-name", "a", "b c"]
    again = EngineConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.hash == config.hash


def test_dotted_names_build_one_json_argument_in_any_order_and_refine_a_mapping() -> None:
    dotted = {"speculative_config.num_speculative_tokens": 4, "speculative_config.method": "ngram"}
    whole = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    mixed = {
        "speculative_config.num_speculative_tokens": 4,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    deep = EngineConfig("m", {"compilation_config.pass_config.fuse_norm_quant": True}, {})
    assert engine(dotted).argv() == engine(whole).argv() == engine(mixed).argv()
    assert engine(dotted).hash == engine(whole).hash == engine(mixed).hash
    assert deep.argv() == ["--compilation-config", '{"pass_config": {"fuse_norm_quant": true}}']


def test_a_dotted_name_below_a_plain_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.method='ngram' conflicts with speculative_config='x'"):
        engine({"speculative_config": "x", "speculative_config.method": "ngram"}).argv()


def test_a_dotted_name_below_another_is_refused() -> None:
    deep = {"compilation_config.pass_config": "all", "compilation_config.pass_config.fuse_norm_quant": True}
    with pytest.raises(ConfigError, match=r"conflicts with compilation_config\.pass_config='all'"):
        engine(deep).argv()


def test_building_the_command_leaves_the_given_mapping_alone() -> None:
    given_args = {"hf_overrides": {"a": 1}, "hf_overrides.b": 2}
    EngineConfig("m", given_args, {}).argv()
    assert given_args == {"hf_overrides": {"a": 1}, "hf_overrides.b": 2}


@given(
    st.dictionaries(st.sampled_from(["served_model_name", "chat_template", "tokenizer"]), st.text(min_size=1)),
    st.dictionaries(st.sampled_from(["VLLM_A", "VLLM_B"]), st.text()),
    st.text(min_size=1),
)
def test_a_shell_reads_the_serve_command_back_word_by_word(
    args: dict[str, str], env: dict[str, str], model: str
) -> None:
    config = EngineConfig(model, args, env)
    assignments = [f"{name}={value}" for name, value in sorted(env.items())]
    assert shlex.split(config.serve_command()) == [*assignments, "vllm", "serve", model, *config.argv()]


def test_identity_survives_json() -> None:
    config = engine({"speculative_config.method": "ngram", "enforce_eager": True}, {"VLLM_CPU_KVCACHE_SPACE": "1"})
    again = EngineConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert (again.hash, again.fingerprint, again.argv()) == (config.hash, config.fingerprint, config.argv())
    assert len(config.hash) == len(config.fingerprint) == 12


def test_identity_covers_model_arguments_and_environment() -> None:
    configs = [
        engine(),
        EngineConfig("n", BASE, {}),
        engine({"max_num_seqs": 8}),
        engine({"enforce_eager": True}),
        engine({"enforce_eager": False}),
        engine(env={"VLLM_CPU_KVCACHE_SPACE": "1"}),
    ]
    assert len({c.hash for c in configs}) == len(configs)
    assert engine({"seed": None}).hash == engine().hash  # left out, as if never named


@pytest.mark.parametrize(
    ("args", "env"),
    [
        ({"max_num_seqs": 8}, {}),
        ({"max_num_batched_tokens": 2048}, {}),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}, {}),
        ({"enable_prefix_caching": False}, {}),
        ({"enforce_eager": True}, {}),
        ({"gpu_memory_utilization": 0.8}, {}),
        ({"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 4}, {}),
        ({"speculative_config": {"method": "eagle", "model": "d", "rejection_sample_method": "standard"}}, {}),
        ({"speculative_config": {"method": "eagle", "model": "d", "rejection_sample_method": "block"}}, {}),
        ({"kv_cache_dtype": "auto", "enable_lora": False, "attention_config": {}, "quantization": None}, {}),
        ({"compilation_config": {"mode": 0}, "async_scheduling": False, "cpu_offload_gb": 4}, {}),
        ({"decode_context_parallel_size": 2, "pipeline_parallel_size": 2, "all2all_backend": "nixl_ep"}, {}),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "4", "CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_quality_is_shared_by_settings_that_cannot_change_a_token(args: dict[str, object], env: dict[str, str]) -> None:
    assert engine(args, env).fingerprint == engine().fingerprint


@pytest.mark.parametrize(
    ("args", "env"),
    [
        ({"revision": "abc"}, {}),
        ({"dtype": "float16"}, {}),
        ({"quantization": "fp8"}, {}),
        ({"hf_overrides": {"rope_theta": 1}}, {}),
        ({"hf_overrides.rope_theta": 1}, {}),
        ({"kv_cache_dtype": "fp8"}, {}),
        ({"kv_cache_dtype_skip_layers": ["0"]}, {}),
        ({"attention_backend": "FLASHINFER"}, {}),
        ({"attention_config.disable_flashinfer_q_quantization": True}, {}),
        ({"linear_backend": "marlin"}, {}),
        ({"moe_backend": "triton"}, {}),
        ({"max_model_len": 131072}, {}),
        ({"enable_lora": True, "lora_modules": ["sql=path"]}, {}),
        ({"speculative_config": '{"rejection_sample_method": "synthetic"}'}, {}),
        ({"chat_template": "other.jinja"}, {}),
        ({"load_format": "dummy"}, {}),
        ({"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}}, {}),
        ({}, {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}),
        ({}, {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}),
        ({}, {"VLLM_MARLIN_INPUT_DTYPE": "int8"}),
        ({}, {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"}),
        ({}, {"VLLM_USE_DEEP_GEMM": "0"}),
        ({}, {"VLLM_BATCH_INVARIANT": "1"}),
        ({}, {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}),
        ({}, {"VLLM_CPU_INT4_W4A8": "1"}),
        ({}, {"VLLM_ROCM_USE_AITER": "1"}),
        ({}, {"VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": "1"}),
    ],
)
def test_quality_is_measured_anew_for_settings_that_can(args: dict[str, object], env: dict[str, str]) -> None:
    assert engine(args, env).fingerprint != engine().fingerprint
    assert EngineConfig("another-checkpoint", {**BASE, **args}, env).fingerprint != engine(args, env).fingerprint


@pytest.mark.parametrize("name", ["HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "hf_token"])
def test_a_secret_in_the_environment_is_refused_without_repeating_it(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.{name} looks like a secret") as caught:
        EngineConfig("m", {}, {name: "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert "your shell" in str(caught.value)


def test_a_secret_argument_is_refused_and_the_word_token_alone_is_none() -> None:
    with pytest.raises(ConfigError, match=r"args\.api_key looks like a secret"):
        EngineConfig("m", {"api_key": "hunter2"}, {})
    EngineConfig("m", {"max_num_batched_tokens": 8}, {"VLLM_MAX_TOKENS_PER_EXPERT_FUSED_MOE_CHUNK": "8"})


def test_a_folder_is_local_and_a_hub_name_of_model_tokenizer_or_draft_is_not(tmp_path: Path) -> None:
    here = str(tmp_path)
    assert EngineConfig(here, {}, {}).is_local
    assert not EngineConfig("org/name", {}, {}).is_local
    assert not EngineConfig(here, {"tokenizer": "org/name"}, {}).is_local
    assert not EngineConfig(here, {"speculative_config.model": "org/draft"}, {}).is_local
    assert EngineConfig(here, {"speculative_config.method": "ngram"}, {}).is_local


SPEED = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.integers(1, 1024),
        "max_num_batched_tokens": st.integers(1, 2**15),
        "tensor_parallel_size": st.sampled_from([1, 2, 4, 8]),
        "data_parallel_size": st.sampled_from([1, 2]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "enforce_eager": st.booleans(),
        "speculative_config.method": st.just("ngram"),
        "speculative_config.num_speculative_tokens": st.integers(1, 8),
    },
)
NUMERICS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["float16", "float32"]),
        "quantization": st.sampled_from(["fp8", "awq"]),
        "kv_cache_dtype": st.sampled_from(["fp8", "int8_per_token_head"]),
        "attention_backend": st.sampled_from(["FLASH_ATTN", "FLASHINFER"]),
        "hf_overrides": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2, min_size=1),
    },
)


@given(NUMERICS, NUMERICS, SPEED, SPEED)
def test_fingerprints_are_equal_exactly_where_numerics_are(
    one: dict[str, object], other: dict[str, object], fast: dict[str, object], slow: dict[str, object]
) -> None:
    first, second = EngineConfig("m", {**one, **fast}, {}), EngineConfig("m", {**slow, **other}, {})
    assert (first.fingerprint == second.fingerprint) == (one == other)
    assert (first.hash == second.hash) == ({**one, **fast} == {**other, **slow})
