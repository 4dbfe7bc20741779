"""Which settings belong together: engine arguments grouped into techniques, and configs that are one knob apart.

A *technique* is what an engineer decides about ("prefix caching"); a *knob* is what is turned in one move. Most knobs
are single arguments. The arguments of TIED techniques mean nothing alone (a speculative method and its number of
tokens, a format and the checkpoint that has it), so together they are one knob. An argument that is in no group is a
technique of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sweep.decide.wording import setting_items
from sweep.errors import ConfigError, did_you_mean
from sweep.results.points import OperatingPoint, cell, settings

# Names of vLLM 0.32; an argument with dots ("speculative_config.method") belongs where its first part does.
TECHNIQUES: Mapping[str, tuple[str, ...]] = {
    "parallelism": (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_backend",
        "enable_expert_parallel", "prefill_context_parallel_size", "decode_context_parallel_size",
    ),
    "weights": ("model", "revision", "quantization", "quantization_config", "dtype", "load_format", "hf_overrides"),
    "kv_cache": ("kv_cache_dtype", "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    "speculation": ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
    "prefix_caching": ("enable_prefix_caching", "prefix_caching_hash_algo", "prefix_cache_retention_interval"),
    "batch_limits": ("max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_active_seqs"),
    "chunked_prefill": (
        "enable_chunked_prefill", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    ),
    "scheduling": ("scheduling_policy", "scheduler_cls", "async_scheduling", "stream_interval"),
    "cache_size": (
        "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size", "max_model_len",
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    "offloading": ("cpu_offload_gb", "offload_backend", "kv_offloading_size", "kv_offloading_backend"),
    "attention": ("attention_backend", "attention_config", "disable_cascade_attn", "VLLM_ATTENTION_BACKEND"),
    "compilation": (
        "enforce_eager", "compilation_config", "optimization_level", "performance_mode", "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
    ),
    "experts": ("all2all_backend", "moe_backend", "enable_eplb", "eplb_config", "expert_placement_strategy"),
    "overlap": ("enable_dbo", "ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
}  # fmt: skip
TIED = ("parallelism", "weights", "kv_cache", "speculation")
_TECHNIQUE_OF = {argument: technique for technique, arguments in TECHNIQUES.items() for argument in arguments}

# The settings of one knob, in order; empty: left to vLLM.
Value = tuple[tuple[str, Any], ...]
DEFAULT: Value = ()


def short_name(setting: str) -> str:
    """A setting's name as people type it, without args. and env."""
    return setting.removeprefix("args.").removeprefix("env.")


@cache
def technique_of(setting: str) -> str:
    """The technique of a setting ("args.kv_cache_dtype") or a knob ("max_num_seqs")."""
    name = short_name(setting)
    if name in TECHNIQUES:
        return name
    return _TECHNIQUE_OF.get(name) or _TECHNIQUE_OF.get(name.partition(".")[0]) or name.partition(".")[0]


@cache
def knob_of(setting: str) -> str:
    """The knob that turns a setting."""
    technique = technique_of(setting)
    return technique if technique in TIED else short_name(setting)


def knob_values(point: OperatingPoint) -> dict[str, Value]:
    """Knob -> its settings at this point; knobs left to vLLM are absent."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for name, value in settings(point.engine).items():
        found.setdefault(knob_of(name), []).append((name, cell(value)))
    return {knob: tuple(items) for knob, items in found.items()}


def differing(value: Value, other: Value) -> Value:
    """The settings of `value` that `other` does not share."""
    return tuple(item for item in value if item not in other)


def value_words(value: Value) -> str:
    """For people: "quantization=fp8", or that it is left to vLLM."""
    return " ".join(setting_items(dict(value))) or "vLLM's default"


def level_words(knob: str, value: Value, base: Value) -> str:
    """What a value of a knob sets that the baseline's does not; that it is left to vLLM, where it sets nothing."""
    own = differing(value, base)
    return value_words(own) if own else f"{short_name(knob)} left to vLLM"


@dataclass(frozen=True)
class Pair:
    """Two points at one load whose configs differ in one knob only: `after` has the knob at another value."""

    knob: str
    before: OperatingPoint
    after: OperatingPoint
    before_value: Value
    after_value: Value


class Knobs:
    """The points of a study by what was turned. baseline: what vLLM's defaults have (else what most points have)."""

    def __init__(self, points: Sequence[OperatingPoint]) -> None:
        self.points = list(points)
        self.values = [knob_values(p) for p in self.points]
        names = sorted({name for values in self.values for name in values})
        levels = {name: {values.get(name, DEFAULT) for values in self.values} for name in names}
        self.varying = tuple(name for name in names if len(levels[name]) > 1)
        defaults = [v for p, v in zip(self.points, self.values, strict=True) if p.purpose == "baseline"]
        self.baseline = {name: self._usual(name, defaults[:1] or self.values) for name in self.varying}

    @staticmethod
    def _usual(name: str, values: Sequence[Mapping[str, Value]]) -> Value:
        seen = [v.get(name, DEFAULT) for v in values]
        return max(dict.fromkeys(seen), key=seen.count, default=DEFAULT)

    def value(self, index: int, knob: str) -> Value:
        """The value of a knob at a point."""
        return self.values[index].get(knob, DEFAULT)

    def levels(self, knob: str) -> list[Value]:
        """Every value of a knob, the baseline's first, then in order."""
        seen = {self.value(i, knob) for i in range(len(self.points))}
        return sorted(seen, key=lambda v: (v != self.baseline[knob], _order(v)))

    def lines(self, knob: str) -> Iterator[list[tuple[Value, OperatingPoint]]]:
        """Points that differ in nothing but this knob, at one load, in order of its value; two or more of them."""
        groups: dict[tuple[Any, ...], list[tuple[Value, OperatingPoint]]] = {}
        for p, values in zip(self.points, self.values, strict=True):
            rest = frozenset((k, v) for k, v in values.items() if k != knob)
            key = (p.load_label, p.provenance, rest)
            groups.setdefault(key, []).append((values.get(knob, DEFAULT), p))
        for group in groups.values():
            if len(group) > 1:
                yield sorted(group, key=lambda item: _order(item[0]))

    def pairs(self, knob: str) -> list[Pair]:
        """Every pair from the baseline's value of the knob to another one."""
        return [
            Pair(knob, before, after, low, high)
            for line in self.lines(knob)
            for low, before in line
            for high, after in line
            if low == self.baseline[knob] and high != low
        ]

    def chosen(self, name: str | None) -> tuple[str, ...]:
        """The varying knobs of one technique, knob or argument; all for None. Raises ConfigError for none such."""
        if name is None:
            return self.varying
        asked = short_name(name)
        found = tuple(k for k in self.varying if asked in (technique_of(k), k) or knob_of(asked) == k)
        if not found:
            known = sorted({*self.varying, *(technique_of(k) for k in self.varying)})
            hint = did_you_mean(asked, known) if known else "every config has the same settings"
            raise ConfigError(f"nothing in this study varies '{name}'", hint)
        return found


def configs(points: Iterable[OperatingPoint]) -> int:
    """How many engine configs these points have."""
    return len({p.config_hash for p in points})


def _order(value: Value) -> list[tuple[str, float, str]]:
    """Numbers by size, words by letter; a knob left to vLLM first."""
    return [
        (name, float(v), "") if isinstance(v, int | float) and not isinstance(v, bool) else (name, 0.0, str(v))
        for name, v in value
    ]
