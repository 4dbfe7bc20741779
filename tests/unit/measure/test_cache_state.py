"""Cold and steady prefix caches: what the warm-up leaves behind, and what is asked once before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sweep.engine.failures import LaunchFailure
from sweep.errors import ConfigError
from sweep.measure.cache_state import ask_once, shared_beginnings, with_cold_warmup
from sweep.measure.workload import RequestSet, WorkloadSpec, build_requests

CORPUS = np.random.default_rng(0).integers(0, 5000, 60_000)


def workload(**changes: Any) -> WorkloadSpec:
    base = {"name": "w", "prompt_tokens": {"kind": "uniform", "low": 20, "high": 60}, "output_tokens": {"value": 4},
            "num_requests": 30, "warmup_requests": 8, "loads": {"concurrency": [4]}}  # fmt: skip
    return WorkloadSpec.from_dict(base | changes)


def prompts(requests: RequestSet) -> list[Any]:
    return [requests[i].prompt for i in range(len(requests))]


def test_a_cold_warm_up_shares_no_beginning_with_what_is_measured() -> None:
    requests = build_requests(workload(shared_prefix_tokens=32, num_shared_prefixes=2), CORPUS, draw=0)
    cold = with_cold_warmup(requests)
    n = requests.num_measured
    assert prompts(cold)[:n] == prompts(requests)[:n]
    for before, after in zip(prompts(requests)[n:], prompts(cold)[n:], strict=True):
        assert sorted(before) == sorted(after) and before != after
    first = {tuple(p[:4]) for p in prompts(cold)[:n]}
    assert first & {tuple(p[:4]) for p in prompts(requests)[n:]}
    assert not first & {tuple(p[:4]) for p in prompts(cold)[n:]}


def test_cold_text_stays_text() -> None:
    text = ["Wie spät ist es? Früh.", "ja", ""]
    encoded = [np.frombuffer(t.encode(), dtype=np.uint8) for t in text]
    starts = np.r_[np.int64(0), np.cumsum([len(e) for e in encoded])]
    requests = RequestSet(np.concatenate(encoded), starts, np.ones(3, dtype=np.int64), 0)
    assert prompts(with_cold_warmup(requests)) == ["t es? Früh.Wie spät is", "aj", ""]


def test_shared_beginnings_are_the_prefixes_of_the_workload() -> None:
    requests = build_requests(workload(shared_prefix_tokens=32, num_shared_prefixes=3), CORPUS, draw=0)
    found = {tuple(p) for p in shared_beginnings(requests)}
    assert found == {tuple(p[:32]) for p in prompts(requests)} and len(found) == 3
    assert shared_beginnings(build_requests(workload(), CORPUS, draw=0)) == []


def test_of_nested_beginnings_the_longest_and_never_a_conversations_own() -> None:
    system, document = list(range(100, 140)), list(range(200, 240))
    texts = [[*system, *document, 1], [*system, *document, 2], [*system, 3], [*system, *document, 1, 9, 9]]
    starts = np.r_[np.int64(0), np.cumsum([len(t) for t in texts])]
    after = np.array([-1, -1, -1, 0])
    requests = RequestSet(np.concatenate(texts).astype(np.int32), starts, np.ones(4, dtype=np.int64), 4, after=after)
    assert [p.tolist() for p in shared_beginnings(requests)] == [[*system, *document]]


def test_beginnings_are_asked_once_each(scripted_server: Any) -> None:
    ask_once(scripted_server.base_url, "m", [np.array([0, 7, 1], dtype=np.int32), np.array([0, 8], dtype=np.int32)], 5)
    assert [(b["prompt"], b["max_tokens"]) for b in scripted_server.bodies] == [([0, 7, 1], 1), ([0, 8], 1)]


def test_a_beginning_that_is_refused_is_a_failure(scripted_server: Any) -> None:
    with pytest.raises(LaunchFailure, match="a shared prefix of 2 tokens was not answered"):
        ask_once(scripted_server.base_url, "m", [np.array([1, 7], dtype=np.int32)], 5)


def test_states_are_checked_where_they_are_written() -> None:
    with pytest.raises(ConfigError, match=r"workload\.cache"):
        workload(cache="hot")
    blocks = {"trace": {"file": "mooncake_conversation"}, "prompt_tokens": {"kind": "trace"}}
    with pytest.raises(ConfigError, match=r"workload\.cache=steady"):
        workload(cache="steady", loads={"rate_scale": [1]}, **blocks)
