"""What users of other sweep tools reported, each made impossible here: one test a pain, by name.

Every pain is a public report (vLLM, Hydra, Optuna, dynamo and other trackers); the thread is named with its test.
The real component runs in each: servers are processes (the simulated engine in vLLM's place), loads go over HTTP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_launches import (
    Event,
    Session,
    dies_at_startup,
    engine_text,
    good,
    labels,
    make_config,
)

from sweep.config import HardwareConfig, ModelConfig, ProofConfig, SimulationConfig
from sweep.decide.answer import Infeasible, PickResult
from sweep.decide.pick import pick
from sweep.decide.sla import parse_sla
from sweep.engine.arguments import check_arguments
from sweep.engine.devices import detect_gpus
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.processes import LAUNCH_ID, carriers
from sweep.engine.resolved import differences
from sweep.engine.server import Server
from sweep.engine.simulated import simulate
from sweep.launch.launch import prepare_cache
from sweep.launch.proof import broken_proof, gather
from sweep.launch.spec import LaunchSpec
from sweep.measure.cost import Usage, cost_usd_per_mtok, effective_cost_usd_per_mtok
from sweep.measure.latency import percentile
from sweep.measure.load import LoadResult, measure_load
from sweep.measure.telemetry import await_idle, scrape
from sweep.measure.workload import WorkloadSpec, build_requests, tokenize_corpus
from sweep.results.front import front
from sweep.results.points import OperatingPoint
from sweep.results.records import to_json
from sweep.study import loop as loop_module

MODEL = {"name": "m", "path": "m", "weights_gib": 15.0, "num_hidden_layers": 32, "num_key_value_heads": 8}
HARDWARE = {"name": "h100", "memory_gib": 79.6}
TEXT = " ".join(f"word{i} and number {i * i}." for i in range(3000))
# Whether this machine is quick enough for the load client is not what these tests ask.
LIMITS = {**asdict(ProofConfig()), "max_loop_lag_ms": 1e4, "max_send_lateness_ms": 1e4, "max_drift": 9.0,
          "max_undelivered_share": 0.5, "max_client_cpu_share": 9.0}  # fmt: skip
SETTLED = "every configuration of the space is settled"


def simulated(folder: Path, args: dict[str, Any] | None = None, **simulation: Any) -> Server:
    settings = {"times": "roofline", "startup_s": 0.5, "time_scale": 0.01, **simulation}
    described = json.dumps({"model": MODEL, "hardware": HARDWARE, "simulation": settings})
    return Server(
        EngineConfig("m", {"max_model_len": 4096, **(args or {})}, {}),
        python=sys.executable,
        log_path=folder / "server.log",
        device_env={},
        startup_timeout_s=60.0,
        stop_timeout_s=10.0,
        launch_id=f"pains-{folder.name}-{os.getpid()}",
        command=("-m", "sweep.engine.simulated_server", "--simulation", described, "--model"),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with simulated(tmp_path_factory.mktemp("pains")) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)


def workload(**changes: Any) -> WorkloadSpec:
    base = {"name": "w", "prompt_tokens": {"kind": "uniform", "low": 40, "high": 90}, "output_tokens": {"value": 8},
            "num_requests": 16, "warmup_requests": 2, "max_load_s": 30, "loads": {"concurrency": [2]}}  # fmt: skip
    return WorkloadSpec.from_dict(base | changes)


def measured(
    server: Server, spec: WorkloadSpec, folder: Path, *, draw: int = 0, forget: bool = True
) -> tuple[LoadResult, dict[str, Any]]:
    """One load as a launch measures it, and its evidence."""
    corpus = tokenize_corpus(server.base_url, server.served_model, TEXT)
    requests = build_requests(spec, corpus, draw=draw)
    (load,) = spec.loads
    drained_s = await_idle(server.base_url, 30.0)
    cache: dict[str, Any] = {"asked": spec.cache, "state": None, "reset": False}
    if forget:
        requests, cache = prepare_cache(server, spec, requests)
    result = measure_load(
        server.base_url, server.served_model, spec, load, requests, folder / f"{draw}-{forget}.parquet",
        price_usd_per_device_hour=2.0, devices=1,
    )  # fmt: skip
    return result, gather(result, server, spec, load, cache, drained_s)


def made(name: str, metrics: dict[str, float], args: dict[str, Any] | None = None, **changes: Any) -> OperatingPoint:
    base: dict[str, Any] = {
        "point_id": name, "config_hash": name, "fingerprint": "f", "launch_id": "l",
        "engine": {"model": "m", "args": args or {}, "env": {}}, "load": {"concurrency": 8}, "load_label": "c8",
        "params": None, "purpose": "trial", "devices": 1, "provenance": "measured", "state": "measured",
        "n_repeats": 1, "metrics": metrics,
    }  # fmt: skip
    return OperatingPoint(**(base | changes))


def test_01_a_warm_prefix_cache_never_passes_for_speed(server: Server, tmp_path: Path) -> None:
    """vllm#54227 (TPOT -34 %, throughput x2.3), vllm#52884 (+86 %): the same prompts again on the same server."""
    _, first = measured(server, workload(), tmp_path)
    _, repeated = measured(server, workload(), tmp_path)
    assert broken_proof(first, LIMITS) is None and broken_proof(repeated, LIMITS) is None
    assert repeated["engine"]["prefix_cache_hit_rate"] == first["engine"]["prefix_cache_hit_rate"]
    _, kept = measured(server, workload(), tmp_path, forget=False)
    broken = broken_proof(kept, LIMITS)
    assert broken is not None and "the cache was warm" in broken.detail
    corpus = tokenize_corpus(server.base_url, server.served_model, TEXT)
    draws = [build_requests(workload(), corpus, draw=draw) for draw in (0, 1)]
    assert draws[0].checksum != draws[1].checksum, "a repeat asks other requests"


def test_02_nothing_of_a_launch_outlives_it(tmp_path: Path) -> None:
    """vllm#55510, #34643, instructlab PR #2092: orphaned engines hold memory, the next trial fails."""
    with simulated(tmp_path) as running:
        mark = running._launch_id
        orphan = subprocess.Popen(["sleep", "600"], env={**os.environ, LAUNCH_ID: mark}, start_new_session=True)
        assert {running.pid, orphan.pid} <= {p.pid for p in carriers(mark)}
    assert carriers(mark) == []
    assert orphan.poll() is not None, "it had left the process group"


def test_03_a_foreign_server_on_our_port_is_noticed_at_every_point(server: Server, tmp_path: Path) -> None:
    """perf-eval#56, vllm PR #32927: readiness satisfied by somebody else's server."""
    assert server.foreign_owner() is None
    code = (
        "import socket, time\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        f"s.bind(('127.0.0.2', {server.base_url.rpartition(':')[2]}))\ns.listen()\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        _, evidence = measured(server, workload(), tmp_path)
        other.kill()
    broken = broken_proof(evidence, LIMITS)
    assert broken is not None and f"the port is served by process {other.pid}" in broken.detail


def test_04_one_failing_configuration_costs_its_own_points_only(tmp_path: Path) -> None:
    """ado#772, dynamo#6096, llama.cpp#22815: after the first failure every later result was missing or wrong."""

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        bad = "max_num_seqs=4" in engine_text(spec)
        return dies_at_startup(spec, FailureCause.out_of_memory) if bad else good(spec)

    session = Session(make_config(tmp_path), script)
    assert session.run() == SETTLED
    assert len(session.points("measured")) == 6 and len(session.points("failed")) == 3


def test_05_a_second_run_repeats_nothing_that_is_done(tmp_path: Path) -> None:
    """hydra#1407, llm-d-benchmark#250: resuming starts over, or skips what failed to finish."""
    first = Session(make_config(tmp_path, trials=3), good)
    first.run()
    done = {(p.config_hash, p.load_label) for p in first.points("measured")}
    second = Session(make_config(tmp_path), good)
    assert second.run() == SETTLED
    again = {(s.engine_config.hash, label) for s in second.specs for label in labels(s)}
    assert done and not done & again
    assert len({(p.config_hash, p.load_label) for p in second.points("measured")}) == 9


def test_06_a_slow_launch_holds_nobody_up_and_nan_is_never_told(tmp_path: Path) -> None:
    """hydra#3091, #3201: trials wait for whole batches. hydra#2237: one NaN ends the sweep."""
    session: Session

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return good(spec, ticks=40 if spec.purpose == "baseline" else 1)

    session = Session(make_config(tmp_path, devices=2), script)
    session.run()
    ends = [r.launch_id for r in session.loop.ledger.launches]
    assert len(ends) == 3 and ends[-1] == session.specs[0].launch_id, "two others came and went beside the first"
    record = session.points("measured")[0]
    with pytest.raises(ValueError, match="JSON"):
        to_json(replace(record, metrics={"ttft_p99_ms": float("nan")}))


def test_07_a_front_has_no_dominated_point_ties_included() -> None:
    """vllm#55561, #56111: points that are no better anywhere were drawn as part of the front."""
    names = ["cost_usd_per_mtok", "ttft_p99_ms"]
    values = {"best": (1, 1), "same": (1, 1), "as_cheap_but_slower": (1, 2), "as_fast_but_dearer": (2, 1)}
    points = [made(k, dict(zip(names, map(float, v), strict=True))) for k, v in values.items()]
    assert {p.point_id for p in front(points, names)} == {"best", "same"}


def test_08_the_warm_up_fills_the_batch_before_anything_counts(server: Server, tmp_path: Path) -> None:
    """vllm-omni#6356 (a warm-up below the concurrency inflates by 28 %), vllm#53436: noise taken for an effect."""
    result, _ = measured(server, workload(loads={"concurrency": [6]}, warmup_requests=1), tmp_path)
    assert result.summary["counts"]["warmup"] >= 6
    tail = np.arange(1.0, 100.0)
    assert percentile(tail, 99) is None and percentile(np.append(tail, 100.0), 99) == 99.0


def test_09_prompts_are_text_that_somebody_wrote(server: Server) -> None:
    """vllm#52536: on random tokens speculative decoding accepts nothing, or anything."""
    corpus = tokenize_corpus(server.base_url, server.served_model, TEXT)
    requests = build_requests(workload(), corpus, draw=0)
    written = " ".join(map(str, corpus.tolist()))
    assert all(" ".join(map(str, requests[i].prompt)) in written for i in range(requests.num_measured))


def test_10_a_pick_is_a_command_to_type_with_every_flag() -> None:
    """vllm#2492, #15924, #6641: which flags do I set?"""
    args = {"max_num_seqs": 64, "kv_cache_dtype": "fp8", "speculative_config.method": "ngram"}
    points = [made("tuned", {"cost_usd_per_mtok": 1.0}, args), made("default", {"cost_usd_per_mtok": 2.0})]
    found = pick(points, parse_sla("cost_usd_per_mtok<=3"), minimize="cost_usd_per_mtok")
    assert isinstance(found, PickResult)
    text = found.text()
    assert all(part in text for part in ("vllm serve m", "--max-num-seqs 64", "--kv-cache-dtype fp8", "ngram"))


def test_11_an_engine_that_dies_under_load_is_a_failed_point_with_its_cause(tmp_path: Path) -> None:
    """vllm#21410, aiconfigurator#1396: starts fine, runs out of memory under load."""
    args = {"max_model_len": 4096, "kv_cache_dtype": "fp8"}

    def dies_under_load(seed: int) -> bool:
        settings = SimulationConfig(times="roofline", crash_share=1.0, seed=seed)
        engine = simulate(EngineConfig("m", args, {}), ModelConfig(**MODEL), HardwareConfig(**HARDWARE), settings, "")
        return engine.crash == "load"

    seed = next(seed for seed in range(100) if dies_under_load(seed))
    with simulated(tmp_path, {"kv_cache_dtype": "fp8"}, crash_share=1.0, seed=seed) as running:
        assert running.startup_s is not None
        try:
            result, _ = measured(running, workload(loads={"concurrency": [8]}), tmp_path)
        except LaunchFailure:
            pass
        else:
            assert result.failed
        death = running.died()
    assert death is not None and death.cause is FailureCause.engine_died
    assert "the engine dies with several requests in its batch" in death.detail


def test_12_a_fast_configuration_that_answers_wrongly_is_not_picked() -> None:
    """verl#4435 (an fp8 cache took a model's accuracy to zero), vllm#39008: silent collapse of quality."""
    names = ["cost_usd_per_mtok", "quality_kl"]
    points = [made("honest", {"cost_usd_per_mtok": 2.0, "quality_kl": 0.001}),
              made("collapsed", {"cost_usd_per_mtok": 1.0, "quality_kl": 3.0}),
              made("unmeasured", {"cost_usd_per_mtok": 0.1})]  # fmt: skip
    found = pick(points, parse_sla("quality_kl<=0.02"), minimize="cost_usd_per_mtok")
    assert isinstance(found, PickResult) and found.chosen.point_id == "honest"
    assert {p.point_id for p in front(points, names)} == {"honest", "collapsed"}


def test_13_one_start_serves_the_whole_load_ladder(tmp_path: Path) -> None:
    """vllm#19824, #34399 (37 min of compilation), dynamo#10695: a start for every measurement."""
    session = Session(make_config(tmp_path, loads=(64, 32, 16, 8, 4, 2, 1)), good)
    session.run()
    assert len(session.specs) == 3 and len(session.points("measured")) == 21


def test_14_an_sla_nobody_meets_is_refused_and_a_failing_load_never_passes() -> None:
    """vllm PR #32095 (the failing value was reported), dynamo#12774, #9537: infeasible SLAs accepted or relaxed."""
    ladder = [made(f"c{c}", {"ttft_p99_ms": ms, "output_throughput_tok_s": float(c)}, load_label=f"c{c}")
              for c, ms in ((1, 50.0), (8, 200.0), (64, 900.0))]  # fmt: skip
    best = "output_throughput_tok_s"
    at_bound, below = (pick(ladder, parse_sla(f"ttft_p99_ms<={ms}"), maximize=best) for ms in (200, 199.9))
    assert isinstance(at_bound, PickResult) and at_bound.chosen.point_id == "c8"
    assert isinstance(below, PickResult) and below.chosen.point_id == "c1"
    refused = pick(ladder, parse_sla("ttft_p99_ms<=10"), maximize=best)
    assert isinstance(refused, Infeasible) and "ttft_p99_ms" in refused.text()


def test_15_arguments_this_vllm_does_not_have_are_told_before_anything_is_launched() -> None:
    """auto-tuning-vllm#38, #76, model_analyzer#935: flags renamed between versions fail one launch after the other."""
    known = {"max_num_seqs": {"flags": ["--max-num-seqs"], "is_bool": False, "choices": None, "type": "int",
                              "nargs": None, "value": None}}  # fmt: skip
    assert check_arguments({"max_num_seqs": 8}, known) == []
    (line,) = check_arguments({"max_num_seq": 8}, known)
    assert "max_num_seq" in line and "did you mean 'max_num_seqs'" in line


def test_16_cost_per_token_is_a_metric_of_every_load_and_of_its_use(server: Server, tmp_path: Path) -> None:
    """inference-perf#139, llmperf-leaderboard#3: what does a million tokens cost?"""
    result, _ = measured(server, workload(), tmp_path)
    cost = result.metrics["cost_usd_per_mtok"]
    assert cost == cost_usd_per_mtok(2.0, 1, result.metrics["output_throughput_tok_s"])
    total = result.metrics["cost_usd_per_mtok_total"]
    assert cost is not None and total is not None and total < cost
    low, high = result.intervals["cost_usd_per_mtok_total"]
    assert low < total < high
    slowest, fastest = result.intervals["total_throughput_tok_s"]
    assert (
        total * result.metrics["total_throughput_tok_s"]
        == pytest.approx(low * fastest)
        == pytest.approx(high * slowest)
    )
    assert effective_cost_usd_per_mtok(cost, Usage(0.5, 2.0), None) == pytest.approx(4 * cost)


def test_17_what_ran_is_compared_with_what_was_asked() -> None:
    """llama-toolchest#90: the recorded configuration is not the applied one."""
    resolved = {"scheduler_config.max_num_seqs": 256, "cache_config.cache_dtype": "auto"}
    asked = {"max_num_seqs": 512, "kv_cache_dtype": "fp8"}
    assert differences(asked, resolved) == {"max_num_seqs": [512, 256], "kv_cache_dtype": ["fp8", "auto"]}


def test_18_a_client_that_cannot_keep_up_is_blamed_and_not_the_server(server: Server, tmp_path: Path) -> None:
    """evalscope#1366, guidellm#272, #136: the asked rate was never reached, and the server was blamed."""
    spec = workload(loads={"request_rate_rps": [60.0]}, num_requests=300)
    before = sum((scrape(server.base_url) or {})["vllm:prompt_tokens_total"])

    def freeze_the_client() -> None:
        # Well past the warm-up, whose requests have no due times to be late for.
        while sum((scrape(server.base_url) or {})["vllm:prompt_tokens_total"]) < before + 40 * 90:
            time.sleep(0.02)
        clients = [p for p in psutil.Process().children(recursive=True) if "sweep.measure.client" in p.cmdline()]
        for client in clients:
            client.suspend()
        time.sleep(1.0)
        for client in clients:
            client.resume()

    freezer = threading.Thread(target=freeze_the_client)
    freezer.start()
    _, evidence = measured(server, spec, tmp_path)
    freezer.join()
    broken = broken_proof(evidence, LIMITS | {"max_send_lateness_ms": 50.0})
    assert broken is not None and broken.cause is FailureCause.proof_failed
    assert "the load client was late: its requests left late by" in broken.detail


def test_19_the_front_comes_from_the_records_whatever_the_optimizer_thinks(tmp_path: Path) -> None:
    """optuna#6242, #4180, #5184: best_trials empty, or with trials that broke a constraint."""

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        bad = "max_num_seqs=8" in engine_text(spec)
        return dies_at_startup(spec, FailureCause.unsupported) if bad else good(spec)

    session = Session(make_config(tmp_path), script)
    session.run()
    best = front(session.loop.ledger.operating_points(), session.config.objectives.metrics)
    assert best and all(p.state == "measured" for p in best)


def test_20_a_configuration_that_ran_out_of_memory_is_launched_once(tmp_path: Path) -> None:
    """wandb#1655: the same failing configuration, proposed all night."""

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return dies_at_startup(spec, FailureCause.out_of_memory) if spec.purpose == "trial" else good(spec)

    for _ in range(2):
        session = Session(make_config(tmp_path), script)
        session.run()
    hashes = [p.config_hash for p in session.points("failed")]
    assert len(hashes) == 6 and session.specs == []


def test_what_only_a_gpu_has_is_null_on_a_cpu(server: Server, tmp_path: Path) -> None:
    """A power of 0 W would win every energy objective."""
    if detect_gpus():
        pytest.skip("this machine has a GPU")
    result, evidence = measured(server, workload(), tmp_path)
    assert evidence["devices"] is None and result.metrics["energy_j_per_token"] is None
