"""Many completion requests to one server, a few at a time, with failures as causes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from sweep.engine.failures import FailureCause, LaunchFailure

Answer = TypeVar("Answer")
Question = TypeVar("Question")


def connect(base_url: str, timeout_s: float) -> aiohttp.ClientSession:
    """A session without a limit of its own on connections. timeout_s: for one request."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(base_url, timeout=aiohttp.ClientTimeout(total=timeout_s), connector=connector)


async def complete(session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    """The server's answer to one /v1/completions request, as text.

    Raises LaunchFailure: engine_died when the connection breaks, load_timeout, request_errors otherwise.
    """
    try:
        async with session.post("/v1/completions", json=body) as response:
            text = await response.text()
    except TimeoutError as error:
        asked = "prompt_logprobs" if "prompt_logprobs" in body else "completion"
        detail = f"no answer to a {asked} request within {session.timeout.total:g} s"
        raise LaunchFailure(FailureCause.load_timeout, detail) from error
    except aiohttp.ClientError as error:
        raise LaunchFailure(FailureCause.engine_died, f"{type(error).__name__}: {error}") from error
    if response.status != 200:
        died = re.search(r"EngineDead|EngineCore", text) is not None
        cause = FailureCause.engine_died if died else FailureCause.request_errors
        raise LaunchFailure(cause, f"HTTP {response.status}: {' '.join(text.split())[:300]}")
    return text


async def ask_all(
    ask: Callable[[int, Question], Awaitable[Answer]], questions: Sequence[Question], concurrency: int
) -> list[Answer]:
    """ask(index, question) for every question, `concurrency` at a time, in order. Raises the first failure."""
    slots = asyncio.Semaphore(concurrency)

    async def in_turn(index: int, question: Question) -> Answer:
        async with slots:
            return await ask(index, question)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(in_turn(i, question)) for i, question in enumerate(questions)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904  the others are the same fault, or were cancelled by it
    return [task.result() for task in tasks]
