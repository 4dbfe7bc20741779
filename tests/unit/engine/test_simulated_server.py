"""The simulated server through everything that measures vLLM: one real process, no mocks of the client's side."""

from __future__ import annotations

import itertools
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config import HardwareConfig, ModelConfig, SimulationConfig
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.engine.server import Server
from sweep.engine.simulated import simulate
from sweep.engine.simulated_server import block_keys, parse_arguments, tokenize
from sweep.measure import load
from sweep.measure.load import measure_load
from sweep.measure.quality import QualitySpec, compare, measure_logprobs, quality_prompts
from sweep.measure.telemetry import Telemetry, scrape
from sweep.measure.workload import Load, WorkloadSpec, bos_token_id, build_requests, tokenize_corpus

MODEL: dict[str, Any] = {
    "name": "m",
    "path": "m",
    "weights_gib": 15.0,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
HARDWARE: dict[str, Any] = {"name": "h100", "memory_gib": 79.6}
TEXT = " ".join(f"word{i} and number {i * i}." for i in range(3000))


def server(folder: Path, args: dict[str, Any] | None = None, **simulation: Any) -> Server:
    settings = {"times": "roofline", "startup_s": 1.0, "time_scale": 0.02, **simulation}
    described = json.dumps({"model": MODEL, "hardware": HARDWARE, "simulation": settings})
    return Server(
        EngineConfig("m", {"max_model_len": 4096, **(args or {})}, {}),
        python=sys.executable,
        log_path=folder / "server.log",
        device_env={"CUDA_VISIBLE_DEVICES": "6,7"},
        startup_timeout_s=60.0,
        stop_timeout_s=10.0,
        launch_id=f"simulated-{folder.name}-{os.getpid()}",
        command=("-m", "sweep.engine.simulated_server", "--simulation", described, "--model"),
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {"kv_cache_dtype": "fp8", "data_parallel_size": 2, "speculative_config.method": "ngram",
            "speculative_config.num_speculative_tokens": 2}  # fmt: skip
    with server(tmp_path_factory.mktemp("server"), args) as started:
        yield started


def workload(**more: Any) -> WorkloadSpec:
    lengths = {"kind": "uniform", "low": 20, "high": 60}
    data = {"name": "w", "prompt_tokens": lengths, "output_tokens": lengths, "num_requests": 12, "max_load_s": 30}
    return WorkloadSpec.from_dict({**data, "loads": {"concurrency": [4]}, **more})


def test_it_starts_answers_and_names_itself(running: Server) -> None:
    assert running.served_model == "m" and running.vllm_version == "simulated-0"
    assert running.startup_s is not None and running.is_alive() and running.died() is None


def test_a_load_is_measured_with_every_engine_counter(
    running: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The simulated load is over in less than the usual second between two samples of the gauges.
    monkeypatch.setattr(load, "Telemetry", partial(Telemetry, period_s=0.05))
    spec = workload(shared_prefix_tokens=64)
    requests = build_requests(spec, tokenize_corpus(running.base_url, "m", TEXT), draw=0)
    running.reset_prefix_cache()
    found = measure_load(
        running.base_url, "m", spec, Load(4), requests, tmp_path / "c4.parquet",
        devices=2, price_usd_per_device_hour=1.0,
    )  # fmt: skip
    assert (found.completed, found.failed) == (12, 0), found.error_examples
    metrics = found.metrics
    assert metrics["preemptions"] == 0 and metrics["kv_cache_usage_max"] is not None
    assert metrics["queue_time_mean_ms"] is not None and 0.2 < (metrics["spec_acceptance_rate"] or 0) < 0.8
    assert 0.2 < (metrics["prefix_cache_hit_rate"] or 0) <= found.shared_prefix_share + 0.01
    sent = [*requests.max_tokens[:12], *requests.max_tokens[12 : 12 + found.summary["counts"]["warmup"]]]
    assert found.engine.generation_tokens == sum(sent)


def test_quality_is_measured_as_stated(running: Server, tmp_path: Path) -> None:
    corpus = tokenize_corpus(running.base_url, "m", TEXT)
    spec = QualitySpec(num_prompts=6, prompt_tokens=128)
    assert bos_token_id(running.base_url, "m") == 1
    prompts = quality_prompts(corpus, spec, bos_token_id=1)
    fp8 = measure_logprobs(running.base_url, "m", prompts, spec)
    again = measure_logprobs(running.base_url, "m", prompts, replace(spec, concurrency=1))
    assert compare(fp8, again).quality_kl == 0.0
    with server(tmp_path) as reference:
        plain = measure_logprobs(reference.base_url, "m", prompts, spec)
    assert 0.004 < compare(plain, fp8).quality_kl < 0.011


def test_a_request_beyond_the_context_is_refused(running: Server) -> None:
    body = json.dumps({"model": "m", "prompt": [5] * 4000, "max_tokens": 200}).encode()
    request = urllib.request.Request(f"{running.base_url}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=10)


def test_clients_that_hang_up_leave_nothing_behind(running: Server) -> None:
    body = json.dumps({"model": "m", "prompt": [5] * 50, "max_tokens": 4000, "stream": True}).encode()
    request = urllib.request.Request(f"{running.base_url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.readline()
    for _ in range(50):
        samples = scrape(running.base_url)
        assert samples is not None
        if not sum(samples["vllm:num_requests_running"]):
            return
    pytest.fail("the request is still running")


def seed_of(crash: str) -> int:
    """A seed under which the region of FP8 weights crashes like that."""
    engine, hardware = EngineConfig("m", {"quantization": "fp8"}, {}), HardwareConfig(**HARDWARE)
    for seed in itertools.count():
        settings = SimulationConfig(times="roofline", crash_share=1.0, seed=seed)
        if simulate(engine, ModelConfig(**MODEL), hardware, settings, "").crash == crash:
            return seed
    raise AssertionError


@pytest.mark.parametrize(
    ("crash", "cause"),
    [
        (None, FailureCause.out_of_memory),
        ("startup", FailureCause.died_at_startup),
        ("first_request", FailureCause.first_request_failed),
    ],
)
def test_what_fails_to_start_fails_by_cause(tmp_path: Path, crash: str | None, cause: FailureCause) -> None:
    args = {"gpu_memory_utilization": 0.2} if crash is None else {"quantization": "fp8"}
    failing = server(tmp_path, args, crash_share=1.0, seed=0 if crash is None else seed_of(crash))
    try:
        with pytest.raises(LaunchFailure) as caught:
            failing.start()
        assert caught.value.cause is cause, caught.value
    finally:
        failing.stop()
    assert not psutil.pid_exists(failing.pid)


def test_an_engine_that_dies_under_load_is_found_dead(tmp_path: Path) -> None:
    spec = workload()
    with server(tmp_path, {"quantization": "fp8"}, crash_share=1.0, seed=seed_of("load")) as dying:
        requests = build_requests(spec, tokenize_corpus(dying.base_url, "m", TEXT), draw=0)
        found = measure_load(
            dying.base_url, "m", spec, Load(4), requests, tmp_path / "c4.parquet",
            devices=1, price_usd_per_device_hour=1.0,
        )  # fmt: skip
        death = dying.died()
    assert found.failed > 0 and death is not None and death.cause is FailureCause.engine_died
    assert "simulated crash region" in death.detail


settings = st.dictionaries(
    st.from_regex(r"[a-mo-z][a-z_]{0,12}[a-z]", fullmatch=True),
    st.booleans() | st.integers(0, 10**6) | st.sampled_from(["fp8", "FLASH_ATTN", "org/model"]) | st.just({"a": 1}),
    max_size=5,
)


@given(settings)
def test_arguments_are_read_as_they_are_written(args: dict[str, Any]) -> None:
    assert parse_arguments(EngineConfig("m", args, {}).argv()) == args


@given(st.lists(st.integers(0, 100), max_size=80), st.integers(0, 79))
def test_blocks_are_equal_as_far_as_prompts_are(tokens: list[int], changed: int) -> None:
    other = [*tokens]
    if changed < len(tokens):
        other[changed] += 1
    same = min(changed, len(tokens)) // 16
    assert len(block_keys(tokens)) == len(tokens) // 16
    assert block_keys(tokens)[:same] == block_keys(other)[:same]
    assert changed >= len(tokens) // 16 * 16 or block_keys(tokens)[same] != block_keys(other)[same]


def test_text_is_cut_the_same_way_anywhere() -> None:
    assert tokenize("hello world", special=True)[1:] == tokenize("hello", special=False) + tokenize(
        " world", special=False
    )
    assert len(set(tokenize("all these words differ", special=False))) >= 5
