"""A whole `sweep run` on eight H100s that are not there: everything but the GPU is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import datetime
from itertools import combinations
from pathlib import Path

import psutil
import pytest

import sweep
from sweep.engine.processes import LAUNCH_ID
from sweep.results.front import front
from sweep.results.records import LaunchRecord, PointRecord, RecordStore

# Two GPUs hold Llama-70B only just: with less memory for vLLM they do not. Regions with an FP8 cache may crash.
SPACE = """\
# @package space
name: node
params:
  parallel:
    joint: [tensor_parallel_size]
    choices: [[2], [4], [8]]
  gpu_memory_utilization: {choices: [null, 0.85]}
  kv_cache_dtype: {choices: [null, fp8]}
"""
OBJECTIVES = ["cost_usd_per_mtok", "ttft_p50_ms", "quality_kl"]
POINTS = 24


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every configuration of the space at two loads, once."""
    home = tmp_path_factory.mktemp("simulated")
    (home / "conf" / "search_space").mkdir(parents=True)
    (home / "conf" / "search_space" / "node.yaml").write_text(SPACE)
    words = [
        "model=llama33_70b", "hardware=h100x8", "engine=simulated", "search_space=node", "workload=cpu_demo",
        "workload.num_requests=20", "workload.loads.concurrency=[2,6]", f"objectives.metrics=[{','.join(OBJECTIVES)}]",
        "sampler=grid", f"budget.trials={POINTS}", "budget.hours=null", "quality.num_prompts=4", "proof=shared_cores",
        "proof.max_loop_lag_ms=1000", "proof.max_undelivered_share=0.5", "validation.finalists=0",
        "proof.max_client_cpu_share=9", "engine.simulation.times=roofline",
        "engine.simulation.time_scale=0.02", "engine.simulation.crash_share=0.5", "engine.simulation.seed=1",
        "executor.interference=ignore", "study=node", f"storage.dir={home / 'runs'}",
    ]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(home / "cache")}
    command = [sys.executable, "-m", "sweep", "run", "--config-dir", str(home / "conf"), *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"budget.trials={POINTS} reached" in result.stdout
    return home / "runs" / "node"


def points(study: Path) -> list[PointRecord]:
    return [r for r in RecordStore(study).read() if isinstance(r, PointRecord)]


def launches(study: Path) -> list[LaunchRecord]:
    return [r for r in RecordStore(study).read() if isinstance(r, LaunchRecord)]


def test_every_point_is_settled_and_marked_as_simulated(study: Path) -> None:
    found = points(study)
    assert len({(p.config_hash, p.load_label) for p in found}) == POINTS
    assert {p.provenance for p in found} == {"simulated"}
    assert {p.state for p in found} == {"measured", "failed"}


def test_failures_have_their_causes(study: Path) -> None:
    causes = Counter(p.cause for p in points(study) if p.state == "failed")
    assert causes["out_of_memory"] == 4, causes  # two GPUs with 0.85 of their memory, with either cache
    crashed = [p for p in points(study) if p.cause in ("died_at_startup", "first_request_failed", "engine_died")]
    assert crashed and all(p.engine["args"]["kv_cache_dtype"] == "fp8" for p in crashed)
    assert all("simulated crash region" in (p.detail or "") for p in crashed)
    assert set(causes) <= {"out_of_memory", *(p.cause for p in crashed)}


def test_launches_of_different_widths_share_the_node_on_disjoint_gpus(study: Path) -> None:
    def span(launch: LaunchRecord) -> tuple[datetime, datetime]:
        return datetime.fromisoformat(launch.started_at), datetime.fromisoformat(launch.finished_at)

    found = launches(study)
    assert {launch.devices for launch in found} == {2, 4, 8}
    together = []
    for one, other in combinations(found, 2):
        (a, b), (c, d) = span(one), span(other)
        if max(a, c) < min(b, d):
            together.append({one.devices, other.devices})
            assert not set(one.device_ids) & set(other.device_ids), (one.launch_id, other.launch_id)
    assert {2, 4} in together
    assert all(set(launch.device_ids) <= set(range(8)) and len(launch.device_ids) == launch.devices for launch in found)


def test_there_is_a_front_and_a_pick(study: Path) -> None:
    opened = sweep.open(study)
    on_front = front(opened.operating_points, OBJECTIVES)
    assert on_front and {p.provenance for p in on_front} == {"simulated"}
    qualities = {p.metrics["quality_kl"] for p in opened.operating_points if "quality_kl" in p.metrics}
    assert max(qualities) > 0.004 > 0.0015 > min(qualities) > 0.0
    assert opened.pick("quality_kl<=0.002", minimize="cost_usd_per_mtok").feasible


def test_nothing_is_left_running(study: Path) -> None:
    ids = {launch.launch_id for launch in launches(study)}
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH_ID) in ids:
                left.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    assert not left and json.loads((study / "status.json").read_text())["state"] != "running"
