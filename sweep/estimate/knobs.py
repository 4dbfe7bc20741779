"""From vLLM's arguments to what a model of time needs: which kernels run, and what the scheduler may do with them.

Arguments that no kernel table covers are named in NotCovered; nothing is rounded to the nearest known setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweep.config import HardwareConfig
from sweep.engine.engine_args import NUMERICS_ENV, EngineConfig

DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
_A_LOT_GIB, _MUCH_GIB = 160.0, 70.0
# Drafting that costs no model step, and drafting by one extra layer of the target's shape per token.
_FREE_DRAFTS = ("ngram", "suffix")
_LAYER_DRAFTS = ("eagle", "eagle3", "mtp")
_GEMM = {"fp8": "fp8", "fp8_per_tensor": "fp8", "fp8_per_block": "fp8_block"}
_KV_CACHE = {"auto": None, "bfloat16": "bfloat16", "float16": "bfloat16", "fp8": "fp8", "fp8_e4m3": "fp8"}
# What vLLM chooses there by itself, whatever the model.
_DEFAULT_ATTENTION = {"h100_sxm": "FLASH_ATTN", "h200_sxm": "FLASH_ATTN"}
# Arguments that are mapped below or by the scheduler, and those that change neither a kernel nor a batch.
_MAPPED = {
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "quantization",
    "kv_cache_dtype", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "gpu_memory_utilization",
    "speculative_config", "enable_chunked_prefill", "enable_prefix_caching", "dtype", "all2all_backend",
    "attention_backend", "enforce_eager",
}  # fmt: skip
_NO_EFFECT = {
    "revision", "tokenizer", "tokenizer_revision", "trust_remote_code", "served_model_name", "chat_template",
    "download_dir", "seed", "disable_log_stats", "enable_log_requests", "generation_config", "max_logprobs",
    "uvicorn_log_level", "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice", "block_size",
}  # fmt: skip


class NotCovered(Exception):
    """No measured kernel data for this: the reason in words."""


@dataclass(frozen=True)
class Checkpoint:
    """What a model's config.json says. quantized_as: quant_method of published weights; block_fp8: with block scales.

    max_position: tokens of context it was made for.
    """

    name: str
    layers: int
    is_moe: bool
    max_position: int | None
    quantized_as: str | None
    block_fp8: bool
    fp8_kv_cache: bool


@dataclass(frozen=True)
class KernelKey:
    """One rank of a deployment as the kernel tables see it. None: as the checkpoint was published."""

    checkpoint: str
    system: str
    tensor: int
    pipeline: int
    attention_data: int
    experts_tensor: int
    experts_parallel: int
    gemm: str | None
    moe: str | None
    kv_cache: str


@dataclass(frozen=True)
class Scheduling:
    """How one vLLM engine batches. replicas: data parallel; each has its own limits and its own cache.

    draft_tokens: proposed per sequence and step. draft_layers: extra layers computed for them.
    """

    replicas: int
    pipeline: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    gpu_memory_utilization: float
    chunked_prefill: bool
    prefix_caching: bool
    draft_tokens: int
    draft_layers: int


def hardware_base(name: str) -> str:
    """The GPU's short name: "h100" of h100 and h100x8."""
    return re.sub(r"x\d+$", "", name)


def scheduling(args: Mapping[str, Any], hardware: HardwareConfig) -> Scheduling:
    """Limits of the scheduler, with the defaults that vLLM 0.32's API server takes for this device.

    args: nested, as in EngineConfig.nested_args. Defaults: EngineArgs.get_batch_defaults.
    """
    memory_gib, name = hardware.memory_gib or 0.0, hardware_base(hardware.name)
    if memory_gib >= _A_LOT_GIB:
        tokens, seqs = 16384, 1024
    elif memory_gib >= _MUCH_GIB and "a100" not in name:
        tokens, seqs = 8192, 1024
    else:
        tokens, seqs = 2048, 256
    longest = args.get("max_model_len")
    speculation = args.get("speculative_config") or {}
    drafts = int(speculation.get("num_speculative_tokens") or 0)
    return Scheduling(
        replicas=int(args.get("data_parallel_size") or 1),
        pipeline=int(args.get("pipeline_parallel_size") or 1),
        max_num_seqs=int(args.get("max_num_seqs") or seqs),
        max_num_batched_tokens=int(args.get("max_num_batched_tokens") or tokens),
        max_model_len=longest if isinstance(longest, int) and longest > 0 else None,
        gpu_memory_utilization=float(args.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION),
        chunked_prefill=args.get("enable_chunked_prefill") is not False,
        prefix_caching=args.get("enable_prefix_caching") is not False,
        draft_tokens=drafts,
        draft_layers=drafts if speculation.get("method") in _LAYER_DRAFTS else 0,
    )


def kernel_key(engine: EngineConfig, args: Mapping[str, Any], checkpoint: Checkpoint, system: str) -> KernelKey:
    """Which kernels this engine config runs. Raises NotCovered for everything the tables do not hold."""
    _refuse_uncovered(engine, args, system)
    tensor, data = int(args.get("tensor_parallel_size") or 1), int(args.get("data_parallel_size") or 1)
    width = tensor * data if checkpoint.is_moe else 1  # vLLM spreads experts over all ranks, sliced or whole
    expert_parallel = checkpoint.is_moe and bool(args.get("enable_expert_parallel"))
    gemm, moe = _weights(args.get("quantization"), checkpoint)
    return KernelKey(
        checkpoint=checkpoint.name,
        system=system,
        tensor=tensor,
        pipeline=int(args.get("pipeline_parallel_size") or 1),
        attention_data=data if checkpoint.is_moe else 1,  # replicas of a dense model share nothing
        experts_tensor=1 if expert_parallel else width,
        experts_parallel=width if expert_parallel else 1,
        gemm=gemm,
        moe=moe,
        kv_cache=_kv_cache(str(args.get("kv_cache_dtype") or "auto"), checkpoint),
    )


def _refuse_uncovered(engine: EngineConfig, args: Mapping[str, Any], system: str) -> None:
    for name in args:
        if name not in _MAPPED and name not in _NO_EFFECT:
            raise NotCovered(f"no data on the effect of {name}={args[name]}")
    for name in engine.env:
        if NUMERICS_ENV.search(name):
            raise NotCovered(f"no data on the effect of the environment variable {name}")
    if args.get("enforce_eager"):
        raise NotCovered("no data on eager mode: decoding was measured under CUDA graphs")
    if str(args.get("dtype") or "auto") not in ("auto", "half", "float16", "bfloat16"):
        raise NotCovered(f"no data for dtype={args['dtype']}")
    if args.get("attention_backend") not in (None, _DEFAULT_ATTENTION.get(system)):
        raise NotCovered(f"no data for attention_backend={args['attention_backend']}: only vLLM's default was measured")
    if args.get("all2all_backend") not in (None, "allgather_reducescatter"):
        raise NotCovered(f"no data for all2all_backend={args['all2all_backend']}")
    speculation = args.get("speculative_config")
    if speculation and speculation.get("method") not in (*_FREE_DRAFTS, *_LAYER_DRAFTS):
        raise NotCovered(f"no data on the cost of drafting with speculative_config.method={speculation.get('method')}")


def _weights(quantization: str | None, checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """Modes of dense and expert layers. Block-scaled FP8 is read from the per-tensor table.

    Its own dense table for vLLM is flat at 60-180 us where the others are at 10: the measurement saw the host, not the
    kernel, and doubles TPOT. Against 310 measured points of MiniMax-M2.5 the substitution takes the median error from
    100 % to 19 %.
    """
    if quantization is not None and checkpoint.quantized_as is None:
        if quantization not in _GEMM:
            raise NotCovered(f"no data for quantization={quantization}")
        return "fp8", _GEMM[quantization]
    if quantization not in (None, checkpoint.quantized_as):
        raise NotCovered(f"quantization={quantization} on a checkpoint already quantized as {checkpoint.quantized_as}")
    return ("fp8" if checkpoint.block_fp8 else None), None


def _kv_cache(dtype: str, checkpoint: Checkpoint) -> str:
    if dtype not in _KV_CACHE:
        raise NotCovered(f"no data for kv_cache_dtype={dtype}")
    return _KV_CACHE[dtype] or ("fp8" if checkpoint.fp8_kv_cache else "bfloat16")


def checkpoint_facts(name: str, config: Mapping[str, Any]) -> Checkpoint:
    """The facts of a config.json (with hf_quant_config.json under "hf_quant_config", where there is one)."""
    text = config.get("text_config") or config
    experts = next((text[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(k)), 0)
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    modelopt = (config.get("hf_quant_config") or {}).get("quantization") or {}
    method = quantization.get("quant_method") or ("modelopt" if modelopt else None)
    kv_cache = modelopt.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme")
    return Checkpoint(
        name=name,
        layers=int(text["num_hidden_layers"]),
        is_moe=int(experts) > 1,
        max_position=text.get("max_position_embeddings"),
        quantized_as=method,
        block_fp8=bool(quantization.get("weight_block_size")),
        fp8_kv_cache=bool(kv_cache),
    )
