"""A GPU that is not there: how long its steps take, what it holds, where it crashes and what its numerics cost.

Times come from measured kernels where sweep.estimate covers the engine config, else from a roofline. Everything random
follows from the seed, the engine config and the launch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sweep.config import HardwareConfig, ModelConfig, SimulationConfig
from sweep.engine.engine_args import EngineConfig
from sweep.engine.simulated_scheduler import BLOCK_TOKENS, Scheduler, lognormal
from sweep.estimate.kernels import kernel_steps
from sweep.estimate.knobs import NotCovered, Scheduling, scheduling
from sweep.estimate.roofline import roofline
from sweep.estimate.steady import DISPATCH_MS_PER_LAYER, room
from sweep.estimate.steps import Memory, Steps

_LOAD_GIB_PER_S = 1.5
_COMPILE_S = 25.0
_DEFAULT_CONTEXT = 16_384
# A region is what its layout and these have in common. One that sets none of these never crashes.
_LAYOUT = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
_RISKS = ("quantization", "kv_cache_dtype", "attention_backend", "speculative_config", "all2all_backend")
CRASHES = ("startup", "first_request", "load")
# KL divergence to unquantized weights and cache, nats per token, by the first prefix that matches. They add up.
_KL: Mapping[str, tuple[tuple[str, float], ...]] = {
    "kv_cache_dtype": (("auto", 0.0), ("bfloat16", 0.0), ("fp8", 0.008), ("", 0.03)),
    "quantization": (("fp8", 0.004), ("mxfp8", 0.005), ("int8", 0.003), ("", 0.04)),
}
_ENGINE_KL = 0.0005  # between engines of equal numerics, as between compiled and eager
_CANDIDATES = 64
VOCABULARY = 32_000


@dataclass(frozen=True)
class SimulatedEngine:
    """One engine config on the simulated device: what a launch of it is like.

    source: where its times come from, in words. startup_s: until it serves, or until startup_failure (vLLM's own
    words) ends it. crash: when it dies, one of CRASHES, or None.
    """

    source: str
    layers: int
    max_model_len: int
    startup_s: float
    startup_failure: str | None
    crash: str | None
    replicas: tuple[Scheduler, ...] = field(default=(), repr=False)

    @property
    def dispatch_s(self) -> float:
        """CPU time between a request's arrival and its first step."""
        return DISPATCH_MS_PER_LAYER * self.layers / 1e3


def simulate(
    engine: EngineConfig, model: ModelConfig, hardware: HardwareConfig, settings: SimulationConfig, launch: str
) -> SimulatedEngine:
    """Decide everything about one launch. launch: its name, for the part of the noise that differs between launches.

    Raises ConfigError where neither kernel data nor the model's size is known.
    """
    args = engine.nested_args
    limits = scheduling(args, hardware)
    steps, source = _steps(engine, args, model, hardware, settings)
    memory = steps.memory(limits.max_num_batched_tokens)
    max_model_len = limits.max_model_len or _DEFAULT_CONTEXT
    usable_gib = (hardware.memory_gib or 0.0) * limits.gpu_memory_utilization
    fits, cache_gib = room(memory, usable_gib, max_model_len)
    rng = np.random.default_rng(seed_of(settings.seed, launch, engine.hash))
    step_factor = lognormal(rng, settings.tpot_cv)
    extra = math.sqrt(max(settings.ttft_cv**2 - settings.tpot_cv**2, 0.0))
    prefill_factor = lognormal(rng, extra)
    blocks = int(cache_gib / (memory.kv_gib_per_token * BLOCK_TOKENS))
    crash = crash_of(args, settings)
    loaded_s = settings.startup_s + memory.weights_gib / _LOAD_GIB_PER_S
    failure = _out_of_memory(memory, usable_gib, max_model_len, limits) if fits is False else None
    if not limits.chunked_prefill and limits.max_num_batched_tokens < max_model_len:
        failure = (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n"
            f"  Value error, max_num_batched_tokens ({limits.max_num_batched_tokens}) is smaller than max_model_len "
            f"({max_model_len}). This effectively limits the maximum sequence length to max_num_batched_tokens."
        )
    if failure is None and crash == "startup":
        failure = "RuntimeError: Failed to find a kernel that can implement this linear layer (simulated crash region)"
    return SimulatedEngine(
        source=source,
        layers=steps.layers,
        max_model_len=max_model_len,
        startup_s=loaded_s + (0.0 if failure or args.get("enforce_eager") else _COMPILE_S),
        startup_failure=failure,
        crash=crash,
        replicas=tuple(
            Scheduler(steps, limits, blocks, settings.acceptance, rng, step_factor, prefill_factor)
            for _ in range(limits.replicas)
        ),
    )


def _steps(
    engine: EngineConfig,
    args: Mapping[str, Any],
    model: ModelConfig,
    hardware: HardwareConfig,
    settings: SimulationConfig,
) -> tuple[Steps, str]:
    reason = "asked for"
    if settings.times == "auto":
        try:
            return kernel_steps(engine, args, hardware), "measured kernels"
        except NotCovered as error:
            reason = str(error)
    return roofline(model, hardware, args), f"roofline ({reason})"


def _out_of_memory(memory: Memory, usable_gib: float, max_model_len: int, limits: Scheduling) -> str:
    """What vLLM 0.32 and torch print."""
    left, needed = usable_gib - memory.fixed_gib, memory.kv_gib(1, max_model_len)
    if memory.weights_gib >= usable_gib:
        return (
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of "
            f"{usable_gib / limits.gpu_memory_utilization:.2f} GiB of which 1.02 GiB is free."
        )
    if left <= 0:
        return (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine."
        )
    return (
        f"ValueError: To serve at least one request with the model's max seq len ({max_model_len}), ({needed:.2f} GiB "
        f"KV cache is needed, which is larger than the available KV cache memory ({left:.2f} GiB). Try increasing "
        "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
    )


def crash_of(args: Mapping[str, Any], settings: SimulationConfig) -> str | None:
    """Whether the region of this config crashes, and when (one of CRASHES): settings.crash_share of the regions do.

    args: nested engine arguments.
    """
    risks = {name: args.get(name) for name in _RISKS}
    if not any(risks.values()):
        return None
    region = json.dumps([{name: args.get(name) for name in _LAYOUT}, risks], sort_keys=True)
    rng = np.random.default_rng(seed_of(settings.seed, "region", region))
    return str(rng.choice(CRASHES)) if rng.random() < settings.crash_share else None


def expected_kl(args: Mapping[str, Any]) -> float:
    """KL divergence of these numerics from the unquantized engine, in nats per token, as simulated."""
    return sum(_setting_kl(name, args) for name in _KL)


def prompt_logprobs(tokens: Sequence[int], k: int, engine: EngineConfig, seed: int) -> list[dict[int, float]]:
    """For every position but the first: the k likeliest tokens and the prompt's own, with log-probabilities (nats).

    The distribution over a few candidates follows from the prompt; each numerics setting adds normal noise to its
    logits that follows from prompt and setting, with the variance that costs its KL (KL = var (1 - sum p^2) / 2).
    """
    text = hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()
    actual = np.asarray(tokens[1:], np.int64)
    shape = (len(actual), _CANDIDATES)
    rng = np.random.default_rng(seed_of(seed, text))
    logits = 2.0 * rng.standard_normal(shape) - 0.1 * np.arange(_CANDIDATES)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    per_kl = 2.0 / np.maximum(1.0 - (p**2).sum(axis=1, keepdims=True), 0.2)
    args = engine.nested_args
    noises = [(f"{name}={args.get(name)}", _setting_kl(name, args)) for name in _KL] + [(engine.hash, _ENGINE_KL / 2)]
    for what, kl in noises:
        noise = np.random.default_rng(seed_of(seed, text, what)).standard_normal(shape)
        logits = logits + np.sqrt(per_kl * kl) * noise
    peak = logits.max(axis=1, keepdims=True)
    logprobs = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    # Candidates are spread over the vocabulary from the token of the text, whose rank is drawn like the others'.
    places = rng.permuted(np.tile(np.arange(_CANDIDATES), (len(actual), 1)), axis=1)
    ids = (actual[:, None] + VOCABULARY // _CANDIDATES * places) % VOCABULARY
    return [_listed(row_ids, row, int(own), k) for row_ids, row, own in zip(ids, logprobs, actual, strict=True)]


def _listed(ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float64], actual: int, k: int) -> dict[int, float]:
    order = np.argsort(-logprobs)
    own = int(np.flatnonzero(ids == actual)[0])
    chosen = [*order[:k], *([own] if own not in order[:k] else [])]
    return {int(ids[i]): float(logprobs[i]) for i in chosen}


def _setting_kl(name: str, args: Mapping[str, Any]) -> float:
    value = args.get(name)
    return 0.0 if value is None else next(kl for prefix, kl in _KL[name] if str(value).startswith(prefix))


def seed_of(*parts: object) -> int:
    """A seed that follows from anything that can be written down."""
    return int.from_bytes(hashlib.sha256("\n".join(map(str, parts)).encode()).digest()[:8], "big")
