"""Traces: requests that somebody once sent, read from a file. What a file is, is seen from its first line.

azure     CSV with TIMESTAMP, ContextTokens, GeneratedTokens: the Azure LLM inference traces of 2023 and 2024.
mooncake  JSONL with timestamp (ms), input_length, output_length, hash_ids: one id per block of 512 prompt tokens, and
          equal ids mean equal prompts up to the end of that block.
clients   JSONL with one client per line, as in ServeGen (measure/client_mixture.py): requests are drawn from it.
log       the user's own JSONL: timestamp (seconds, or ISO 8601), prompt (text) or prompt_tokens, output_tokens, class,
          conversation; every field is optional, but all lines must have the same ones.

A prompt given as token ids is refused: nobody could say whether it is text, and speculative decoding is measured
wrongly on anything else. Mistakes are one ConfigError that names file, line and field.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sweep.errors import ConfigError, did_you_mean
from sweep.measure.client_mixture import ClientMixture, read_client
from sweep.measure.trace import MOONCAKE_BLOCK_TOKENS, Trace

IntArray = npt.NDArray[np.int64]

SHIPPED = Path(__file__).parent / "traces"
_LOG_FIELDS = ("timestamp", "prompt", "prompt_tokens", "output_tokens", "class", "conversation")
_AZURE_FIELDS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def trace_path(file: str) -> Path:
    """Of a shipped trace by its name, or of the user's own file. Raises ConfigError listing the shipped ones."""
    shipped = {p.stem: p for p in sorted(SHIPPED.iterdir()) if p.suffix in (".csv", ".jsonl")}
    path = shipped.get(file) or Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"workload.trace.file={file} is not a file", f"shipped: {', '.join(shipped)}")
    return path


def trace_checksum(path: Path) -> str:
    """sha256 of the file: two studies replay the same trace only if it is the same."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_trace(path: Path, max_rows: int) -> Trace | ClientMixture:
    """The first max_rows rows of a trace file, or the clients of a mixture. Raises ConfigError."""
    return _read(path, path.stat().st_mtime_ns, max_rows)


@lru_cache(maxsize=4)
def _read(path: Path, modified_ns: int, max_rows: int) -> Trace | ClientMixture:
    with path.open(encoding="utf-8", errors="replace") as f:
        first = f.readline().strip()
    if not first.startswith("{"):
        return _read_azure(path, first, max_rows)
    rows = list(_json_rows(path, max_rows))
    known = rows[0][1]
    if "hash_ids" in known:
        return _read_mooncake(rows)
    if "rate_rps" in known:
        return ClientMixture(tuple(read_client(where, row) for where, row in rows))
    return _read_log(rows)


def _read_azure(path: Path, header: str, max_rows: int) -> Trace:
    names = header.lstrip("\ufeff").split(",")
    if names != _AZURE_FIELDS:
        raise ConfigError(
            f"{path}:1: neither JSON lines nor a CSV with the header {','.join(_AZURE_FIELDS)}",
            "see sweep/measure/trace_files.py for the formats",
        )
    times, prompts, outputs = [], [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as f:
        for number, row in enumerate(csv.reader(f), start=1):
            if number == 1 or not row:
                continue
            where = f"{path}:{number}"
            if len(row) != len(names):
                raise ConfigError(f"{where}: {len(row)} fields instead of {len(names)}", "repair or delete the line")
            times.append(_seconds(where, names[0], row[0]))
            prompts.append(_count(where, names[1], row[1]))
            outputs.append(_count(where, names[2], row[2]))
            if len(times) == max_rows:
                break
    return _in_order(times, Trace(prompt_tokens=np.array(prompts), output_tokens=np.array(outputs)), path)


def _read_mooncake(rows: Sequence[tuple[str, dict[str, Any]]]) -> Trace:
    for where, row in rows:
        needed = -(-_count(where, "input_length", row.get("input_length")) // MOONCAKE_BLOCK_TOKENS)
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not len(ids) == needed > 0 or not all(isinstance(i, int) for i in ids):
            raise ConfigError(
                f"{where}: hash_ids={str(ids)[:60]} where input_length={row['input_length']} has {needed} blocks of"
                f" {MOONCAKE_BLOCK_TOKENS} tokens",
                "give one whole number per block",
            )
    trace = Trace(
        prompt_tokens=_column(rows, "input_length", _count),
        output_tokens=_column(rows, "output_length", _count),
        blocks=tuple(np.array(row["hash_ids"], dtype=np.int64) for _, row in rows),
    )
    times = [_seconds(where, "timestamp", row.get("timestamp")) / 1e3 for where, row in rows]
    return _in_order(times, trace, rows[0][0])


def _read_log(rows: Sequence[tuple[str, dict[str, Any]]]) -> Trace:
    has = set(rows[0][1])
    for where, row in rows:
        for name in row:
            if name not in _LOG_FIELDS:
                raise ConfigError(f"{where}: {name} is unknown", did_you_mean(name, _LOG_FIELDS))
        if missing := has ^ set(row):
            raise ConfigError(
                f"{where}: {', '.join(sorted(missing))} is not in every line", "give every line the same fields"
            )
    prompts = tuple(_text(where, "prompt", row["prompt"]) for where, row in rows) if "prompt" in has else None
    classes = tuple(_text(where, "class", row["class"]) for where, row in rows) if "class" in has else None
    conversations = None
    if "conversation" in has:
        names = [json.dumps(row["conversation"]) for _, row in rows]
        conversations = np.unique(names, return_inverse=True)[1].astype(np.int64)
    trace = Trace(
        prompt_tokens=_column(rows, "prompt_tokens", _count) if "prompt_tokens" in has else None,
        output_tokens=_column(rows, "output_tokens", _count) if "output_tokens" in has else None,
        prompts=prompts,
        classes=classes,
        conversations=conversations,
    )
    if "timestamp" not in has:
        return trace
    return _in_order([_seconds(where, "timestamp", row["timestamp"]) for where, row in rows], trace, rows[0][0])


def _json_rows(path: Path, max_rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", object) of each line that is not empty."""
    count = 0
    with path.open(encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, start=1):
            if not line.strip() or count == max_rows:
                continue
            count += 1
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not JSON ({error})", "repair or delete the line") from error
            if not isinstance(row, dict) or not row:
                raise ConfigError(f"{path}:{number}: not a JSON object with fields", "repair or delete the line")
            yield f"{path}:{number}", row


def _in_order(times_s: list[float], trace: Trace, where: object) -> Trace:
    """Rows sorted by time, which then begins at 0."""
    if not times_s:
        raise ConfigError(f"{where}: no rows", "give at least one request")
    times = np.array(times_s)
    order = np.argsort(times, kind="stable")
    return replace(trace, timestamps_s=times - times.min()).take(order)


def _column(rows: Sequence[tuple[str, dict[str, Any]]], name: str, read: Callable[[str, str, object], int]) -> IntArray:
    return np.array([read(where, name, row.get(name)) for where, row in rows], dtype=np.int64)


def _count(where: str, name: str, value: object) -> int:
    try:
        count = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else -1
    except ValueError:
        count = -1
    if count < 0:
        raise ConfigError(f"{where}: {name}={value!r} is no number of tokens", "give a whole number, 0 or more")
    return count


def _seconds(where: str, name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value):
        return float(value)
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        raise ConfigError(f"{where}: {name}={value!r} is no time", "give seconds, or ISO 8601 text") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _text(where: str, name: str, value: object) -> str:
    if isinstance(value, list):
        raise ConfigError(
            f"{where}: {name} is a list, not text",
            "give the prompt's text: token ids may be random, and speculative decoding is measured wrongly on those",
        )
    if not isinstance(value, str) or not value or _is_broken(value):
        raise ConfigError(f"{where}: {name}={value!r} is not text", "give a text that is not empty")
    return value


def _is_broken(text: str) -> bool:
    """JSON can hold halves of characters that no UTF-8 text has."""
    return any("\ud800" <= character <= "\udfff" for character in text)
