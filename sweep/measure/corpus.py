"""The text that prompts are made of, as token ids of the served model."""

from __future__ import annotations

import inspect
import json
import urllib.error
import urllib.request
from importlib import import_module

import numpy as np
import numpy.typing as npt

from sweep.engine.failures import FailureCause, LaunchFailure

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]

# No two texts share their first UNIQUE_TOKENS tokens; an engine caches prefixes in blocks of at least that many.
UNIQUE_TOKENS = 8

# Well-known modules of the standard library, as code text beside the prose of the language reference.
_CODE_MODULES = ("argparse", "ast", "asyncio.base_events", "dataclasses", "datetime", "difflib", "doctest", "enum",
                 "inspect", "pathlib", "pickle", "statistics", "tarfile", "typing", "zipfile")  # fmt: skip
_TOKENIZE_CHARACTERS = 50_000
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def corpus_text() -> str:
    """About 1.4 MB of English and Python that every installation has: the language reference and library sources.

    PSF licence. It differs between Python versions, which the checksum of the request set shows.
    """
    topics = import_module("pydoc_data.topics").topics
    prose = [topics[name] for name in sorted(topics)]
    return "\n\n".join([*prose, *(inspect.getsource(import_module(name)) for name in _CODE_MODULES)])


def tokenize_corpus(base_url: str, model: str, text: str | None = None, *, timeout_s: float = 120.0) -> TokenArray:
    """Token ids of the corpus by the served model's own tokenizer (POST /tokenize), without special tokens.

    timeout_s bounds each piece's request. Raises LaunchFailure(first_request_failed) with the server's answer.
    """
    lines = (corpus_text() if text is None else text).splitlines(keepends=True)
    pieces, size = [""], 0
    for line in lines:
        if size + len(line) > _TOKENIZE_CHARACTERS and pieces[-1]:
            pieces.append("")
            size = 0
        pieces[-1] += line
        size += len(line)
    tokens = [t for piece in pieces for t in _tokenize(base_url, model, piece, special=False, timeout_s=timeout_s)]
    return np.asarray(tokens, dtype=np.int32)


def bos_token_id(base_url: str, model: str, *, timeout_s: float = 120.0) -> int | None:
    """The token that the served model's tokenizer puts before a text, or None if it puts none."""
    plain, with_special = (
        _tokenize(base_url, model, "a", special=special, timeout_s=timeout_s) for special in (False, True)
    )
    return with_special[0] if with_special[:1] != plain[:1] else None


def _tokenize(base_url: str, model: str, text: str, *, special: bool, timeout_s: float) -> list[int]:
    body = json.dumps({"model": model, "prompt": text, "add_special_tokens": special}).encode()
    request = urllib.request.Request(f"{base_url}/tokenize", body, {"Content-Type": "application/json"})
    try:
        with _NO_PROXY.open(request, timeout=timeout_s) as response:
            tokens: list[int] = json.load(response)["tokens"]
            return tokens
    except urllib.error.HTTPError as error:
        answer = error.read(500).decode(errors="replace")
        detail = f"/tokenize answered {error.code}: {answer}"
        raise LaunchFailure(FailureCause.first_request_failed, detail) from error
    except (OSError, ValueError, KeyError) as error:
        raise LaunchFailure(FailureCause.first_request_failed, f"/tokenize failed: {error!r}") from error


def unique_starts(corpus: TokenArray) -> IntArray:
    """Positions whose first UNIQUE_TOKENS tokens occur once. A hash collision only loses a position."""
    count = max(len(corpus) - UNIQUE_TOKENS + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(UNIQUE_TOKENS):
        hashes = (hashes + corpus[i : i + count].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    return np.sort(first[counts == 1]).astype(np.int64)


def text_at(corpus: TokenArray, start: int, length: int) -> TokenArray:
    return corpus.take(np.arange(start, start + length), mode="wrap")
