"""The load client on a real vLLM server: exact tokens, cold and warm prefix cache, vLLM's own bench beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from real_server import small_server

from sweep.engine.server import Server
from sweep.measure.load import LoadResult, measure_load
from sweep.measure.vllm_bench import run_vllm_bench
from sweep.measure.workload import (
    LengthDistribution,
    Load,
    RequestSet,
    TokenArray,
    WorkloadSpec,
    build_requests,
    corpus_text,
    tokenize_corpus,
)

pytestmark = pytest.mark.engine

CLOSED, OPEN = Load(4), Load(None, 3.0)
SPEC = WorkloadSpec(
    "engine-test",
    prompt_tokens=LengthDistribution("fixed", value=160),
    output_tokens=LengthDistribution("fixed", value=16),
    num_requests=24,
    warmup_requests=4,
    max_load_s=200,
    loads=(CLOSED, OPEN),
    slo_ttft_ms=60_000,
)


@pytest.fixture(scope="module")
def server(smollm2: Path, engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("client")
    with small_server(smollm2, engine_python, folder, max_model_len=1024) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(server: Server) -> TokenArray:
    return tokenize_corpus(server.base_url, server.served_model, corpus_text()[:100_000])


def measure(server: Server, requests: RequestSet, load: Load, folder: Path, spec: WorkloadSpec = SPEC) -> LoadResult:
    return measure_load(
        server.base_url, server.served_model, spec, load, requests, folder / f"{load.label}.parquet",
        price_usd_per_device_hour=1.0, devices=1,
    )  # fmt: skip


def test_closed_loop_counts_every_token_and_agrees_with_vllm_bench(
    server: Server, corpus: TokenArray, smollm2: Path, engine_python: str, tmp_path: Path
) -> None:
    requests = build_requests(SPEC, corpus, draw=0)
    server.reset_prefix_cache()
    cold = measure(server, requests, CLOSED, tmp_path)
    table = pq.read_table(cold.raw).to_pylist()
    assert (cold.completed, cold.failed, cold.warmup_failed) == (24, 0, 0)
    assert {(row["prompt_tokens"], row["output_tokens"]) for row in table} == {(160, 16)}
    assert all(sum(row["chunk_tokens"]) == 16 for row in table)
    assert cold.engine.generation_tokens == 16 * len(table)
    assert cold.engine.prompt_tokens == 160 * len(table)
    assert cold.metrics["prefix_cache_hit_rate"] == 0.0
    assert cold.metrics["preemptions"] == 0.0
    assert cold.engine.running_max is not None and cold.engine.running_max <= 4
    assert cold.metrics["goodput_rps"] == cold.metrics["request_throughput_rps"]
    assert cold.metrics["ttft_p99_ms"] is None  # 24 requests have no 99th percentile
    assert cold.summary["window_rule"] == "steady"

    bench = run_vllm_bench(
        server.base_url, server.served_model, python=engine_python, tokenizer=str(smollm2), concurrency=4,
        num_requests=24, prompt_tokens=160, output_tokens=16, warmup_requests=4,
    )  # fmt: skip
    assert (bench["requests_completed"], bench["requests_failed"]) == (24, 0)
    assert bench["total_output_tokens"] == 24 * 16
    for name in ("output_throughput_tok_s", "tpot_p50_ms", "ttft_p50_ms", "e2e_p50_ms"):
        ours, theirs = cold.metrics[name], bench[name]
        assert ours is not None and theirs is not None
        assert 1 / 3 < ours / theirs < 3, f"{name}: {ours} here, {theirs} by vLLM"

    again = measure(server, requests, CLOSED, tmp_path)  # the same draw on a warm cache: the counter must show it
    hit_rate = again.metrics["prefix_cache_hit_rate"]
    assert hit_rate is not None and hit_rate > 0.5


def test_open_loop_arrives_on_time_and_is_complete(server: Server, corpus: TokenArray, tmp_path: Path) -> None:
    requests = build_requests(SPEC, corpus, draw=1)
    result = measure(server, requests, OPEN, tmp_path)
    table = [row for row in pq.read_table(result.raw).to_pylist() if row["phase"] == "measured"]
    assert (result.completed, result.failed) == (24, 0)
    assert {row["output_tokens"] for row in table} == {16}
    assert all(row["sent_s"] >= row["due_s"] for row in table)
    assert result.metrics["prefix_cache_hit_rate"] == 0.0  # no draw shares a beginning with another
    assert result.metrics["tpot_p50_ms"] is not None


def test_answers_cut_short_by_the_context_and_refused_prompts_are_errors(
    server: Server, corpus: TokenArray, tmp_path: Path
) -> None:
    """vLLM lowers max_tokens to what fits the context without a word, and refuses only a prompt that does not fit."""
    for prompt_tokens, words in ((1020, "asked for 16 tokens, got 4"), (1030, "HTTP 400")):
        spec = replace(
            SPEC,
            prompt_tokens=LengthDistribution("fixed", value=prompt_tokens),
            num_requests=2,
            warmup_requests=1,
            loads=(Load(1),),
        )
        result = measure(server, build_requests(spec, corpus, draw=0), Load(1), tmp_path, spec)
        assert (result.completed, result.failed, result.warmup_failed) == (0, 2, 1)
        assert result.first_error is not None and words in result.first_error
        assert result.metrics["output_throughput_tok_s"] is None and result.metrics["cost_usd_per_mtok"] is None
