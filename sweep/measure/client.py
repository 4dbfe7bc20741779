"""The load client, a process of its own: `python -m sweep.measure.client JOB.json [RANK]`.

Between its first and its last request it only sends bytes that are ready and notes when bytes arrive, by the kernel's
clock (measure/wire.py); everything is parsed and written afterwards. Every request sent has one row in the Parquet
file, whatever became of it; the JSON file beside it says how honest the client's own clock was. Times are seconds since
the measured window began.

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

Several processes (measure/fleet.py) share one load: process RANK has the slots RANK, RANK + processes, … and every
conversation is dealt, in the order of sending, to the slots in turn (of an open loop: to the processes). Requests, due
times and the end of the warm-up are those one process would have.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from sweep.measure.arrivals import Load, arrivals_s, warmup_arrivals_s
from sweep.measure.meeting import Meeting
from sweep.measure.recording import Exchange, LoadRecord, Phase, rows, summary, write
from sweep.measure.requests import RequestSet
from sweep.measure.wire import Answer, Server

_HEARTBEAT_S = 0.005
# Below vLLM's own 5 s, so that the client never reuses a connection the server is about to close.
_KEEP_ALIVE_S = 2.0
# From the moment the last process is ready to the beginning of the load: enough for all of them to notice.
_START_DELAY_S = 0.05


@dataclass(frozen=True)
class Job:
    """What JOB.json holds. requests: .npz of a RequestSet. load: Load.to_dict(). seed: of the open loop's arrivals.

    temperature: of requests that have none of their own. ignore_eos: answers are exactly as long as asked. out: the
    Parquet file to write; the summary lies beside it with the suffix .json. processes: how many clients share the load;
    if several, each leaves its LoadRecord in part_path instead, for measure.fleet to merge.
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
    processes: int = 1

    @property
    def meeting_path(self) -> Path:
        return Path(self.out).with_suffix(".meeting")

    def part_path(self, rank: int) -> Path:
        return Path(self.out).with_suffix(f".part{rank}")


class LoadRun:
    """One load on one server, or one process's share of it. After `run`, record holds what happened."""

    def __init__(self, job: Job, requests: RequestSet, rank: int = 0) -> None:
        self.job = job
        self.load = load = Load.from_dict(job.load)
        measured = range(min(job.num_requests, requests.num_measured))
        if load.rate_scale is not None and requests.arrivals_s is None:
            raise SystemExit(f"{job.requests} has no arrival times, load {load.label} needs them")
        pool = range(requests.num_measured, len(requests))
        if load.concurrency is not None or load.rate_scale is not None or requests.fixed_warmup:
            warmup = max(job.warmup_requests, requests.fixed_warmup, load.concurrency or 0)
            if warmup > len(pool):
                raise SystemExit(f"{job.requests} holds {len(pool)} warm-up requests, this load needs {warmup}")
            pool = pool[len(pool) - warmup :]
        self.record = LoadRecord(load, job.ignore_eos, planned=len(measured))
        self._requests = requests
        self._warmup, self._measured = pool, measured
        self._server = Server(job.base_url, _KEEP_ALIVE_S)
        # Who waits for whom; a turn whose former one is not part of this load waits for nobody.
        sent = {*pool, *measured}
        after = {} if requests.after is None else {i: int(requests.after[i]) for i in sent}
        self._after = {i: before for i, before in after.items() if before in sent}
        self._over: dict[int, asyncio.Future[float]] = {}
        self._progress = asyncio.Event()
        slots = load.concurrency or job.processes
        self._share = deal((*pool, *measured), self._after, slots, job.processes)[rank]
        self._bodies = {i: self._body(i) for i in (*pool, *measured) if i in self._share}
        self._slots = len(range(rank, load.concurrency or 0, job.processes))
        # An open loop's warm-up lasts until these have ended.
        self._cold = {i for i in pool[: job.warmup_requests] if i in self._share}
        self._meeting = Meeting(job.meeting_path if job.processes > 1 else None, job.processes, rank)
        self._parent = os.getppid()
        self._deadline = 0.0

    def run(self) -> None:
        """Send everything and wait for every answer, error or time-out."""
        gc.collect()
        gc.freeze()
        gc.disable()  # nothing cyclic is made that fast; a collection would stop the clock for milliseconds
        with _real_time() as self.record.clients[0].real_time:
            asyncio.run(self._run())
        gc.enable()
        gc.unfreeze()

    def _body(self, i: int) -> bytes:
        request = self._requests[i]
        body = {
            "model": self.job.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": self.job.temperature if request.temperature is None else request.temperature,
            "ignore_eos": self.job.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return self._server.post("/v1/completions", json.dumps(body).encode())

    async def _run(self) -> None:
        record, loop = self.record, asyncio.get_running_loop()
        self._over = {before: loop.create_future() for before in self._after.values() if before in self._share}
        heartbeat = asyncio.create_task(self._heartbeat())
        record.began, record.began_unix_s = await self._begin()
        cpu = time.process_time()
        self._deadline = record.began + self.job.max_load_s
        await (self._open_loop() if self.load.concurrency is None else self._closed_loop())
        client = record.clients[0]
        client.wall_s, client.cpu_s = perf_counter() - record.began, time.process_time() - cpu
        client.stamped, client.reads = self._server.stamped
        heartbeat.cancel()
        self._server.close()

    async def _begin(self) -> tuple[float, float]:
        """The moment all processes begin, (perf_counter, Unix) seconds."""
        self._meeting.tell("ready", perf_counter())
        while (ready := self._meeting.happened_at("ready")) is None:
            await asyncio.sleep(_HEARTBEAT_S)
        began = ready + (_START_DELAY_S if self.job.processes > 1 else 0.0)
        await _sleep_until(began)
        return began, time.time() - (perf_counter() - began)

    async def _closed_loop(self) -> None:
        queue: list[tuple[int, Phase]] = [(i, "measured") for i in reversed(self._measured) if i in self._share]
        queue += [(i, "warmup") for i in reversed(self._warmup) if i in self._share]  # the next one is the last

        async def slot() -> None:
            free_since = idle_since = perf_counter()
            while queue:
                if perf_counter() > self._deadline:
                    self.record.stopped_by = "max_load_s"
                    break
                ready = next((k for k in range(len(queue) - 1, -1, -1) if self._may_send(queue[k][0])), None)
                if ready is None:
                    self._progress.clear()
                    await self._progress.wait()
                    idle_since = perf_counter()
                else:
                    index, phase = queue.pop(ready)
                    due_at = max(free_since, self._turn_since(index))
                    free_since = idle_since = await self._send(index, phase, due_at)
            if self.record.steady_end is None:
                self.record.steady_end = idle_since

        async with asyncio.TaskGroup() as group:
            for _ in range(self._slots):
                group.create_task(slot())

    async def _open_loop(self) -> None:
        warmup, measured = self._schedule()
        record = self.record
        start = record.began
        if not self._cold:
            self._meeting.tell("warm", start)
        async with asyncio.TaskGroup() as group:

            async def arrive(index: int, phase: Phase, due: float) -> bool:
                if due > self._deadline:
                    record.stopped_by = "max_load_s"
                    return False
                await _sleep_until(due)
                if index in self._share:
                    group.create_task(self._send_in_turn(index, phase, due))
                return True

            for index, offset_s in zip(self._warmup, warmup, strict=True):
                start = record.began + offset_s
                if not await arrive(index, "warmup", start):
                    return
                # By now every process knows whether all were warm before this arrival, so all stop at the same one.
                if not self._requests.fixed_warmup and self._was_warm(start):
                    break
            if self.load.rate_scale is not None:
                start = record.began
            for index, offset_s in zip(self._measured, measured, strict=True):
                if index in self._share:
                    due = start + offset_s
                    if not await arrive(index, "measured", due):
                        return
                    record.arrivals = (record.arrivals or (due, due))[0], due

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

    def _was_warm(self, at: float) -> bool:
        warm = self._meeting.happened_at("warm")
        return warm is not None and warm <= at

    def _may_send(self, index: int) -> bool:
        return index not in self._after or self._over[self._after[index]].done()

    def _turn_since(self, index: int) -> float:
        """When the turn before ended, 0 if there is none: this request is not due earlier."""
        return self._over[self._after[index]].result() if index in self._after else 0.0

    async def _send_in_turn(self, index: int, phase: Phase, due_at: float) -> None:
        if index in self._after:
            due_at = max(due_at, await asyncio.shield(self._over[self._after[index]]))
            if due_at > self._deadline:
                self.record.stopped_by = "max_load_s"
                self._is_over(index, due_at)
                return
        await self._send(index, phase, due_at)

    async def _send(self, index: int, phase: Phase, due_at: float) -> float:
        """Send one request and read its answer to the end. Returns when that was."""
        exchange = Exchange(index, phase, due_at, perf_counter())
        answer = Answer(exchange.reads)
        self.record.exchanges.append(exchange)
        try:
            async with asyncio.timeout(self.job.request_timeout_s):
                await self._server.fetch(self._bodies[index], answer)
            if answer.status != 200:
                text = b"".join(data for _, data in exchange.reads).decode(errors="replace")[:500]
                exchange.status, exchange.error = "error", f"HTTP {answer.status}: {text}"
        except TimeoutError:
            exchange.status, exchange.error = "timeout", f"no end after {self.job.request_timeout_s:g} s"
        except (OSError, ValueError) as error:
            exchange.status, exchange.error = "error", f"{type(error).__name__}: {error}"
        exchange.ended_at = perf_counter() if answer.ended_at is None else answer.ended_at
        self._is_over(index, exchange.ended_at)
        return exchange.ended_at

    def _is_over(self, index: int, at: float) -> None:
        """Nothing more comes of this request: the turn after it may be sent."""
        if index in self._over:
            self._over[index].set_result(at)
            self._progress.set()
        if index in self._cold:
            self._cold.remove(index)
            if not self._cold:
                self._meeting.tell("warm", perf_counter())

    async def _heartbeat(self) -> None:
        """How late the event loop wakes a task: when requests are sent and bytes read, it is as late as that."""
        lags = self.record.clients[0].lags
        while True:
            before = perf_counter()
            await asyncio.sleep(_HEARTBEAT_S)
            now = perf_counter()
            lags.append((now, max(now - before - _HEARTBEAT_S, 0.0)))
            if os.getppid() != self._parent:
                raise SystemExit("the process that asked for this load is gone")


def deal(order: Sequence[int], after: Mapping[int, int], slots: int, processes: int) -> list[set[int]]:
    """Which requests each process sends: conversations, in order of sending, go round the slots, slots the processes.

    after: the turn before each turn that has one.
    """
    shares: list[set[int]] = [set() for _ in range(processes)]
    conversations: dict[int, int] = {}
    for i in order:
        first = i
        while first in after:
            first = after[first]
        slot = conversations.setdefault(first, len(conversations)) % slots
        shares[slot % processes].add(i)
    return shares


@contextmanager
def _real_time() -> Iterator[bool]:
    """Ahead of every ordinary process while the load runs, if that is allowed (root or CAP_SYS_NICE); whether it is.

    An engine on the same cores would otherwise decide when the client may look at its clock. What the client takes is
    the same, and client_cpu_share says how much that was.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, *before)


async def _sleep_until(at: float) -> None:
    while (wait_s := at - perf_counter()) > 0:
        await asyncio.sleep(wait_s)


def main(job_path: Path, rank: int = 0) -> None:
    job = Job(**json.loads(job_path.read_text()))
    requests = RequestSet.load(Path(job.requests))
    run = LoadRun(job, requests, rank)
    run.run()
    if job.processes > 1:
        run.record.parse(requests)
        job.part_path(rank).write_bytes(pickle.dumps(run.record))
        return
    table = rows(run.record, requests)
    write(Path(job.out), table, summary(run.record, table))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
