"""Step times from kernels measured on real GPUs. The one module that knows aiconfigurator-core (0.12.0, Apache-2.0).

That package is at the end of its life under this name; whatever follows it replaces this file. Only its declared facade
is used (EngineHandle, estimate_kv_cache), never its `run_agg`: that one caches results without the prefix in the key,
answers from the wrong entry, and is 20 times slower than the steps it is made of.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from sweep.config import HardwareConfig
from sweep.engine.engine_args import EngineConfig
from sweep.estimate.knobs import Checkpoint, KernelKey, NotCovered, checkpoint_facts, hardware_base, kernel_key
from sweep.estimate.steps import Memory

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
INSTALL = "pip install 'sweep-llm[estimate]'"
SYSTEMS = {
    "a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm",
    "gb200": "gb200", "l40s": "l40s",
}  # fmt: skip
# Checkpoints whose config.json equals one that the package brings, under the name it brings it.
_SAME_SHAPE = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
}
_SLOT = "current"  # without it the memory model finds no tables
# How the package reports that it has no data: no common base, and assertions for what does not divide.
_ABSENT = (ValueError, RuntimeError, AssertionError, KeyError, NotImplementedError, OSError)
_GIB = 2**30
# Its allowance for what CUDA and the libraries keep was raised from 0.5 to 3.5 GiB "for safer deployment".
_CAUTION_GIB = 3.0


def is_available() -> bool:
    """Whether the pinned estimator is installed. Another version is none: its answers were not checked."""
    try:
        return version(PACKAGE) == VERSION
    except PackageNotFoundError:
        return False


class KernelSteps:
    """Times of single scheduler steps of one rank, from tables loaded once. Raises NotCovered."""

    def __init__(self, key: KernelKey, checkpoint: Checkpoint) -> None:
        from aiconfigurator_core.sdk import EngineHandle

        self.layers = checkpoint.layers
        self._key = key
        self._options: dict[str, Any] = {
            "backend_version": _SLOT,
            "tp_size": key.tensor,
            "pp_size": key.pipeline,
            "attention_dp_size": key.attention_data,
            "moe_tp_size": key.experts_tensor,
            "moe_ep_size": key.experts_parallel,
            "gemm_quant_mode": key.gemm,
            "moe_quant_mode": key.moe,
            "kvcache_quant_mode": key.kv_cache,
        }
        self._memory: dict[int, Memory] = {}
        try:
            self._handle: Any = EngineHandle.compile(key.checkpoint, key.system, "vllm", **self._options)
            self._handle.decode_step_latency(1, 16, 1)  # what is missing shows at the first use
            self._handle.mixed_step_breakdown(16, 1, 16, 1)
        except _ABSENT as error:
            raise NotCovered(_reason(error)) from error

    def step_ms(
        self, prefill_tokens: int, prompt_tokens: int, cached_tokens: int, decoding: int, queries: int, context: int
    ) -> float:
        """See steps.Steps. Sequences that verify drafts read their cache once, however many tokens they query."""
        try:
            if not prefill_tokens and queries == 1:
                return float(self._handle.decode_step_latency(decoding, context, 1))
            _, shared, prefill, _ = self._handle.mixed_step_breakdown(
                prefill_tokens, decoding * queries, prompt_tokens or context, 1, cached_tokens
            )
            attention = self._handle.mixed_step_breakdown(0, decoding, context, 1)[3] if decoding else 0.0
        except _ABSENT as error:
            raise NotCovered(_reason(error)) from error
        return float(shared + prefill + attention)

    def memory(self, max_num_batched_tokens: int) -> Memory:
        """See steps.Steps."""
        if max_num_batched_tokens not in self._memory:
            self._memory[max_num_batched_tokens] = self._ask_memory(max_num_batched_tokens)
        return self._memory[max_num_batched_tokens]

    def _ask_memory(self, max_num_batched_tokens: int) -> Memory:
        from aiconfigurator_core.sdk import estimate_kv_cache

        def ask(capacity_gib: int) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = estimate_kv_cache(
                self._key.checkpoint,
                self._key.system,
                "vllm",
                **self._options,
                max_num_tokens=max_num_batched_tokens,
                max_batch_size=1,
                memory_fraction_kind="of_total",
                memory_fraction_value=1.0,
                gpu_memory_capacity_bytes_override=capacity_gib * _GIB,
            )
            return answer

        try:
            # Far above any device, so that there is always room: the two answers differ by cache alone.
            small, large = ask(2_000), ask(4_000)
        except _ABSENT as error:
            raise NotCovered(_reason(error)) from error
        tokens = [answer["total_kv_size_tokens"] for answer in (small, large)]
        per_token = (large["total_kv_size_bytes"] - small["total_kv_size_bytes"]) / (tokens[1] - tokens[0])
        per_sequence = small["total_kv_size_bytes"] - per_token * tokens[0]
        return Memory(
            weights_gib=small["memory_breakdown"]["weights_bytes"] / _GIB,
            fixed_gib=(small["total_gpu_capacity_bytes"] - small["total_kv_size_bytes"]) / _GIB,
            caution_gib=_CAUTION_GIB,
            kv_gib_per_token=per_token / _GIB,
            kv_gib_per_sequence=max(per_sequence, 0.0) / _GIB,
        )


def kernel_steps(engine: EngineConfig, args: Mapping[str, Any], hardware: HardwareConfig) -> KernelSteps:
    """The (shared) session for this engine config. args: engine.nested_args. Raises NotCovered with the reason."""
    system = SYSTEMS.get(hardware_base(hardware.name))
    if system is None:
        raise NotCovered(f"no data for hardware {hardware.name}; there are {', '.join(SYSTEMS)}")
    checkpoint = _checkpoint(engine.model)
    if isinstance(checkpoint, str):
        raise NotCovered(checkpoint)
    session = _session(kernel_key(engine, args, checkpoint, system), checkpoint)
    if isinstance(session, str):
        raise NotCovered(session)
    return session


def max_position(model: str) -> int | None:
    """Context length the checkpoint was made for, where its config.json is known."""
    checkpoint = _checkpoint(model)
    return None if isinstance(checkpoint, str) else checkpoint.max_position


@cache
def _session(key: KernelKey, checkpoint: Checkpoint) -> KernelSteps | str:
    try:
        return KernelSteps(key, checkpoint)
    except NotCovered as reason:
        return str(reason)


@cache
def _checkpoint(model: str) -> Checkpoint | str:
    """Facts of a model folder or of a checkpoint that the package brings; else the reason. Asks no hub."""
    if not is_available():
        return f"not available: {INSTALL}"
    logging.getLogger("aiconfigurator_core").setLevel(logging.CRITICAL)  # six warnings for every table it loads
    name = _SAME_SHAPE.get(model, model)
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(str(files("aiconfigurator_core") / "model_configs"))
        stem = f"{name.replace('/', '--')}_"
    else:
        name, stem = str(folder.resolve()), ""
    path = folder / f"{stem}config.json"
    if not path.is_file():
        return f"no config.json of {model}: name a local folder, or one of the models that {PACKAGE} brings"
    config = json.loads(path.read_text())
    quantization = folder / f"{stem}hf_quant_config.json"
    if quantization.is_file():
        config["hf_quant_config"] = json.loads(quantization.read_text())
    try:
        return checkpoint_facts(name, config)
    except (KeyError, TypeError, ValueError) as error:
        return f"the config.json of {model} is not a language model's ({error!r})"


def _reason(error: Exception) -> str:
    """The package's own words without the paths of this machine, on one line."""
    text = " ".join(str(error).split()).removeprefix("perf database error: ")
    words = [word for word in text.split(" ") if "/site-packages/" not in word and not word.startswith("/")]
    return " ".join(words)[:200] or type(error).__name__
