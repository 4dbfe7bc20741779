"""Combinations known not to run, told before anything is launched. Conservative: only certain failures are listed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweep.config import HardwareConfig, ModelConfig

# Bytes per parameter relative to a 16-bit checkpoint, for methods that quantize it while loading.
_ONLINE_WEIGHT_SHARE = {"fp8": 0.5, "int8": 0.5, "mxfp8": 0.5, "nvfp4": 0.28, "bitsandbytes": 0.28}
_DEFAULT_GPU_MEMORY_UTILIZATION = 0.92


def parallel_devices(settings: Mapping[str, Any]) -> int:
    """Devices of one deployment: tensor x pipeline x data parallel (vLLM counts absent ones as 1)."""
    sizes = [settings.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline", "data")]
    return int(sizes[0] * sizes[1] * sizes[2])


def known_invalid(settings: Mapping[str, Any], model: ModelConfig, hardware: HardwareConfig) -> list[str]:
    """Reasons why this configuration cannot run, each one sentence; empty when none is known."""
    tensor = settings.get("tensor_parallel_size") or 1
    pipeline = settings.get("pipeline_parallel_size") or 1
    data = settings.get("data_parallel_size") or 1
    reasons = []
    devices = parallel_devices(settings)
    if hardware.device == "gpu" and devices > hardware.devices:
        reasons.append(f"needs {devices} devices, the node has {hardware.devices}")
    if model.num_attention_heads and model.num_attention_heads % tensor:
        reasons.append(f"{model.num_attention_heads} attention heads do not divide by tensor_parallel_size={tensor}")
    if model.num_hidden_layers and pipeline > model.num_hidden_layers:
        reasons.append(f"pipeline_parallel_size={pipeline} exceeds {model.num_hidden_layers} layers")
    if settings.get("enable_expert_parallel") and not model.is_moe:
        reasons.append("expert parallel needs a mixture-of-experts model")
    reasons += _memory(
        settings, model, hardware, tensor * pipeline * (data if settings.get("enable_expert_parallel") else 1)
    )
    return reasons


def _memory(settings: Mapping[str, Any], model: ModelConfig, hardware: HardwareConfig, shards: int) -> list[str]:
    """Weights alone against the memory vLLM may use; says nothing about another checkpoint or an unknown format."""
    if not (model.weights_gib and hardware.memory_gib and hardware.device == "gpu") or "model" in settings:
        return []
    method = str(settings.get("quantization") or "")
    share = next((s for name, s in _ONLINE_WEIGHT_SHARE.items() if method.startswith(name)), None if method else 1.0)
    if share is None:
        return []
    usable = hardware.memory_gib * float(settings.get("gpu_memory_utilization") or _DEFAULT_GPU_MEMORY_UTILIZATION)
    needed = model.weights_gib * share / shards
    if needed < usable:
        return []
    return [f"weights need {needed:.0f} GiB per device, vLLM may use {usable:.0f} GiB"]
