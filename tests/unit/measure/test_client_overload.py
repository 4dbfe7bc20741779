"""A client that is asked for more than it can send must show it: never a slow server that is a slow client."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sweep.measure.arrivals import Load
from sweep.measure.client import Job
from sweep.measure.fleet import run_clients
from sweep.measure.requests import RequestSet

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the exact server is C and needs a compiler")


@pytest.fixture(scope="module")
def exact_server() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "exact_server.py"
    spec = importlib.util.spec_from_file_location("exact_server", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["exact_server"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(server: Any, load: Load, n: int, tokens: int, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Requests whose first token id is their number; (measured rows, summary)."""
    total = n + 300
    prompts = np.stack([np.arange(total), np.full(total, 7)], axis=1).astype(np.int32)
    requests = RequestSet(prompts.reshape(-1), np.arange(total + 1) * 2, np.full(total, tokens), n)
    requests.save(folder / "set.npz")
    job = Job(
        server.base_url, "m", str(folder / "set.npz"), load.to_dict(), temperature=0.0, num_requests=n,
        warmup_requests=4, max_load_s=60.0, request_timeout_s=60.0, seed=0, out=str(folder / "out.parquet"),
    )  # fmt: skip
    run_clients(job, processes=1)
    table = [row for row in pq.read_table(job.out).to_pylist() if row["phase"] == "measured"]
    assert len(table) == n and {row["status"] for row in table} == {"ok"}
    return table, json.loads((folder / "out.json").read_text())


def test_what_the_client_reports_is_what_the_server_recorded(exact_server: ModuleType, tmp_path: Path) -> None:
    """In one clock: no first token before it was sent, nor (at the median) long after."""
    with exact_server.ExactServer(20, 12, tokens_per_chunk=3, early_chunk=True) as server:
        table, summary = measure(server, Load(8), 40, 12, tmp_path)
        record = dict(server.record())
    if summary["kernel_stamped_share"] != 1.0:
        pytest.skip("this kernel does not stamp TCP reads")
    errors = []
    for row in table:
        sent = record[row["index"]]
        assert row["chunk_tokens"] == [3, 3, 3, 3] and sent.tokens_per_chunk == 3
        errors.append((row["first_token_s"] - row["sent_s"]) * 1e3 - sent.ttft_ms)
    assert min(errors) > -0.1 and np.median(errors) < 2.0
    assert summary["concurrency_mean"] == pytest.approx(8, rel=0.1)


def test_an_open_loop_beyond_the_client_is_offered_but_not_delivered(exact_server: ModuleType, tmp_path: Path) -> None:
    with exact_server.ExactServer(1, 1) as server:
        _, summary = measure(server, Load(None, 40_000.0), 3000, 1, tmp_path)
    assert summary["offered_rps"] == pytest.approx(40_000, rel=0.1)
    assert summary["delivered_rps"] < 0.5 * summary["offered_rps"]
    assert summary["late_send_share"] > 0.5 and summary["send_lateness_p99_ms"] > 50
    assert summary["loop_lag_max_ms"] > 5


def test_a_closed_loop_beyond_the_client_is_not_kept_full(exact_server: ModuleType, tmp_path: Path) -> None:
    """A server that answers at once: what is left of each turn is the client's own time, and it is told apart."""
    with exact_server.ExactServer(0, 0) as server:
        _, summary = measure(server, Load(256), 4000, 1, tmp_path)
    assert summary["concurrency_offered"] == pytest.approx(256, rel=0.05)
    assert summary["concurrency_mean"] < 0.8 * summary["concurrency_offered"]
    assert summary["client_cpu_share"] > 0.5
