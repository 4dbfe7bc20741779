"""vLLM's arguments as kernels and scheduler limits; what no table covers is refused, never rounded."""

from __future__ import annotations

from typing import Any

import pytest

from sweep.config import HardwareConfig
from sweep.engine.engine_args import EngineConfig
from sweep.estimate.knobs import Checkpoint, NotCovered, checkpoint_facts, hardware_base, kernel_key, scheduling

H100 = HardwareConfig(name="h100x8", devices=8, memory_gib=79.6)
DENSE = Checkpoint("m/dense", 32, False, 131072, None, False, False)
MOE = Checkpoint("m/moe", 48, True, 40960, None, False, False)


def key(
    checkpoint: Checkpoint = DENSE, env: dict[str, str] | None = None, system: str = "h100_sxm", **args: Any
) -> Any:
    engine = EngineConfig(checkpoint.name, args, env or {})
    return kernel_key(engine, engine.nested_args, checkpoint, system)


@pytest.mark.parametrize(
    ("name", "memory_gib", "tokens", "seqs"),
    [("h100x8", 79.6, 8192, 1024), ("a100", 80.0, 2048, 256), ("b200", 179.0, 16384, 1024), ("l40s", 45.0, 2048, 256)],
)
def test_limits_default_to_vllms_own_for_the_device(name: str, memory_gib: float, tokens: int, seqs: int) -> None:
    limits = scheduling({}, HardwareConfig(name=name, memory_gib=memory_gib))
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (tokens, seqs)
    assert limits.gpu_memory_utilization == 0.92 and limits.chunked_prefill and limits.prefix_caching


def test_limits_follow_the_arguments() -> None:
    args = EngineConfig(
        "m",
        {
            "data_parallel_size": 2,
            "max_num_seqs": 7,
            "enable_prefix_caching": False,
            "speculative_config.method": "eagle3",
            "speculative_config.num_speculative_tokens": 3,
        },
        {},
    ).nested_args
    limits = scheduling(args, H100)
    assert (limits.replicas, limits.max_num_seqs, limits.draft_tokens, limits.draft_layers) == (2, 7, 3, 3)
    assert not limits.prefix_caching
    ngram = scheduling({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, H100)
    assert (ngram.draft_tokens, ngram.draft_layers) == (3, 0)


def test_replicas_of_a_dense_model_share_nothing() -> None:
    assert key(data_parallel_size=4) == key()
    assert key(tensor_parallel_size=4).tensor == 4


def test_experts_are_spread_over_all_ranks() -> None:
    sliced = key(MOE, tensor_parallel_size=2, data_parallel_size=4)
    whole = key(MOE, tensor_parallel_size=2, data_parallel_size=4, enable_expert_parallel=True)
    assert (sliced.attention_data, sliced.experts_tensor, sliced.experts_parallel) == (4, 8, 1)
    assert (whole.attention_data, whole.experts_tensor, whole.experts_parallel) == (4, 1, 8)


def test_block_scaled_fp8_is_read_from_the_per_tensor_table() -> None:
    published = Checkpoint("m/fp8", 32, False, None, "fp8", True, False)
    assert key(quantization="fp8").gemm == key(quantization="fp8_per_block").gemm == key(published).gemm == "fp8"
    assert key(published).moe is None and key(quantization="fp8_per_block").moe == "fp8_block"


def test_the_cache_is_16_bit_unless_asked_or_published_otherwise() -> None:
    assert key().kv_cache == key(kv_cache_dtype="auto").kv_cache == "bfloat16"
    assert key(kv_cache_dtype="fp8").kv_cache == "fp8"
    assert key(Checkpoint("m/fp8", 32, False, None, "modelopt", False, True)).kv_cache == "fp8"


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        ({"quantization": "awq"}, {}, "quantization=awq"),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, "kv_cache_dtype=fp8_e5m2"),
        ({"dtype": "float32"}, {}, "dtype=float32"),
        ({"enforce_eager": True}, {}, "eager"),
        ({"attention_backend": "FLASHINFER"}, {}, "attention_backend=FLASHINFER"),
        ({"all2all_backend": "pplx"}, {}, "all2all_backend=pplx"),
        ({"compilation_config": 3}, {}, "compilation_config"),
        ({"speculative_config": {"method": "draft_model"}}, {}, "method=draft_model"),
        ({}, {"VLLM_USE_DEEP_GEMM": "1"}, "VLLM_USE_DEEP_GEMM"),
    ],
)
def test_what_is_not_covered_is_named(args: dict[str, Any], env: dict[str, str], words: str) -> None:
    with pytest.raises(NotCovered, match=words):
        key(env=env, **args)


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    published = Checkpoint("m/mxfp4", 36, True, None, "mxfp4", False, False)
    assert key(published, quantization="mxfp4").gemm is None
    with pytest.raises(NotCovered, match="already quantized as mxfp4"):
        key(published, quantization="fp8")


def test_the_default_attention_kernel_may_be_named() -> None:
    assert key(attention_backend="FLASH_ATTN") == key()
    with pytest.raises(NotCovered):
        key(attention_backend="FLASH_ATTN", system="b200_sxm")


def test_facts_of_a_config_json() -> None:
    facts = checkpoint_facts(
        "m", {"text_config": {"num_hidden_layers": 4, "n_routed_experts": 8, "max_position_embeddings": 99}}
    )
    assert (facts.layers, facts.is_moe, facts.max_position, facts.quantized_as) == (4, True, 99, None)
    fp8 = {"num_hidden_layers": 4, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert checkpoint_facts("m", fp8).block_fp8 and checkpoint_facts("m", fp8).quantized_as == "fp8"


def test_hardware_names() -> None:
    assert [hardware_base(name) for name in ("h100x8", "h100", "gb200", "l40sx8")] == ["h100", "h100", "gb200", "l40s"]
