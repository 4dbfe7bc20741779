"""What vLLM made of the arguments it was given: it changes some silently, and a table must show what really ran."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

# Arguments that the resolved configuration holds under another name.
_ELSEWHERE = {
    "kv_cache_dtype": ("cache_config", "cache_dtype"),
    "attention_backend": ("attention_config", "backend"),
    "model": ("model_config", "model"),
}
_SECRET = ("hf_token", "api_key")
_TIMEOUT_S = 60.0
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch_resolved(base_url: str) -> dict[str, Any] | None:
    """The flattened configuration of a running server; None if it does not tell (needs VLLM_SERVER_DEV_MODE=1)."""
    try:
        with _NO_PROXY.open(f"{base_url}/server_info?config_format=json", timeout=_TIMEOUT_S) as answer:
            return flatten(json.load(answer)["vllm_config"])
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def flatten(vllm_config: Mapping[str, Any]) -> dict[str, Any]:
    """`/server_info?config_format=json` as {"cache_config.cache_dtype": "fp8", …}: scalars only, secrets left out."""
    flat: dict[str, Any] = {}
    for section, values in vllm_config.items():
        entries = values.items() if isinstance(values, Mapping) else [("", values)]
        for name, value in entries:
            if name not in _SECRET and isinstance(value, str | int | float | bool | None):
                flat[f"{section}.{name}".rstrip(".")] = value
    return flat


def differences(args: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Arguments whose resolved value is not the one asked for: name -> [asked, resolved].

    args: nested, as in EngineConfig.nested_args. Arguments that the resolved configuration does not hold are not
    judged, nor is "auto", which asks for a choice.
    """
    found: dict[str, list[Any]] = {}
    for name, asked in args.items():
        pairs = asked.items() if isinstance(asked, Mapping) else [("", asked)]
        for key, value in pairs:
            path = f"{name}.{key}" if key else _path(name, resolved)
            if (
                path is None
                or path not in resolved
                or not isinstance(value, str | int | float | bool)
                or value == "auto"
            ):
                continue
            if _plain(resolved[path]) != _plain(value):
                found[f"{name}.{key}".rstrip(".")] = [value, resolved[path]]
    return found


def _path(name: str, resolved: Mapping[str, Any]) -> str | None:
    if name in _ELSEWHERE:
        return ".".join(_ELSEWHERE[name])
    return next((path for path in resolved if path.endswith(f".{name}") and not path.startswith("speculative_")), None)


def _plain(value: Any) -> str:
    """Comparable text: torch.bfloat16 is bfloat16, FLASH_ATTN is flash_attn, 8 is 8.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).lower().removeprefix("torch.")
    return f"{float(value):.12g}"
