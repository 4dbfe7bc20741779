"""An engine config: what one vLLM deployment is launched with. Its command line, its identity, its numerics."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweep.errors import ConfigError

# Settings that can change an output token. Everything else (batch limits, parallelism, caching, exact speculation)
# only changes when a token comes.
NUMERICS_ARGS = (
    "revision", "tokenizer", "tokenizer_revision", "dtype", "quantization", "hf_overrides", "load_format",
    "kv_cache_dtype", "calculate_kv_scales", "attention_backend", "attention_config", "chat_template",
    "rope_scaling", "rope_theta", "enable_lora", "override_generation_config", "logits_processors",
    "mamba_cache_dtype", "mamba_ssm_cache_dtype",
)  # fmt: skip
NUMERICS_ENV = re.compile(r"ATTENTION_BACKEND|DEEP_GEMM|FP8|NVFP4|MXFP4|MARLIN|FLASHINFER|ALLOW_TF32|BATCH_INVARIANT")
# Keys of speculative_config whose presence makes acceptance inexact.
LOSSY_SPECULATION = ("rejection_sample_method", "acceptance_method", "posterior_threshold", "posterior_alpha")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY|CREDENTIAL")


@dataclass(frozen=True)
class EngineConfig:
    """model: checkpoint folder or hub id. args: vLLM's names with underscores. env: on top of our own environment.

    An argument of None is left out; True and False become --flag and --no-flag; dicts and lists become JSON; a dotted
    name is a key of a JSON argument. Raises ConfigError for a secret in env.
    """

    model: str
    args: Mapping[str, Any]
    env: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in self.env:
            if _SECRET.search(name.upper()):
                raise ConfigError(
                    f"env.{name} looks like a secret, and everything here is written to disk",
                    f"export {name} in your shell instead: the server inherits it",
                )

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "args": dict(self.args), "env": dict(self.env)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConfig:
        return cls(data["model"], dict(data["args"]), dict(data["env"]))

    @property
    def nested_args(self) -> dict[str, Any]:
        """Arguments with dotted names folded into their JSON argument, None dropped, sorted by name."""
        nested: dict[str, Any] = {}
        for name, value in self.args.items():
            head, *keys = name.split(".")
            if value is None:
                continue
            if not keys:
                nested[head] = {**nested[head], **value} if isinstance(nested.get(head), dict) else value
                continue
            inner = nested.setdefault(head, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{name}={value!r} conflicts with {head}={inner!r}", f"give {head} as a mapping")
            inner = nested[head] = dict(inner)
            for key in keys[:-1]:
                inner[key] = dict(inner.get(key, {}))
                inner = inner[key]
            inner[keys[-1]] = value
        return dict(sorted(nested.items()))

    def argv(self) -> list[str]:
        """Arguments after `vllm serve MODEL`."""
        words = []
        for name, value in self.nested_args.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                text = json.dumps(value) if isinstance(value, dict | list) else str(value)
                words += [f"--{flag}", text]
        return words

    def serve_command(self) -> str:
        """The exact shell line that starts this deployment."""
        env = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*env, "vllm", "serve", shlex.quote(self.model), *map(shlex.quote, self.argv())])

    @property
    def hash(self) -> str:
        """Identity of the configuration, 12 hex digits: equal for equal command lines."""
        return _digest([self.model, self.nested_args, dict(self.env)])

    @property
    def fingerprint(self) -> str:
        """Identity of its numerics, 12 hex digits: equal configurations produce tokens of equal quality."""
        args = self.nested_args
        speculation = args.get("speculative_config") or {}
        lossy = (
            {k: v for k, v in speculation.items() if k in LOSSY_SPECULATION} if isinstance(speculation, dict) else {}
        )
        numerics = {name: args[name] for name in NUMERICS_ARGS if name in args}
        env = {name: value for name, value in self.env.items() if NUMERICS_ENV.search(name)}
        return _digest([self.model, numerics, lossy, env])

    @property
    def devices(self) -> int:
        """tensor x pipeline x data parallel."""
        sizes = [int(self.args.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline", "data")]
        return sizes[0] * sizes[1] * sizes[2]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
