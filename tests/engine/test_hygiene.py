"""The proof of a point on a real vLLM server: caches in each state, requests of before, and somebody else's load."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from real_server import small_server

from sweep.config import ProofConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.server import Server
from sweep.launch.launch import prepare_cache
from sweep.launch.proof import broken_proof, gather
from sweep.measure.load import measure_load
from sweep.measure.telemetry import await_idle
from sweep.measure.workload import TokenArray, WorkloadSpec, build_requests, corpus_text, tokenize_corpus

pytestmark = pytest.mark.engine

# The client and the engine share cores here: how late the client was is not what these tests are about.
LIMITS = {**asdict(ProofConfig()), "max_loop_lag_ms": 1e4, "max_send_lateness_ms": 1e4, "max_undelivered_share": 0.5,
          "max_drift": 9.0}  # fmt: skip
WORKLOAD = WorkloadSpec.from_dict(
    {
        "name": "hygiene", "prompt_tokens": {"value": 40}, "output_tokens": {"value": 4}, "num_requests": 12,
        "warmup_requests": 2, "shared_prefix_tokens": 256, "num_shared_prefixes": 3, "loads": {"concurrency": [2]},
    }
)  # fmt: skip
(LOAD,) = WORKLOAD.loads


@pytest.fixture(scope="module")
def server(smollm2: Path, engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hygiene")
    with small_server(smollm2, engine_python, folder, max_model_len=2048) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(server: Server) -> TokenArray:
    return tokenize_corpus(server.base_url, server.served_model, corpus_text()[:100_000])


def proof(server: Server, corpus: TokenArray, folder: Path, state: str, *, forget: bool = True) -> dict[str, Any]:
    """The evidence of one load that found the cache in this state."""
    workload = replace(WORKLOAD, cache=state)
    requests = build_requests(workload, corpus, draw=0)
    drained_s = await_idle(server.base_url, 60.0)
    cache: dict[str, Any] = {"asked": state, "state": None, "reset": False}
    if forget:
        requests, cache = prepare_cache(server, workload, requests)
    result = measure_load(
        server.base_url, server.served_model, workload, LOAD, requests, folder / f"{state}-{forget}.parquet",
        price_usd_per_device_hour=1.0, devices=1,
    )  # fmt: skip
    return gather(result, server, workload, LOAD, cache, drained_s)


def answer(server: Server, tokens: int) -> None:
    body = {"model": server.served_model, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as response:
        response.read()


def test_each_state_of_the_cache_is_what_its_name_says_and_a_kept_one_is_caught(
    server: Server, corpus: TokenArray, tmp_path: Path
) -> None:
    found = {state: proof(server, corpus, tmp_path, state) for state in ("cold", "warmed", "steady")}
    hits = {state: evidence["engine"]["prefix_cache_hit_rate"] for state, evidence in found.items()}
    assert hits["cold"] < hits["warmed"] < hits["steady"]
    for state, evidence in found.items():
        assert broken_proof(evidence, LIMITS) is None, state
        assert evidence["cache"]["state"] == state and evidence["cache"]["reset"] is True
        assert hits[state] <= evidence["cache"]["expected_hit_rate"] + 1e-9
    assert found["steady"]["cache"]["primed_prefixes"] == 3
    one = found["warmed"]
    assert one["server"]["foreign_owner"] is None and one["server"]["pid"] == server.pid
    assert one["server"]["served_model"] == server.served_model and one["server"]["vllm_version"]
    assert one["engine"]["generation_tokens"] == one["engine"]["client_output_tokens"] == 4 * 14
    assert one["engine"]["kv_blocks"] > 10 and one["engine"]["preemptions"] == 0
    assert one["devices"] is None
    again = broken_proof(proof(server, corpus, tmp_path, "warmed", forget=False), LIMITS)
    assert again is not None and again.cause is FailureCause.proof_failed
    assert "the cache was warm" in again.detail  # the same requests once more, and nothing forgotten
    assert server.first_request_ms is not None and 0 < server.first_request_ms < (server.startup_s or 0) * 1e3


def test_a_load_begins_when_the_requests_of_before_are_gone(server: Server) -> None:
    busy = threading.Thread(target=answer, args=(server, 100))
    busy.start()
    while await_idle_now(server):
        time.sleep(0.02)
    with pytest.raises(LaunchFailure, match="1 running and 0 waiting") as failure:
        await_idle(server.base_url, 0.2)
    assert failure.value.cause is FailureCause.load_timeout
    assert server.reset_prefix_cache() is True  # vLLM refuses it with status 200 while the request runs
    busy.join(timeout=1.0)
    assert not busy.is_alive()
    waited_s = await_idle(server.base_url, 60.0)
    assert waited_s is not None and waited_s < 1.0


def await_idle_now(server: Server) -> bool:
    """Whether no request is in the engine at this moment."""
    try:
        return await_idle(server.base_url, 0.0) is not None
    except LaunchFailure:
        return False


def test_a_load_of_somebody_else_is_caught(server: Server, corpus: TokenArray, tmp_path: Path) -> None:
    other = threading.Thread(target=answer, args=(server, 30))
    proving: list[dict[str, Any]] = []
    mine = threading.Thread(target=lambda: proving.append(proof(server, corpus, tmp_path, "warmed")))
    mine.start()
    time.sleep(1.5)
    other.start()
    mine.join()
    other.join()
    broken = broken_proof(proving[0], LIMITS)
    assert broken is not None and "somebody else used the server" in broken.detail
