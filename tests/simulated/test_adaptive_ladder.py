"""The adaptive ladder over the real path: launch processes, HTTP, load client; only the GPUs are simulated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import sweep
from sweep.executor.local import read_events
from sweep.launch.spec import EVENTS_FILE, LAUNCHES_DIR
from sweep.results.records import LaunchRecord, PointRecord, RecordStore, record_from_dict

SPACE = """\
# @package space
name: ladder
params:
  tensor_parallel_size: {choices: [4]}
  max_num_seqs: {choices: [null, 1]}
"""
# Four requests at a time take about 22 ms each: 13 in flight keep it.
LIMIT_MS = 75.0
BOUND = f"e2e_p50_ms<={LIMIT_MS:g}"
WORDS = (
    "model=llama33_70b", "hardware=h100x8", "engine=simulated", "workload=cpu_demo", "workload.num_requests=48",
    "workload.loads.concurrency=[2,8,32]", "objectives.metrics=[cost_usd_per_mtok,e2e_p50_ms]", "quality=none",
    "proof=shared_cores", "proof.max_loop_lag_ms=1000", "proof.max_undelivered_share=0.9", "proof.max_drift=10",
    "proof.max_client_cpu_share=9",
    "validation=none", "engine.simulation.times=roofline", "engine.simulation.time_scale=0.05",
    "engine.simulation.startup_s=1", "engine.simulation.tpot_cv=0.01", "engine.simulation.ttft_cv=0.01",
    "executor.interference=ignore", "executor.max_parallel=1", "budget=unlimited", "ladder=adaptive",
)  # fmt: skip


def command(home: Path, study: str, *words: str) -> list[str]:
    (home / "conf" / "search_space").mkdir(parents=True, exist_ok=True)
    (home / "conf" / "search_space" / "ladder.yaml").write_text(SPACE)
    options = ["--config-dir", str(home / "conf"), *WORDS, f"study={study}", f"storage.dir={home / 'runs'}", *words]
    return [sys.executable, "-m", "sweep", "run", *options]


def run(home: Path, study: str, *words: str) -> tuple[list[PointRecord], str]:
    """The points of a study that runs to its end, and what it printed."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(home / "cache")}
    result = subprocess.run(
        command(home, study, *words), env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return points(home / "runs" / study), result.stdout


def points(folder: Path) -> list[PointRecord]:
    return [r for r in RecordStore(folder).read() if isinstance(r, PointRecord)]


def extra(found: list[PointRecord]) -> list[PointRecord]:
    return [p for p in found if p.load_label not in ("c2", "c8", "c32")]


def concurrency(point: PointRecord) -> int:
    return int(point.load["concurrency"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ladder")


WITH_A_BOUND = (
    "search_space=none", "repeats=none", f"constraints.bounds=['{BOUND}']", "+engine.args.tensor_parallel_size=4",
    "+engine.args.max_num_seqs=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def sessions(home: Path) -> tuple[list[PointRecord], list[PointRecord]]:
    """A study killed while it looked for the bound's load: what its launch had said, and its points at the end."""
    process = subprocess.Popen(
        command(home, "bound", *WITH_A_BOUND), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "XDG_CACHE_HOME": str(home / "cache")},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not extra(_said(home / "runs" / "bound")):
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = _said(home / "runs" / "bound")
    assert extra(before), "it was killed too early"
    return before, run(home, "bound", *WITH_A_BOUND)[0]


def _said(folder: Path) -> list[PointRecord]:
    """What the launches of a study have said, whether or not its controller has taken it in."""
    events = [e for path in folder.glob(f"{LAUNCHES_DIR}/*/{EVENTS_FILE}") for e in read_events(path, 0)[0]]
    records = [record_from_dict(e["record"]) for e in events if e["event"] == "record"]
    return [r for r in records if isinstance(r, PointRecord)]


def test_levels_close_in_on_the_highest_load_that_meets_the_bound(
    home: Path, sessions: tuple[list[PointRecord], list[PointRecord]]
) -> None:
    _, found = sessions
    measured = [p for p in found if p.state == "measured"]
    assert [p.load_label for p in measured][:3] == ["c32", "c8", "c2"]
    assert 2 <= len(extra(measured)) <= 4
    met = {concurrency(p): (p.metrics["e2e_p50_ms"] or 0.0) <= LIMIT_MS for p in measured}
    best = max(c for c, good in met.items() if good)
    assert best >= 2 and min(c for c in met if c > best) / best < 1.5, met
    # The levels are operating points like any other.
    study = sweep.open(home / "runs" / "bound")
    pick = study.pick(BOUND, maximize="output_throughput_tok_s")
    assert pick.feasible and {p.load_label for p in study.operating_points} == {p.load_label for p in found}


def test_a_resumed_study_keeps_its_levels_and_measures_none_of_them_twice(
    home: Path, sessions: tuple[list[PointRecord], list[PointRecord]]
) -> None:
    before, found = sessions
    measured = [p for p in found if p.state == "measured"]
    assert max(Counter(p.load_label for p in measured).values()) == 1
    assert {p.point_id for p in before if p.state == "measured"} <= {p.point_id for p in measured}
    again, _ = run(home, "bound", *WITH_A_BOUND)
    assert again == found


def test_a_hopeless_configuration_is_cut_and_the_record_says_why(home: Path) -> None:
    found, printed = run(
        home, "hopeless", "search_space=ladder", "sampler=grid", "ladder.cut_confidence=0.6", "ladder.extra_levels=0",
        "repeats=front", "repeats.share=0.5", "repeats.max_per_point=2",
        "engine.simulation.time_scale=0.1",  # a busy machine must not hide what is hopeless
    )  # fmt: skip
    one_at_a_time = [p for p in found if p.engine["args"].get("max_num_seqs") == 1 and not p.repeat]
    assert [(p.load_label, p.state) for p in one_at_a_time] == [("c32", "measured"), ("c8", "measured"), ("c2", "cut")]
    cut = one_at_a_time[-1]
    assert cut.cause == "dominated" and "60% confidence" in (cut.detail or "") and not cut.metrics
    measured = {p.point_id for p in sweep.open(home / "runs" / "hopeless").operating_points if p.state == "measured"}
    assert {x["by"] for x in cut.proof["cut"]["dominated"]} <= measured
    assert "cut       1 point not measured: every busier load is dominated" in printed
    launches = [r for r in RecordStore(home / "runs" / "hopeless").read() if isinstance(r, LaunchRecord)]
    assert sum(r.config_hash == cut.config_hash and not r.repeat for r in launches) == 1
