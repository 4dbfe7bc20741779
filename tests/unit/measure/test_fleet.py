"""One load shared by several client processes is the load one process would have sent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.arrivals import Load
from sweep.measure.client import Job, deal
from sweep.measure.fleet import CONCURRENCY_PER_PROCESS, TOKENS_PER_S_PER_PROCESS, processes_for, run_clients
from sweep.measure.meeting import Meeting
from sweep.measure.requests import RequestSet

OK, _, _, HANGS = range(4)


def job(server: Any, folder: Path, requests: RequestSet, load: Load, **changes: Any) -> Job:
    requests.save(folder / "set.npz")
    values: dict[str, Any] = {
        "base_url": server.base_url, "model": "m", "requests": str(folder / "set.npz"), "load": load.to_dict(),
        "temperature": 0.0, "num_requests": requests.num_measured, "warmup_requests": 2, "max_load_s": 30.0,
        "request_timeout_s": 10.0, "seed": 3, "out": str(folder / "out.parquet"),
    }  # fmt: skip
    return Job(**(values | changes))


def left(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    files = ["out.job.json", "out.json", "out.log", "out.parquet", "set.npz"]
    assert sorted(path.name for path in folder.iterdir()) == files
    return pq.read_table(folder / "out.parquet").to_pylist(), json.loads((folder / "out.json").read_text())


def test_small_loads_have_one_process_and_large_ones_as_many_as_they_need() -> None:
    most, rate = CONCURRENCY_PER_PROCESS, TOKENS_PER_S_PER_PROCESS
    assert processes_for(Load(1), 100.0, 64) == processes_for(Load(most), 100.0, 64) == 1
    assert processes_for(Load(most + 1), 100.0, 64) == 2
    assert processes_for(Load(None, rate / 100), 100.0, 64) == 1
    assert processes_for(Load(None, 2.5 * rate / 100), 100.0, 64) == 3
    assert processes_for(Load(most * 100), 100.0, 64) == 32  # the engine needs cores too
    assert processes_for(Load(most * 100), 100.0, 2) == processes_for(Load(most * 100), 100.0, 1) == 1


@given(st.integers(1, 8), st.integers(1, 16), st.lists(st.integers(0, 30), max_size=60))
def test_every_request_has_one_process_and_a_conversation_the_same(
    processes: int, slots: int, before: list[int]
) -> None:
    """before[i] < i: the turn before turn i; otherwise i begins a conversation."""
    order = list(range(len(before)))
    after = {i: b for i, b in enumerate(before) if b < i}
    shares = deal(order, after, slots, processes)
    assert sorted(i for share in shares for i in share) == order
    for share in shares:
        assert all(after[i] in share for i in share if i in after)
    whole = deal(order, {}, slots, processes)
    by_slot = [
        sum(len(range(s, len(order), slots)) for s in range(rank, slots, processes)) for rank in range(processes)
    ]
    assert [len(share) for share in whole] == by_slot  # a process with more slots has as many more requests


def test_a_closed_loop_of_several_processes_sends_what_one_does(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path
) -> None:
    scripted_server.first_s = 0.05
    requests = scripted_requests([OK] * 20, warmup=8)
    run_clients(job(scripted_server, tmp_path, requests, Load(5)), processes=3)
    table, summary = left(tmp_path)
    assert summary["processes"] == 3 and summary["counts"]["ok"] == 20 and summary["counts"]["warmup"] == 5
    assert sorted(row["index"] for row in table) == [*range(20), *range(23, 28)]
    assert [row["sent_s"] for row in table] == sorted(row["sent_s"] for row in table)
    assert scripted_server.in_flight_max == 5
    assert summary["window_rule"] == "steady"
    # The window ends when the first slot of any process is idle; until then all are busy.
    assert summary["concurrency_offered"] == pytest.approx(5, rel=0.02)
    assert summary["concurrency_mean"] <= summary["concurrency_offered"]
    zero = min(row["sent_s"] for row in table if row["phase"] == "measured")
    assert zero == 0.0


@pytest.mark.parametrize("load", [Load(None, 100.0), Load(None, 9.0, rate_scale=2.0)], ids=lambda load: load.label)
def test_an_open_loop_of_several_processes_has_the_arrivals_of_one(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path, load: Load
) -> None:
    scripted_server.first_s = 0.2
    requests = scripted_requests([OK] * 40, warmup=200)
    if load.rate_scale is not None:
        times = np.r_[np.arange(40) * 0.03, -6.0 + np.arange(200) * 0.03]
        requests = replace(requests, arrivals_s=times, fixed_warmup=2)
    gaps, sent = [], []
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        folder.mkdir()
        run_clients(job(scripted_server, folder, requests, load), processes=processes)
        table, summary = left(folder)
        assert summary["processes"] == processes and summary["counts"]["ok"] == 40
        assert summary["delivered_rps"] == pytest.approx(summary["offered_rps"], rel=0.1)
        measured = sorted((row for row in table if row["phase"] == "measured"), key=lambda row: row["due_s"])
        warmup = sorted((row for row in table if row["phase"] == "warmup"), key=lambda row: row["due_s"])
        assert all(row["sent_s"] >= row["due_s"] for row in table)
        assert warmup[-1]["due_s"] < measured[0]["due_s"] == 0.0  # one moment at which all of them changed over
        assert [row["index"] for row in warmup] == list(range(warmup[0]["index"], warmup[0]["index"] + len(warmup)))
        sent.append([row["index"] for row in measured])
        gaps.append(np.diff([row["due_s"] for row in measured]))
    assert sent[0] == sent[1] == list(range(40))
    assert gaps[0] == pytest.approx(gaps[1])


def test_turns_wait_for_one_another_in_their_process(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path
) -> None:
    after = np.array([6, 7, 8, 0, 1, 2, -1, -1, -1])
    requests = replace(scripted_requests([OK] * 6, warmup=3), after=after, fixed_warmup=3)
    run_clients(job(scripted_server, tmp_path, requests, Load(3)), processes=2)
    table = {row["index"]: row for row in left(tmp_path)[0]}
    assert len(table) == 9
    assert all(table[i]["sent_s"] >= table[b]["end_s"] for i, b in enumerate(after.tolist()) if b >= 0)


def test_one_client_that_dies_ends_all_and_says_why(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path
) -> None:
    requests = scripted_requests([HANGS] * 8, warmup=4)

    def kill_one() -> bool:
        if scripted_server.in_flight == 4:
            clients(tmp_path)[1].kill()
        return False

    with pytest.raises(LaunchFailure, match="the load client exited with -9: no output") as failure:
        run_clients(job(scripted_server, tmp_path, requests, Load(4)), processes=2, should_stop=kill_one)
    assert failure.value.cause is FailureCause.unknown
    assert not clients(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.job.json", "out.log", "set.npz"]


def test_there_are_never_more_processes_than_slots(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path
) -> None:
    run_clients(job(scripted_server, tmp_path, scripted_requests([OK] * 4, warmup=4), Load(2)), processes=9)
    assert left(tmp_path)[1]["processes"] == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_a_meeting_is_when_the_last_one_came(tmp_path: Path, processes: int) -> None:
    Meeting.create(tmp_path / "m", processes)
    members = [Meeting(tmp_path / "m" if processes > 1 else None, processes, rank) for rank in range(processes)]
    for at, member in enumerate(members, 1):
        assert all(m.happened_at("warm") is None for m in members)
        member.tell("warm", float(at))
    assert [m.happened_at("warm") for m in members] == [float(processes)] * processes
    assert members[0].happened_at("ready") is None


def clients(folder: Path) -> list[psutil.Process]:
    """By rank."""
    job = str(folder / "out.job.json")
    found = [process for process in psutil.process_iter(["cmdline"]) if job in (process.info["cmdline"] or ())]
    return sorted(found, key=lambda process: process.info["cmdline"][-1])
