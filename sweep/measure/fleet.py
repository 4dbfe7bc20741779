"""The client processes of one load: one as long as one can deliver it, several that share it otherwise.

One process reads some 40,000 to 55,000 chunks per second on time (benchmarks/client_fidelity.py, two busy cores); it is
given half of that: CONCURRENCY_PER_PROCESS streams, or an open loop of TOKENS_PER_S_PER_PROCESS output tokens. A load
beyond that is shared by as many processes as it takes, at most half of the cores this process may use: the engine needs
the rest. Whether they did deliver it is proved afterwards, from the summary.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.arrivals import Load
from sweep.measure.client import Job
from sweep.measure.meeting import Meeting
from sweep.measure.recording import LoadRecord, merge, rows, summary, write
from sweep.measure.requests import RequestSet

CONCURRENCY_PER_PROCESS = 256
TOKENS_PER_S_PER_PROCESS = 25_000.0
# What the clients may take beyond the load itself: starting Python, parsing and writing the rows.
_MARGIN_S = 60.0
_POLL_S = 0.1
_PACKAGE_ROOT = Path(__file__).parents[2]


def processes_for(load: Load, answer_tokens: float, cores: int) -> int:
    """How many client processes a load of answers of that mean length gets, on so many cores."""
    tokens_per_s = (load.request_rate_rps or 0.0) * answer_tokens
    needed = ceil(max((load.concurrency or 0) / CONCURRENCY_PER_PROCESS, tokens_per_s / TOKENS_PER_S_PER_PROCESS))
    return max(1, min(needed, cores // 2))


def run_clients(
    job: Job,
    *,
    processes: int | None = None,
    python: str = sys.executable,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Send a load and leave job.out and its summary, whatever the number of processes (None: see processes_for).

    The job and the clients' output lie beside them, as .job.json and .log. Raises LaunchFailure: load_timeout when a
    client does not end in time, interrupted when should_stop says so, unknown when one dies; none is left running.
    """
    load = Load.from_dict(job.load)
    answer_tokens = float(RequestSet.load(Path(job.requests)).max_tokens.mean())
    wanted = processes or processes_for(load, answer_tokens, len(os.sched_getaffinity(0)))
    job = replace(job, processes=min(wanted, job.num_requests, load.concurrency or wanted))
    out = Path(job.out)
    job_path = out.with_suffix(".job.json")
    job_path.write_text(json.dumps(asdict(job), indent=1))
    if job.processes > 1:
        Meeting.create(job.meeting_path, job.processes)
    try:
        _run(job, job_path, out.with_suffix(".log"), python, should_stop)
        if job.processes > 1:
            _merge(job)
    finally:
        job.meeting_path.unlink(missing_ok=True)
        for rank in range(job.processes):
            job.part_path(rank).unlink(missing_ok=True)


def _run(job: Job, job_path: Path, log_path: Path, python: str, should_stop: Callable[[], bool] | None) -> None:
    limit_s = job.max_load_s + job.request_timeout_s + _MARGIN_S
    began = time.monotonic()
    clients: list[subprocess.Popen[bytes]] = []
    try:
        with log_path.open("ab") as log:
            log.truncate(0)
            for rank in range(job.processes):
                command = [python, "-m", "sweep.measure.client", str(job_path), str(rank)]
                clients.append(
                    subprocess.Popen(command, cwd=_PACKAGE_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )
        while None in (codes := [client.poll() for client in clients]) and not any(codes):
            if should_stop is not None and should_stop():
                raise LaunchFailure(FailureCause.interrupted, "stopped during the load")
            if time.monotonic() - began > limit_s:
                raise LaunchFailure(FailureCause.load_timeout, f"the load client did not end within {limit_s:g} s")
            time.sleep(_POLL_S)
        failed = next((code for code in codes if code), 0)
    finally:
        _kill(clients)
    if failed:
        last = log_path.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise LaunchFailure(FailureCause.unknown, f"the load client exited with {failed}: {last[0]}")


def _kill(clients: Sequence[subprocess.Popen[bytes]]) -> None:
    for client in clients:
        if client.poll() is None:
            client.kill()
            client.wait()


def _merge(job: Job) -> None:
    parts: list[LoadRecord] = [pickle.loads(job.part_path(rank).read_bytes()) for rank in range(job.processes)]
    record = merge(parts)
    table = rows(record, RequestSet.load(Path(job.requests)))
    write(Path(job.out), table, summary(record, table))
