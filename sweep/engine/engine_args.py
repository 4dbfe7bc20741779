"""An engine config: what one vLLM deployment is launched with. Its command line, its identity, its numerics."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.errors import ConfigError

# Arguments that can change an output token, of vLLM 0.32. Everything else (batch limits, parallelism, caching, exact
# speculation, compilation) only changes when a token comes, up to the rounding that the noise floor measures.
NUMERICS_ARGS = (
    # what is computed
    "revision", "code_revision", "tokenizer", "tokenizer_revision", "tokenizer_mode", "hf_config_path", "config_format",
    "hf_overrides", "model_impl", "model_class_overrides", "load_format", "model_loader_extra_config",
    "ignore_patterns", "disable_sliding_window", "chat_template", "default_chat_template_kwargs", "generation_config",
    "override_generation_config", "logits_processors", "logprobs_mode", "diffusion_config", "watermark_config",
    "enable_lora", "lora_modules", "lora_dtype", "lora_target_modules", "additional_config",
    "max_model_len",  # long-context RoPE (Phi-3 and its kin) chooses its factors by it
    # in which precision
    "dtype", "quantization", "quantization_config", "kv_cache_dtype", "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype", "mamba_ssm_cache_dtype", "enable_mamba_cache_stochastic_rounding",
    # by which kernels: some run the same weights with 16-bit activations, others with 8-bit or 4-bit ones
    "attention_backend", "attention_config", "linear_backend", "moe_backend", "kernel_config", "ir_op_priority",
    "mamba_backend", "mamba_ssu_algorithm", "use_replayssm", "sparse_indexer_topk_backend", "gdn_prefill_backend",
    "kda_prefill_backend", "kda_decode_backend",
)  # fmt: skip
# vLLM's defaults of these: saying them changes nothing.
_DEFAULTS: tuple[Any, ...] = ("auto", False, {}, [])
# Environment variables of the same kinds. Rather one measurement of quality too many than a wrong one shared.
NUMERICS_ENV = re.compile(
    r"ATTENTION|_ATTN|MLA_DISABLE|DEEP_GEMM|FP8|FP4|INT4|INT8|MARLIN|HUMMING|TRITON_AWQ|FLASHINFER|AITER|QUANT"
    r"|PRECISION|TF32|CAST_BF16|WNA16|BATCH_INVARIANT|DISABLED_KERNELS|HW_AGNOSTIC|_GDN_|HPC_OPS|OINK_OPS"
    r"|ROUTING_SIMULATION|FORCE_LOAD_FORMAT|MODEL_REDIRECT"
)
# Values of speculative_config.rejection_sample_method that keep the target model's distribution (vLLM's default is
# the first). "synthetic" does not: it accepts drafts at a rate it is told.
EXACT_REJECTION = ("standard", "block")
_SECRET_ARGS = ("api_key", "hf_token")
_SECRET_ENV = re.compile(r"SECRET|(TOKEN|PASSWORD|PASSWD|CREDENTIALS?|_KEY|_KEY_ID)$")


@dataclass(frozen=True)
class EngineConfig:
    """model: checkpoint folder or hub id. args: vLLM's names with underscores. env: on top of our own environment.

    An argument of None is left out; True and False become --flag and --no-flag; a mapping becomes JSON, a list as many
    values; a dotted name is a key of a JSON argument. Raises ConfigError for a secret.
    """

    model: str
    args: Mapping[str, Any]
    env: Mapping[str, str]

    def __post_init__(self) -> None:
        secrets = [f"env.{name}" for name in self.env if _SECRET_ENV.search(name.upper())]
        secrets += [f"args.{name}" for name in self.args if name in _SECRET_ARGS]
        for name in secrets:
            raise ConfigError(
                f"{name} looks like a secret, and everything here is written to disk",
                f"export {name.partition('.')[2].upper()} in your shell instead: the server inherits it",
            )

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "args": dict(self.args), "env": dict(self.env)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConfig:
        return cls(data["model"], dict(data["args"]), dict(data["env"]))

    @property
    def nested_args(self) -> dict[str, Any]:
        """Arguments with dotted names folded into their JSON argument, None dropped, sorted by name.

        A dotted name refines a mapping given as a whole. Raises ConfigError where it meets something else.
        """
        nested: dict[str, Any] = {}
        for name in sorted(self.args, key=lambda name: (name.count("."), name)):
            value = self.args[name]
            if value is None:
                continue
            *path, last = name.split(".")
            inner = nested
            for depth, key in enumerate(path, start=1):
                within = inner.get(key, {})
                if not isinstance(within, Mapping):
                    whole = ".".join(path[:depth])
                    raise ConfigError(f"{name}={value!r} conflicts with {whole}={within!r}", f"drop {whole} or {name}")
                inner[key] = dict(within)
                inner = inner[key]
            inner[last] = value
        return dict(sorted(nested.items()))

    def argv(self) -> list[str]:
        """Arguments after `vllm serve MODEL`. Equal for configurations that mean the same."""
        words = []
        for name, value in self.nested_args.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", *map(_word, value if isinstance(value, list | tuple) else [value])]
        return words

    def serve_command(self) -> str:
        """The exact shell line that starts this deployment."""
        env = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*env, "vllm", "serve", shlex.quote(self.model), *map(shlex.quote, self.argv())])

    @property
    def hash(self) -> str:
        """Identity of the configuration, 12 hex digits: equal for equal command lines."""
        return _digest([self.model, self.argv(), dict(self.env)])

    @property
    def fingerprint(self) -> str:
        """Identity of its numerics, 12 hex digits: equal configurations produce tokens of equal quality."""
        args = self.nested_args
        numerics = {name: args[name] for name in NUMERICS_ARGS if name in args and args[name] not in _DEFAULTS}
        env = {name: value for name, value in self.env.items() if NUMERICS_ENV.search(name)}
        return _digest([self.model, numerics, _lossy(args.get("speculative_config")), env])

    @property
    def claims_exact_speculation(self) -> bool:
        """Whether it speculates in a way that is meant to change no token: its fingerprint ignores the speculation."""
        speculation = self.nested_args.get("speculative_config")
        return speculation is not None and _lossy(speculation) is None

    @property
    def is_local(self) -> bool:
        """Whether every checkpoint it names is a folder here, so that no hub needs to be asked."""
        speculation = self.nested_args.get("speculative_config")
        draft = speculation.get("model") if isinstance(speculation, Mapping) else speculation
        named = (self.model, self.args.get("tokenizer"), self.args.get("hf_config_path"), draft)
        return all(Path(name).is_dir() for name in named if name is not None)


def _lossy(speculation: Any) -> Any:
    """A speculative_config that can change tokens, or None for one that cannot."""
    if isinstance(speculation, Mapping) and speculation.get("rejection_sample_method", "standard") in EXACT_REJECTION:
        return None
    return speculation


def _word(value: Any) -> str:
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping | list | tuple) else str(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
