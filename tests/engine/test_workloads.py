"""Workloads as in production on a real vLLM server: replayed arrivals, shared prefixes and conversations, own text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from real_server import small_server

from sweep.engine.server import Server
from sweep.measure.load import LoadResult, measure_load
from sweep.measure.workload import (
    RequestSet,
    TokenArray,
    WorkloadSpec,
    build_requests,
    corpus_text,
    tokenize_corpus,
)

pytestmark = pytest.mark.engine

CACHE_BLOCK = 128  # tokens, of vLLM's CPU backend
TRACE = {"kind": "trace"}


@pytest.fixture(scope="module")
def server(smollm2: Path, engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("workloads")
    with small_server(smollm2, engine_python, folder, max_model_len=2048) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(server: Server) -> TokenArray:
    return tokenize_corpus(server.base_url, server.served_model, corpus_text()[:200_000])


def workload(**changes: Any) -> WorkloadSpec:
    base: dict[str, Any] = {"name": "engine-test", "warmup_requests": 2, "max_load_s": 300}
    return WorkloadSpec.from_dict(base | changes)


def measure(server: Server, spec: WorkloadSpec, requests: RequestSet, folder: Path) -> tuple[LoadResult, list[Any]]:
    server.reset_prefix_cache()
    (load,) = spec.loads
    result = measure_load(
        server.base_url, server.served_model, spec, load, requests, folder / f"{load.label}.parquet",
        price_usd_per_device_hour=1.0, devices=1,
    )  # fmt: skip
    assert (result.failed, result.warmup_failed) == (0, 0), result.error_examples
    return result, pq.read_table(result.raw).to_pylist()


def blocks_that_hit(requests: RequestSet, sent: list[int]) -> float:
    """The hit rate of a prefix cache of whole blocks that has every earlier prompt, when requests do not overlap."""
    seen: set[tuple[int, ...]] = set()
    hits = tokens = 0
    for index in sent:
        prompt: list[int] = list(requests[index].prompt)  # type: ignore[arg-type]
        ends = range(CACHE_BLOCK, len(prompt) + 1, CACHE_BLOCK)
        beginnings = [tuple(prompt[:end]) for end in ends]
        usable = [b for b in beginnings if len(b) < len(prompt)]  # the last token is always computed
        hits += CACHE_BLOCK * sum(b in seen for b in usable)
        tokens += len(prompt)
        seen.update(beginnings)
    return hits / tokens


def test_a_piece_of_the_azure_trace_arrives_as_it_was_recorded(
    server: Server, corpus: TokenArray, tmp_path: Path
) -> None:
    spec = workload(
        trace={"file": "azure_conv_2023", "length_scale": 0.05}, prompt_tokens=TRACE | {"low": 4},
        output_tokens=TRACE | {"low": 2}, num_requests=40, loads={"rate_scale": [0.8]}, slo_ttft_ms=60_000,
    )  # fmt: skip
    requests = build_requests(spec, corpus, draw=0)
    result, table = measure(server, spec, requests, tmp_path)
    assert spec.trace is not None and requests.arrivals_s is not None
    rows = spec.trace.rows(42, 0, spec.seed)
    assert rows.timestamps_s is not None
    asked_s = (rows.timestamps_s - rows.timestamps_s[2]) / 0.8
    assert [row["due_s"] for row in table] == pytest.approx(asked_s.tolist(), abs=1e-6)
    assert all(row["sent_s"] >= row["due_s"] for row in table)
    assert [(row["prompt_tokens"], row["output_tokens"]) for row in table] == [
        (len(requests[row["index"]].prompt), requests.max_tokens[row["index"]]) for row in table
    ]
    assert result.summary["window_rule"] == "arrivals"
    assert result.summary["window_s"] == pytest.approx(asked_s[-1])
    achieved_s = np.diff([row["sent_s"] for row in table if row["phase"] == "measured"])
    assert np.corrcoef(achieved_s, np.diff(asked_s[2:]))[0, 1] > 0.9
    assert result.metrics["prefix_cache_hit_rate"] == 0.0 == round(result.shared_prefix_share, 2)


def test_prompts_of_mooncake_blocks_hit_the_prefix_cache_as_their_rows_say(
    server: Server, corpus: TokenArray, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for i in range(30):  # a system prompt, one of three documents, a question of its own
        document = int(rng.integers(3))
        ids = [0, *range(10 * document + 1, 10 * document + 4 + document), 1000 + i]
        length = 512 * (len(ids) - 1) + int(rng.integers(40, 512))
        lines.append({"timestamp": 3000 * (i // 5), "input_length": length, "output_length": 4, "hash_ids": ids})
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    spec = workload(
        trace={"file": str(path), "length_scale": CACHE_BLOCK / 512}, prompt_tokens=TRACE, output_tokens=TRACE,
        num_requests=28, loads={"concurrency": [1]},
    )  # fmt: skip
    requests = build_requests(spec, corpus, draw=0)
    result, table = measure(server, spec, requests, tmp_path)
    assert spec.trace is not None
    recorded = spec.trace.rows(30, 0, spec.seed).reuse_share()
    expected = blocks_that_hit(requests, [row["index"] for row in table])
    assert expected == pytest.approx(recorded)  # blocks of the trace are blocks of the cache here
    assert result.metrics["prefix_cache_hit_rate"] == pytest.approx(expected)
    assert expected <= result.shared_prefix_share < expected + 8 / 400  # tokens that texts share by chance


def test_the_next_turn_finds_the_former_prompt_in_the_cache(server: Server, corpus: TokenArray, tmp_path: Path) -> None:
    spec = workload(
        prompt_tokens={"kind": "uniform", "low": 40, "high": 200},
        output_tokens={"kind": "uniform", "low": 2, "high": 8},
        conversation={"turns": {"kind": "uniform", "low": 2, "high": 6}, "max_tokens": 1200}, num_requests=24,
        loads={"concurrency": [3]},
    )  # fmt: skip
    requests = build_requests(spec, corpus, draw=0)
    result, table = measure(server, spec, requests, tmp_path)
    rows = {row["index"]: row for row in table}
    assert requests.after is not None and sorted(rows) == list(range(27))
    waited = [(i, b) for i, b in enumerate(requests.after.tolist()) if b >= 0]
    assert len(waited) > 12
    assert all(rows[i]["sent_s"] >= rows[b]["end_s"] for i, b in waited)
    expected = blocks_that_hit(requests, [row["index"] for row in table])
    assert expected > 0.3
    assert result.metrics["prefix_cache_hit_rate"] == pytest.approx(expected)
    assert expected <= result.shared_prefix_share < expected + CACHE_BLOCK / 300


def test_the_users_own_log_with_classes_and_answers_that_end_by_themselves(
    server: Server, corpus: TokenArray, tmp_path: Path
) -> None:
    def ask(question: str) -> str:
        return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"

    lines = [
        {"timestamp": 0.4 * i, "prompt": ask(f"What is {i} + 1? Answer with the number only."), "output_tokens": 48,
         "class": "batch" if i % 4 == 0 else "chat"}
        for i in range(14)
    ]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    spec = workload(
        trace={"file": str(path)}, prompt_tokens=TRACE, output_tokens=TRACE, num_requests=12, ignore_eos=False,
        loads={"rate_scale": [1]}, classes={"chat": {"slo_ttft_ms": 60_000}, "batch": {"slo_e2e_ms": 0.001}},
    )  # fmt: skip
    result, table = measure(server, spec, build_requests(spec, corpus, draw=0), tmp_path)
    assert result.completed == 12
    assert all(1 <= row["output_tokens"] <= 48 for row in table)
    assert any(row["output_tokens"] < 48 for row in table)  # it stopped when it was done
    metrics = result.metrics
    assert (metrics["slo_attainment.chat"], metrics["slo_attainment.batch"]) == (1.0, 0.0)
    assert metrics["slo_attainment"] == pytest.approx(9 / 12)
    assert metrics["goodput_rps.batch"] == 0.0 and metrics["ttft_p50_ms.chat"] is not None
    assert metrics["goodput_rps"] == metrics["goodput_rps.chat"]
