from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.errors import ConfigError
from sweep.measure.workload import (
    UNIQUE_TOKENS,
    LengthDistribution,
    Load,
    RequestSet,
    WorkloadSpec,
    build_requests,
    corpus_text,
    tokenize_corpus,
)


def workload(**changes: Any) -> WorkloadSpec:
    base: dict[str, Any] = {
        "name": "test",
        "prompt_tokens": {"kind": "uniform", "low": 3, "high": 40},
        "output_tokens": {"kind": "fixed", "value": 4},
        "num_requests": 20,
        "warmup_requests": 3,
        "loads": {"concurrency": [4]},
    }
    return WorkloadSpec.from_dict(base | changes)


def corpus(seed: int = 0, n: int = 3000, vocabulary: int = 30) -> np.ndarray[Any, Any]:
    """Text-like: few different tokens, and a stretch that occurs twice."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, n)
    tokens[n // 2 : n // 2 + n // 15] = tokens[: n // 15]
    return tokens


@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_the_same_draw_is_the_same_and_others_share_no_beginning(seed: int, draw: int, corpus_seed: int) -> None:
    spec, text = workload(seed=seed), corpus(corpus_seed)
    one, again, other = (build_requests(spec, text, draw=d) for d in (draw, draw, draw + 1))
    assert one.checksum == again.checksum != other.checksum
    beginnings = [tuple(r[i].prompt_token_ids[:UNIQUE_TOKENS]) for r in (one, other) for i in range(len(r))]
    long = [b for b in beginnings if len(b) == UNIQUE_TOKENS]
    assert long and len(set(long)) == len(long)


def test_prompts_are_slices_of_the_corpus_with_the_drawn_lengths() -> None:
    text = corpus()
    requests = build_requests(workload(), text, draw=0)
    doubled = ",".join(map(str, [*text, *text]))
    for i in range(len(requests)):
        prompt = requests[i].prompt_token_ids
        assert 3 <= len(prompt) <= 40
        assert ",".join(map(str, prompt)) in doubled
        assert requests[i].max_tokens == 4


def test_a_prompt_longer_than_the_corpus_continues_at_its_beginning() -> None:
    text = np.arange(50)
    spec = workload(prompt_tokens={"kind": "fixed", "value": 120}, num_requests=2, loads={"concurrency": [1]})
    prompt = build_requests(spec, text, draw=0)[0].prompt_token_ids
    assert len(prompt) == 120
    assert np.array_equal(prompt, (prompt[0] + np.arange(120)) % 50)


def test_the_warmup_pool_serves_the_busiest_load() -> None:
    assert build_requests(workload(loads={"concurrency": [2, 9]}), corpus(), draw=0).num_warmup == 9
    assert build_requests(workload(warmup_requests=12), corpus(), draw=0).num_warmup == 12
    assert build_requests(workload(loads={"request_rate_rps": [1.0]}), corpus(), draw=0).num_warmup == 20


def test_measured_requests_do_not_depend_on_who_builds_them() -> None:
    code = (
        "import numpy as np; from sweep.measure.workload import *;"
        "spec = WorkloadSpec.from_dict({'name': 't', 'prompt_tokens': {'kind': 'lognormal', 'median': 9, 'sigma': 1,"
        " 'high': 50}, 'output_tokens': {'kind': 'empirical', 'values': [1, 5]}, 'num_requests': 50});"
        "print(build_requests(spec, np.random.default_rng(0).integers(0, 99, 5000), draw=3).checksum)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1


def test_shared_prefixes_come_before_the_own_text() -> None:
    spec = workload(shared_prefix_tokens=16, num_shared_prefixes=2, num_requests=30)
    requests = build_requests(spec, corpus(n=6000, vocabulary=500), draw=0)
    prompts = [requests[i].prompt_token_ids for i in range(len(requests))]
    assert len({tuple(p[:16]) for p in prompts}) == 2
    own = [tuple(p[16 : 16 + UNIQUE_TOKENS]) for p in prompts]
    assert len(set(own)) == len(own)
    repeated = 16 * (len(prompts) - 2)
    assert requests.shared_prefix_share == pytest.approx(repeated / sum(len(p) for p in prompts))
    assert build_requests(workload(), corpus(), draw=0).shared_prefix_share == 0.0


def test_a_corpus_too_short_for_the_draw_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"num_requests=20 .* needs 240 distinct prompts for draw 9"):
        build_requests(workload(), corpus(n=150), draw=9)


def test_request_sets_survive_the_disk(tmp_path: Path) -> None:
    requests = build_requests(workload(shared_prefix_tokens=8), corpus(n=6000, vocabulary=500), draw=1)
    requests.save(tmp_path / "set.npz")
    loaded = RequestSet.load(tmp_path / "set.npz")
    assert loaded.checksum == requests.checksum
    assert loaded.num_measured == 20
    assert loaded.shared_prefix_share == requests.shared_prefix_share > 0


def test_the_checksum_sees_a_changed_token_and_a_moved_boundary() -> None:
    requests = build_requests(workload(), corpus(), draw=0)
    tokens = requests.token_ids.copy()
    tokens[5] += 1
    moved = requests.starts.copy()
    moved[1] += 1
    changed = [
        RequestSet(tokens, requests.starts, requests.max_tokens, 20),
        RequestSet(requests.token_ids, moved, requests.max_tokens, 20),
        RequestSet(requests.token_ids, requests.starts, requests.max_tokens + 1, 20),
        RequestSet(requests.token_ids, requests.starts, requests.max_tokens, 19),
    ]
    assert len({requests.checksum, *(c.checksum for c in changed)}) == 5


@given(
    st.sampled_from(
        [
            LengthDistribution("fixed", value=7),
            LengthDistribution("uniform", low=2, high=9),
            LengthDistribution("lognormal", median=50, sigma=2.0, low=5, high=60),
            LengthDistribution("empirical", values=(1, 4, 100), high=50),
        ]
    ),
    st.integers(0, 1000),
)
def test_lengths_stay_inside_their_bounds(lengths: LengthDistribution, seed: int) -> None:
    lengths.validate("x")
    drawn = lengths.sample(np.random.default_rng(seed), 200)
    assert drawn.dtype == np.int64
    assert drawn.min() >= (lengths.low or 1)
    assert drawn.max() <= (lengths.high or 100)


def test_lognormal_lengths_have_the_median_and_sigma_asked() -> None:
    lengths = LengthDistribution("lognormal", median=1020, sigma=0.769, high=10**6)
    drawn = lengths.sample(np.random.default_rng(0), 100_000)
    assert np.median(drawn) == pytest.approx(1020, rel=0.01)
    assert np.quantile(drawn, 0.9) == pytest.approx(2734, rel=0.02)  # the trace the numbers come from


@pytest.mark.parametrize(
    ("changes", "named", "fix"),
    [
        ({"prompt_tokens": {"kind": "lognormal", "median": 5, "sigma": 1}}, "workload.prompt_tokens.high", "needs"),
        ({"prompt_tokens": {"kind": "normal"}}, "workload.prompt_tokens.kind='normal'", "lognormal"),
        ({"output_tokens": {"kind": "fixed"}}, "workload.output_tokens.value", "output_tokens.value="),
        ({"output_tokens": {"kind": "uniform", "low": 0, "high": 4}}, "workload.output_tokens.low=0", "at least 1"),
        ({"output_tokens": {"kind": "uniform", "low": 8, "high": 4}}, "workload.output_tokens.high=4", "8"),
        ({"output_tokens": {"kind": "empirical", "values": []}}, "workload.output_tokens.values", "needs"),
        ({"output_tokens": {"kind": "empirical", "values": [0]}}, "workload.output_tokens.values=(0,)", "1 token"),
        ({"output_tokens": {"kind": "fixed", "value": 9, "high": 8}}, "workload.output_tokens.value=9", "8"),
        ({"output_tokens": {"knd": "fixed"}}, "workload.output_tokens.knd", "'kind'"),
        ({"num_request": 3}, "workload.num_request is unknown", "'num_requests'"),
        ({"num_requests": 0}, "workload.num_requests=0", "1 or more"),
        ({"max_load_s": -1}, "workload.max_load_s=-1", "above 0"),
        ({"slo_ttft_ms": 0}, "workload.slo_ttft_ms=0", "above 0"),
        ({"loads": {"concurrency": [0]}}, "workload.loads.concurrency=0", "at least 1"),
        ({"loads": {"request_rate_rps": [2.0], "burstiness": 0}}, "workload.loads.burstiness=0", "Poisson"),
        ({"num_requests": "many"}, "wrong type", ""),
    ],
)
def test_mistakes_name_field_value_and_fix(changes: dict[str, Any], named: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        workload(**changes)
    assert named in error.value.message
    assert fix in (error.value.hint or "")


def test_a_load_is_closed_or_open_never_both() -> None:
    for concurrency, rate in ((None, None), (3, 2.0)):
        with pytest.raises(ConfigError, match="exactly one"):
            Load(concurrency, rate)


def test_loads_have_distinct_labels_and_survive_a_dict() -> None:
    loads = [Load(8), Load(None, 2), Load(None, 0.5), Load(None, 2.0, 0.25)]
    assert [load.label for load in loads] == ["c8", "r2", "r0.5", "r2b0.25"]
    assert [Load.from_dict(load.to_dict()) for load in loads] == loads


def test_the_ladder_is_busiest_first() -> None:
    spec = workload(loads={"concurrency": [1, 8, 8, 4], "request_rate_rps": [1, 2], "burstiness": 0.5})
    assert [load.label for load in spec.loads] == ["c8", "c4", "c1", "r2b0.5", "r1b0.5"]


def test_the_corpus_is_tokenized_in_pieces_that_join_to_the_whole(scripted_server: Any) -> None:
    text = corpus_text()
    assert len(text) > 1_000_000
    tokens = tokenize_corpus(scripted_server.base_url, "m", text[:120_000])
    assert "".join(map(chr, tokens)) == text[:120_000]


def test_a_server_that_cannot_tokenize_is_a_failure_with_a_cause(scripted_server: Any) -> None:
    with pytest.raises(LaunchFailure, match="404") as failure:
        tokenize_corpus(scripted_server.base_url + "/nowhere", "m", "text")
    assert failure.value.cause is FailureCause.first_request_failed
