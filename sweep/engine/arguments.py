"""Which arguments the installed vLLM knows: its own parser is asked, once per installation."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.errors import ConfigError, did_you_mean

_PROBE = Path(__file__).with_name("parser_probe.py")
_PROBE_TIMEOUT_S = 180.0
# Finding the package without importing it takes milliseconds; importing vLLM takes seconds.
# A mere folder of that name is no package and has no origin.
_LOCATE = "import importlib.util as u; s = u.find_spec('vllm'); print(s and s.origin or '')"


def known_arguments(python: str, cache_dir: Path) -> dict[str, Any] | None:
    """{"version": str, "arguments": {name: {"flags", "choices", "type", "is_bool"}}}; None without vLLM there.

    Raises ConfigError when the interpreter does not run or its vLLM does not import.
    """
    try:
        located = _run([python, "-c", _LOCATE], timeout_s=60.0)
        located.check_returncode()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.python={python} does not run: {error}", "name a Python interpreter") from error
    origin = located.stdout.strip()
    if not origin:
        return None
    version_file = Path(origin).with_name("_version.py")
    stamp = (version_file if version_file.exists() else Path(origin)).stat().st_mtime_ns
    key = hashlib.sha256(f"{python}\n{origin}\n{stamp}\n{_PROBE.read_text()}".encode()).hexdigest()[:16]
    cached = cache_dir / "arguments" / f"{key}.json"
    if cached.exists():
        known: dict[str, Any] = json.loads(cached.read_text())
        return known
    known = _probe(python)
    cached.parent.mkdir(parents=True, exist_ok=True)
    temporary = cached.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(known))
    temporary.replace(cached)
    return known


def _probe(python: str) -> dict[str, Any]:
    command = [python, str(_PROBE)]
    try:
        result = _run(command, timeout_s=_PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the vLLM of engine.python={python} did not import within {_PROBE_TIMEOUT_S:.0f} s",
            f"see what holds up: {shlex.join(command)}",
        ) from error
    line = next((x for x in result.stdout.splitlines() if x.startswith("SWEEP_PROBE ")), None)
    if line is None:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"the vLLM of engine.python={python} does not import: {last}", "repair that environment")
    probed: dict[str, Any] = json.loads(line.removeprefix("SWEEP_PROBE "))
    return probed


def _run(command: list[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONSAFEPATH": "1"}  # neither a module of ours nor of the working directory's is imported
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)


def check_arguments(args: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """One line for each argument this vLLM does not have, or whose value its parser would refuse."""
    problems = []
    for name, value in args.items():
        head, *keys = name.split(".")
        if head not in known:
            problems.append(
                f"no argument '{head}' ({did_you_mean(head, known)})" if _near(head, known) else f"no argument '{head}'"
            )
            continue
        argument = known[head]
        if keys or value is None or isinstance(value, dict | list):
            continue
        if isinstance(value, bool) != argument["is_bool"]:
            problems.append(f"{name}={value}: takes {'true or false' if argument['is_bool'] else 'a value'}")
        elif value is False and not any(flag.startswith("--no-") for flag in argument["flags"]):
            problems.append(f"{name}={value}: can only be set to true, or left out with null")
        elif not _converts(value, argument["type"]):
            problems.append(f"{name}={value}: takes {argument['type']}")
        elif argument["choices"] is not None and str(value) not in argument["choices"]:
            problems.append(f"{name}={value}: not among {', '.join(argument['choices'])}")
    return problems


def _near(name: str, known: Mapping[str, Any]) -> bool:
    return did_you_mean(name, known).startswith("did you mean")


def _converts(value: Any, kind: str | None) -> bool:
    """Whether the parser's own conversion accepts a value; kinds that are vLLM's own are left to it."""
    convert = {"int": int, "float": float}.get(kind or "")
    try:
        return convert is None or convert(str(value)) is not None
    except ValueError:
        return False
