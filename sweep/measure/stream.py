"""From the raw reads of one streamed completion to its token times. Runs after the load, never during it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TokenStream:
    """Token times of one request. chunk_times_s, chunk_tokens: one entry for each chunk that carried tokens.

    prompt_tokens, output_tokens: the server's own count, None if it never told. stopped: the model ended its answer by
    itself. error: why the stream is not a complete answer, None if it is.
    """

    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    stopped: bool = False
    error: str | None = None


def read_stream(reads: Iterable[tuple[float, bytes]], asked_tokens: int, *, may_stop: bool = False) -> TokenStream:
    """Token times from (time, bytes) socket reads of a server-sent-event stream of /v1/completions.

    An event happened at the read that completed its line. Tokens are counted from the usage in every event
    (stream_options.continuous_usage_stats), so a chunk of several tokens counts as several, one whose text is still
    empty (half a character) as its tokens, and a role chunk or a keep-alive as none. A stream that breaks off, reports
    an error, or holds another number of tokens than asked is an error; with may_stop the model may stop before.
    """
    result = TokenStream()
    finished = False
    try:
        for time_s, data in _events(reads):
            if data == b"[DONE]":
                finished = True
                continue
            event = json.loads(data)
            if event.get("error"):
                error = event["error"]
                result.error = str(error.get("message", error) if isinstance(error, dict) else error)
            elif event.get("usage"):
                _count(result, time_s, event)
                result.stopped |= any(choice.get("finish_reason") == "stop" for choice in event.get("choices") or ())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        result.error = f"not a completion stream ({error!r})"
    if result.error is None:
        counted = sum(result.chunk_tokens)
        if not finished:
            result.error = f"the stream broke off after {counted} tokens"
        elif counted != (result.output_tokens or 0):
            result.error = "the server ignored stream_options.continuous_usage_stats: tokens per chunk are unknown"
        elif counted != asked_tokens and not (may_stop and result.stopped and 0 < counted < asked_tokens):
            result.error = f"asked for {asked_tokens} tokens, got {counted}"
    return result


def _count(result: TokenStream, time_s: float, event: dict[str, Any]) -> None:
    usage = event["usage"]
    new = usage["completion_tokens"] - (result.output_tokens or 0)
    result.prompt_tokens = usage["prompt_tokens"]
    result.output_tokens = usage["completion_tokens"]
    if new > 0 and event.get("choices"):  # the closing usage event has no choices: its tokens came before
        result.chunk_times_s.append(time_s)
        result.chunk_tokens.append(new)


def _events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each event with the time its line was complete."""
    rest = b""
    for time_s, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time_s, line[5:].strip()
