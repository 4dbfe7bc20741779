"""The client as a process, and what becomes of a load that hangs, dies or is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure import fleet
from sweep.measure.load import LoadResult, measure_load
from sweep.measure.workload import LengthDistribution, Load, WorkloadSpec
from sweep.results.metrics import METRICS

OK, HTTP_ERROR, _, HANGS = range(4)
CLOSED = Load(2)
SPEC = WorkloadSpec(
    "w", LengthDistribution(value=3), LengthDistribution(value=5), num_requests=6, warmup_requests=2, max_load_s=30
)


def measure(
    server: Any, requests: Any, tmp_path: Path, spec: WorkloadSpec = SPEC, load: Load = CLOSED, **changes: Any
) -> LoadResult:
    options: dict[str, Any] = {"price_usd_per_device_hour": 3.6, "devices": 2}
    out = tmp_path / f"{load.label}-r0.parquet"
    return measure_load(server.base_url, "m", spec, load, requests, out, **(options | changes))


@pytest.mark.parametrize("load", [CLOSED, Load(None, 50.0)])
def test_a_load_becomes_metrics_files_and_counters(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path, load: Load
) -> None:
    result = measure(scripted_server, scripted_requests([OK] * 6, warmup=4), tmp_path, load=load)
    assert (result.completed, result.failed, result.warmup_failed, result.first_error) == (6, 0, 0, None)
    assert set(result.metrics) <= set(METRICS)
    throughput = result.metrics["output_throughput_tok_s"]
    assert throughput
    assert result.metrics["output_throughput_per_device_tok_s"] == throughput / 2
    assert result.metrics["cost_usd_per_mtok"] == pytest.approx(2 * 1000 / throughput)
    assert result.metrics["preemptions"] is None  # this server does not count them
    table = pq.read_table(result.raw)
    assert set(table["output_tokens"].to_pylist()) == {5}
    assert result.engine.generation_tokens == table.num_rows * 5
    assert result.summary["counts"]["warmup"] == table.num_rows - 6 >= 2
    files = [load.label + "-r0" + suffix for suffix in (".job.json", ".json", ".log", ".parquet")]
    assert sorted(p.name for p in tmp_path.iterdir()) == files
    assert json.loads((tmp_path / files[1]).read_text()) == result.summary


def test_failed_requests_are_counted_with_their_reasons(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path
) -> None:
    result = measure(scripted_server, scripted_requests([HTTP_ERROR, OK, HTTP_ERROR, OK, OK, OK], warmup=2), tmp_path)
    assert (result.completed, result.failed) == (4, 2)
    assert result.error_examples == ("2 x HTTP 400: prompt too long",)
    assert result.metrics["requests_failed"] == 2.0


def test_a_load_without_a_measured_request_is_a_time_out(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path
) -> None:
    scripted_server.first_s = 1.0
    with pytest.raises(LaunchFailure, match=r"c2: max_load_s=0\.5 ended before the warm-up") as failure:
        measure(scripted_server, scripted_requests([OK], warmup=2), tmp_path, replace(SPEC, max_load_s=0.5))
    assert failure.value.cause is FailureCause.load_timeout


def test_a_hanging_client_is_killed(
    scripted_server: Any, scripted_requests: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_MARGIN_S", -59.0)  # 30 + 30 - 59: less than its requests may take
    requests = scripted_requests([HANGS] * 6, warmup=2)
    with pytest.raises(LaunchFailure, match="did not end within 1 s") as failure:
        measure(scripted_server, requests, tmp_path, replace(SPEC, request_timeout_s=30))
    assert failure.value.cause is FailureCause.load_timeout
    assert not clients_of(tmp_path)


def test_a_load_can_be_stopped(scripted_server: Any, scripted_requests: Any, tmp_path: Path) -> None:
    requests = scripted_requests([HANGS] * 6, warmup=2)
    with pytest.raises(LaunchFailure) as failure:
        measure(scripted_server, requests, tmp_path, should_stop=lambda: scripted_server.in_flight == 2)
    assert failure.value.cause is FailureCause.interrupted
    assert not clients_of(tmp_path)


def test_a_client_that_dies_says_why(scripted_server: Any, scripted_requests: Any, tmp_path: Path) -> None:
    with pytest.raises(
        LaunchFailure, match=r"exited with 1: .* holds 1 warm-up requests, this load needs 2"
    ) as failure:
        measure(scripted_server, scripted_requests([OK], warmup=1), tmp_path)
    assert failure.value.cause is FailureCause.unknown


def test_the_client_ends_when_its_parent_is_gone(scripted_server: Any, scripted_requests: Any, tmp_path: Path) -> None:
    """kill -9 of the process that measures must not leave a load running."""
    scripted_requests([HANGS] * 6, warmup=2).save(tmp_path / "set.npz")
    job = {
        "base_url": scripted_server.base_url, "model": "m", "requests": str(tmp_path / "set.npz"),
        "load": {"concurrency": 2}, "temperature": 0, "num_requests": 6, "warmup_requests": 2, "max_load_s": 600,
        "request_timeout_s": 600, "seed": 0, "out": str(tmp_path / "out.parquet"),
    }  # fmt: skip
    (tmp_path / "out.job.json").write_text(json.dumps(job))
    code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'sweep.measure.client', sys.argv[1]])"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out.job.json")],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.DEVNULL,
    )
    while scripted_server.in_flight < 2:
        time.sleep(0.05)
    (client,) = clients_of(tmp_path)
    parent.kill()
    parent.wait()
    psutil.wait_procs([client], timeout=60)
    assert not client.is_running() or client.status() == psutil.STATUS_ZOMBIE


def clients_of(tmp_path: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "sweep.measure.client" in command and any(str(tmp_path) in part for part in command):
            found.append(process)
    return found
