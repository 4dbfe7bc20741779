"""Step times from data sheets, for the simulated engine where no kernel was measured. Never an estimate for a person.

A step reads the weights once and every decoding sequence's cache once, or computes two operations per weight and token,
whichever takes longer, at the shares of peak below; each layer adds a fixed launch time, and two all-reduces where it
is split. Of a mixture of experts, each token uses eight experts and a tenth of the weights is always used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweep.config import HardwareConfig, ModelConfig
from sweep.errors import ConfigError
from sweep.estimate.knobs import hardware_base
from sweep.estimate.steps import Memory

# Memory bandwidth in GB/s, dense bf16 in TFLOP/s (vendors' data sheets, SXM versions where there are several).
_DEVICES = {
    "a100": (2039.0, 312.0), "h100": (3350.0, 989.0), "h200": (4800.0, 989.0), "b200": (7700.0, 2250.0),
    "b300": (7700.0, 2250.0), "gb200": (8000.0, 2500.0), "l40s": (864.0, 362.0),
}  # fmt: skip
_BANDWIDTH_SHARE, _COMPUTE_SHARE = 0.8, 0.6
_LAUNCH_MS_PER_LAYER, _ALL_REDUCE_MS = 0.02, 0.015
_HEAD_DIM, _EXPERTS_PER_TOKEN, _ALWAYS_USED = 128, 8, 0.1
_RUNTIME_GIB, _ACTIVATION_GIB_PER_KTOKEN = 2.0, 0.1
_GIB = 2**30


@dataclass(frozen=True)
class Roofline:
    """One rank (see steps.Steps). weight_gib: all of them; split: devices over which they are divided."""

    layers: int
    weight_gib: float
    split: int
    tensor: int
    kv_bytes_per_token: float
    bytes_per_s: float
    flops: float
    parameters: float
    experts: int

    def step_ms(
        self, prefill_tokens: int, prompt_tokens: int, cached_tokens: int, decoding: int, queries: int, context: int
    ) -> float:
        """See steps.Steps."""
        tokens = prefill_tokens + decoding * queries
        width = max(self.tensor, self.split if self.experts else 1)
        touched, active = 1.0, 1.0
        if self.experts:
            chosen = min(_EXPERTS_PER_TOKEN / self.experts, 1.0)
            touched = _ALWAYS_USED + (1 - _ALWAYS_USED) * (1 - (1 - chosen) ** tokens)
            active = _ALWAYS_USED + (1 - _ALWAYS_USED) * chosen
        cache = (decoding * context + prefill_tokens / 2) * self.kv_bytes_per_token
        read_s = (self.weight_gib * _GIB * touched / width + cache) / self.bytes_per_s
        compute_s = 2 * self.parameters * active * tokens / width / self.flops
        fixed_ms = self.layers * (_LAUNCH_MS_PER_LAYER + (2 * _ALL_REDUCE_MS if self.tensor > 1 else 0.0))
        return 1e3 * max(read_s, compute_s) + fixed_ms

    def memory(self, max_num_batched_tokens: int) -> Memory:
        """See steps.Steps."""
        weights = self.weight_gib / self.split
        activations = max_num_batched_tokens / 1e3 * _ACTIVATION_GIB_PER_KTOKEN
        return Memory(weights, weights + activations + _RUNTIME_GIB, 0.0, self.kv_bytes_per_token / _GIB)


def roofline(model: ModelConfig, hardware: HardwareConfig, args: Mapping[str, Any]) -> Roofline:
    """Roofline of this deployment. args: nested engine arguments. Raises ConfigError without the model's size."""
    base = hardware_base(hardware.name)
    if base not in _DEVICES:
        raise ConfigError(f"hardware {hardware.name} cannot be simulated", f"choose one of {', '.join(_DEVICES)}")
    missing = [f"model.{name}" for name in ("weights_gib", "num_hidden_layers") if getattr(model, name) is None]
    if missing:
        raise ConfigError(f"{model.path} cannot be simulated without {' and '.join(missing)}", f"set {missing[0]}=…")
    assert model.weights_gib is not None and model.num_hidden_layers is not None
    bandwidth, tflops = _DEVICES[base]
    tensor, pipeline, data = (int(args.get(f"{k}_parallel_size") or 1) for k in ("tensor", "pipeline", "data"))
    quantization = str(args.get("quantization") or "")
    weight_bits = 4 if quantization in ("awq", "gptq", "bitsandbytes") or "4" in quantization else 8
    share = weight_bits / 16 if quantization else 1.0
    kv_heads = max(1, (model.num_key_value_heads or model.num_attention_heads or 8) // tensor)
    kv_bytes = 1 if str(args.get("kv_cache_dtype") or "auto").startswith("fp8") else 2
    return Roofline(
        layers=model.num_hidden_layers,
        weight_gib=model.weights_gib * share,
        split=tensor * pipeline * (data if model.is_moe else 1),
        tensor=tensor,
        kv_bytes_per_token=2.0 * model.num_hidden_layers * kv_heads * _HEAD_DIM * kv_bytes,
        bytes_per_s=bandwidth * 1e9 * _BANDWIDTH_SHARE,
        flops=tflops * 1e12 * _COMPUTE_SHARE * (2.0 if quantization.startswith("fp8") else 1.0),
        parameters=model.weights_gib * _GIB / 2,
        experts=(model.num_experts or 64) if model.is_moe else 0,
    )
