"""The same questions to the same engine while it is busy: batching must not change the answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from sweep.measure.quality.asking import complete, connect
from sweep.measure.quality.completions import greedy, share_identical
from sweep.measure.quality.divergence import compare
from sweep.measure.quality.logprobs import QualitySpec, score

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sweep.measure.requests import RequestSet


@dataclass(frozen=True)
class UnderLoad:
    """Answers of a busy engine against its own when it was quiet.

    concurrency: requests of the workload kept in flight meanwhile; answered: how many of them it finished. kl: nats per
    token, standard error beside it; max_kl: the tolerance. greedy_identical: share of greedy completions.
    """

    concurrency: int
    answered: int
    kl: float
    kl_se: float | None
    top1_agreement: float
    greedy_identical: float
    max_kl: float

    @property
    def unchanged(self) -> bool:
        """Within the tolerance, while there was a load at all."""
        return self.kl <= self.max_kl and self.answered > 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "unchanged": self.unchanged}


def measure_under_load(
    base_url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    spec: QualitySpec,
    requests: RequestSet,
    *,
    concurrency: int,
    greedy_tokens: int,
    greedy_prompt_tokens: int,
    max_kl: float,
) -> UnderLoad:
    """Score the prompts and complete their beginnings: alone, then with `concurrency` other requests in flight.

    Raises LaunchFailure as measure_logprobs does.
    """

    async def run() -> UnderLoad:
        some = [prompt[:greedy_prompt_tokens] for prompt in prompts]
        async with connect(base_url, spec.request_timeout_s) as session:
            quiet = await score(session, model, prompts, spec)
            alone = await greedy(session, model, some, spec, greedy_tokens)
            async with _background(session, model, requests, concurrency) as answered:
                busy = await score(session, model, prompts, spec)
                among_others = await greedy(session, model, some, spec, greedy_tokens)
                finished = next(answered)
        change = compare(quiet, busy)
        return UnderLoad(
            concurrency=concurrency,
            answered=finished,
            kl=change.quality_kl,
            kl_se=change.quality_kl_se,
            top1_agreement=change.quality_top1_agreement,
            greedy_identical=share_identical(alone, among_others),
            max_kl=max_kl,
        )

    return asyncio.run(run())


@asynccontextmanager
async def _background(
    session: aiohttp.ClientSession, model: str, requests: RequestSet, concurrency: int
) -> AsyncIterator[Iterator[int]]:
    """Keep `concurrency` requests of the workload in flight. next() of what it gives counts those answered so far.

    The load is on when the block begins: the first answer has come. A failure of the load cancels the block.
    """
    order, answered = itertools.cycle(range(len(requests))), itertools.count()
    begun = asyncio.Event()

    async def keep_asking() -> None:
        while True:
            request = requests[next(order)]
            temperature = 0.0 if request.temperature is None else request.temperature
            body = {"model": model, "prompt": request.prompt, "max_tokens": request.max_tokens, "ignore_eos": True}
            await complete(session, {**body, "temperature": temperature})
            next(answered)
            begun.set()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep_asking()) for _ in range(concurrency)]
            await begun.wait()
            yield answered
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904  the others are the same fault, or were cancelled by it
