"""The load client, a process of its own: `python -m sweep.measure.client JOB.json`.

Between its first and its last request it only sends bodies that are ready and notes when bytes arrive; everything is
parsed and written afterwards. Every request sent has one row in the Parquet file, whatever became of it; the JSON file
beside it says how honest the client's own clock was. Times are seconds since the measured window began.

Closed loop: `concurrency` slots each send their next request when the last one ends, first the warm-up, then the
measured requests, without a pause in between. The window runs from the first measured request to the first moment a
slot finds nothing left to send: until then the load is constant, after it the tail drains.
Open loop: requests are sent at their due times, whatever the server does. The warm-up keeps the rate until its first
`warmup_requests` requests have all ended (or its pool is used up); a trace or conversations have a fixed warm-up, the
requests just before the measured ones. The window runs from the first to the last measured arrival. In both, a window
in which fewer than two measured requests ended is widened to the whole measured run.
A turn of a conversation is sent when the turn before it has ended: a free slot takes the next request that may be sent,
an arrival waits (and is due only then: its user is still reading).

No request is sent later than max_load_s after the first (the warm-up counts); each may take request_timeout_s, so the
drain ends at the latest that much later.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import aiohttp
import numpy as np

from sweep.measure.arrivals import Load, arrivals_s, warmup_arrivals_s
from sweep.measure.recording import Phase, Status, rows, summary, write
from sweep.measure.requests import RequestSet

# uvloop if it is there: a little cheaper, but the clock stays honest by doing nothing else while it runs.
new_event_loop: Callable[[], asyncio.AbstractEventLoop] = import_module(
    "uvloop" if find_spec("uvloop") else "asyncio"
).new_event_loop

_HEARTBEAT_S = 0.005
# Below vLLM's own 5 s, so that the client never reuses a connection the server is about to close.
_KEEPALIVE_S = 2.0
_READ_BUFFER_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Job:
    """What JOB.json holds. requests: .npz of a RequestSet. load: Load.to_dict(). seed: of the open loop's arrivals.

    temperature: of requests that have none of their own. ignore_eos: answers are exactly as long as asked. out: the
    Parquet file to write; the summary lies beside it with the suffix .json.
    """

    base_url: str
    model: str
    requests: str
    load: dict[str, Any]
    temperature: float
    num_requests: int
    warmup_requests: int
    max_load_s: float
    request_timeout_s: float
    seed: int
    out: str
    ignore_eos: bool = True


@dataclass
class Exchange:
    """A request and its answer so far; times are perf_counter seconds. reads: (time, bytes) of each socket read."""

    index: int
    phase: Phase
    due_at: float
    sent_at: float
    ended_at: float | None = None
    status: Status = "ok"
    error: str | None = None
    reads: list[tuple[float, bytes]] = field(default_factory=list)


class LoadRun:
    """One load on one server. After `run`, exchanges holds every request in order of sending.

    window: (start, end, rule) of the measured window in perf_counter seconds; None if no measured request was sent.
    lags: (time, seconds) of the heartbeat. stopped_by: what ended the sending.
    """

    event_loop = new_event_loop.__module__.partition(".")[0]

    def __init__(self, job: Job, requests: RequestSet) -> None:
        self.job = job
        self.load = Load.from_dict(job.load)
        self.exchanges: list[Exchange] = []
        self.lags: list[tuple[float, float]] = []
        self.stopped_by: Literal["requests", "max_load_s"] = "requests"
        self.cpu_s = self.wall_s = 0.0
        self.window: tuple[float, float, str] | None = None
        self.began = self.began_unix_s = 0.0
        measured = min(job.num_requests, requests.num_measured)
        if self.load.rate_scale is not None and requests.arrivals_s is None:
            raise SystemExit(f"{job.requests} has no arrival times, load {self.load.label} needs them")
        pool = range(requests.num_measured, len(requests))
        if self.load.concurrency is not None or self.load.rate_scale is not None or requests.fixed_warmup:
            warmup = max(job.warmup_requests, requests.fixed_warmup, self.load.concurrency or 0)
            if warmup > len(pool):
                raise SystemExit(f"{job.requests} holds {len(pool)} warm-up requests, this load needs {warmup}")
            pool = pool[len(pool) - warmup :]
        self.planned = measured
        self._requests = requests
        self._warmup, self._measured = pool, range(measured)
        self._bodies = {i: self._body(requests, i) for i in (*self._warmup, *self._measured)}
        self._parent = os.getppid()
        self._steady_end: float | None = None
        self._arrivals: tuple[float, float] | None = None
        self._deadline = 0.0
        # Who waits for whom; a turn whose former one is not part of this load waits for nobody.
        after = {} if requests.after is None else {i: int(requests.after[i]) for i in self._bodies}
        self._after = {i: before for i, before in after.items() if before in self._bodies}
        self._ended: dict[int, asyncio.Event] = {before: asyncio.Event() for before in self._after.values()}
        self._progress = asyncio.Event()

    def run(self) -> None:
        """Send everything and wait for every answer, error or time-out."""
        gc.collect()
        gc.freeze()
        gc.disable()  # nothing cyclic is made that fast; a collection would stop the clock for milliseconds
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._run())
        gc.enable()
        gc.unfreeze()
        self.window = self._window()

    @property
    def measured(self) -> list[Exchange]:
        return [e for e in self.exchanges if e.phase == "measured"]

    def _window(self) -> tuple[float, float, str] | None:
        measured = self.measured
        if not measured:
            return None
        ends = [e.ended_at for e in measured if e.ended_at is not None]
        if self.load.concurrency is not None:
            start, end, rule = measured[0].sent_at, self._steady_end or max(ends), "steady"
        else:
            assert self._arrivals is not None
            (start, end), rule = self._arrivals, "arrivals"
        if sum(ended_at <= end for ended_at in ends) < 2:
            end, rule = max(ends), "whole_run"
        return start, end, rule

    def _body(self, requests: RequestSet, i: int) -> bytes:
        request = requests[i]
        return json.dumps(
            {
                "model": self.job.model,
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": self.job.temperature if request.temperature is None else request.temperature,
                "ignore_eos": self.job.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        ).encode()

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_READ_BUFFER_BYTES,
            headers={"Content-Type": "application/json"},
        ) as self._session:
            heartbeat = asyncio.create_task(self._heartbeat())
            self.began, self.began_unix_s, cpu = perf_counter(), time.time(), time.process_time()
            self._deadline = self.began + self.job.max_load_s
            await (self._open_loop() if self.load.concurrency is None else self._closed_loop())
            self.wall_s, self.cpu_s = perf_counter() - self.began, time.process_time() - cpu
            heartbeat.cancel()

    async def _closed_loop(self) -> None:
        assert self.load.concurrency is not None
        queue: list[tuple[int, Phase]] = [(i, "measured") for i in reversed(self._measured)]
        queue += [(i, "warmup") for i in reversed(self._warmup)]  # the next one is the last

        async def slot() -> None:
            free_since = perf_counter()
            while queue:
                if perf_counter() > self._deadline:
                    self.stopped_by = "max_load_s"
                    break
                ready = next((k for k in range(len(queue) - 1, -1, -1) if self._may_send(queue[k][0])), None)
                if ready is None:
                    self._progress.clear()
                    await self._progress.wait()
                    free_since = perf_counter()
                else:
                    free_since = await self._send(*queue.pop(ready), due_at=free_since)
            if self._steady_end is None:
                self._steady_end = perf_counter()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.concurrency):
                group.create_task(slot())

    async def _open_loop(self) -> None:
        warmup, measured = self._schedule()
        start = self.began
        async with asyncio.TaskGroup() as group:

            async def arrive(index: int, phase: Phase, due: float) -> bool:
                if due > self._deadline:
                    self.stopped_by = "max_load_s"
                    return False
                while (wait_s := due - perf_counter()) > 0:  # uvloop's timer may wake up to a millisecond early
                    await asyncio.sleep(wait_s)
                group.create_task(self._send_in_turn(index, phase, due))
                return True

            for index, offset_s in zip(self._warmup, warmup, strict=True):
                if not self._requests.fixed_warmup and self._is_warm():
                    break
                due = self.began + offset_s
                if not await arrive(index, "warmup", due):
                    return
                start = due
            if self.load.rate_scale is not None:
                start = self.began
            for index, offset_s in zip(self._measured, measured, strict=True):
                due = start + offset_s
                if not await arrive(index, "measured", due):
                    return
                self._arrivals = (self._arrivals or (due, due))[0], due

    def _schedule(self) -> tuple[list[float], list[float]]:
        """Arrivals of warm-up (seconds after the load began) and measured requests (after the last warm-up arrival).

        In a replay both count from the beginning of the load.
        """
        if self.load.rate_scale is not None:
            assert self._requests.arrivals_s is not None
            offsets = self._requests.arrivals_s / self.load.rate_scale
            offsets = offsets - offsets[[*self._warmup, *self._measured]].min()
            return offsets[list(self._warmup)].tolist(), offsets[list(self._measured)].tolist()
        rng = np.random.default_rng(self.job.seed)
        measured = arrivals_s(self.load, len(self._measured), rng)
        return warmup_arrivals_s(self.load, len(self._warmup), rng).tolist(), measured.tolist()

    def _may_send(self, index: int) -> bool:
        return index not in self._after or self._ended[self._after[index]].is_set()

    async def _send_in_turn(self, index: int, phase: Phase, due_at: float) -> None:
        if not self._may_send(index):
            await self._ended[self._after[index]].wait()
            due_at = perf_counter()
            if due_at > self._deadline:
                self.stopped_by = "max_load_s"
                self._over(index)
                return
        await self._send(index, phase, due_at)

    def _is_warm(self) -> bool:
        first = self.exchanges[: self.job.warmup_requests]
        return len(first) == self.job.warmup_requests and all(e.ended_at is not None for e in first)

    async def _send(self, index: int, phase: Phase, due_at: float) -> float:
        """Send one request and read its answer to the end. Returns when that was."""
        body = self._bodies[index]
        exchange = Exchange(index, phase, due_at, perf_counter())
        self.exchanges.append(exchange)
        try:
            async with (
                asyncio.timeout(self.job.request_timeout_s),
                self._session.post(f"{self.job.base_url}/v1/completions", data=body) as response,
            ):
                if response.status == 200:
                    async for data in response.content.iter_any():
                        exchange.reads.append((perf_counter(), data))
                else:
                    text = (await response.text(errors="replace"))[:500]
                    exchange.status, exchange.error = "error", f"HTTP {response.status}: {text}"
        except TimeoutError:
            exchange.status, exchange.error = "timeout", f"no end after {self.job.request_timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            exchange.status, exchange.error = "error", f"{type(error).__name__}: {error}"
        exchange.ended_at = perf_counter()
        self._over(index)
        return exchange.ended_at

    def _over(self, index: int) -> None:
        """Nothing more comes of this request: the turn after it may be sent."""
        if index in self._ended:
            self._ended[index].set()
            self._progress.set()

    async def _heartbeat(self) -> None:
        """How late the event loop wakes a task: what a time stamp taken in it may be wrong by."""
        while True:
            before = perf_counter()
            await asyncio.sleep(_HEARTBEAT_S)
            now = perf_counter()
            self.lags.append((now, max(now - before - _HEARTBEAT_S, 0.0)))
            if os.getppid() != self._parent:
                raise SystemExit("the process that asked for this load is gone")


def main(job_path: Path) -> None:
    job = Job(**json.loads(job_path.read_text()))
    requests = RequestSet.load(Path(job.requests))
    run = LoadRun(job, requests)
    run.run()
    table = rows(run, requests)
    write(Path(job.out), table, summary(run, table))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
