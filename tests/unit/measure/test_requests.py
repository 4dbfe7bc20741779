from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.errors import ConfigError
from sweep.measure.requests import RequestSet, build_requests
from sweep.measure.workload import HELD_OUT_DRAW, UNIQUE_TOKENS, WorkloadSpec


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


def corpus(seed: int = 0, n: int = 6000, vocabulary: int = 30) -> np.ndarray[Any, Any]:
    """Text-like: few different tokens, and a stretch that occurs twice."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, n)
    tokens[n // 2 : n // 2 + n // 15] = tokens[: n // 15]
    return tokens


def prompts(requests: RequestSet) -> list[list[int]]:
    return [list(requests[i].prompt) for i in range(len(requests))]  # type: ignore[arg-type]


def by_hand(sent: list[list[Any]]) -> float:
    """The hit rate of an infinite cache of one-token blocks that has seen every earlier prompt."""
    seen: set[tuple[Any, ...]] = set()
    hits = 0
    for prompt in sent:
        beginnings = [tuple(prompt[:k]) for k in range(1, len(prompt) + 1)]
        hits += sum(b in seen for b in beginnings)
        seen.update(beginnings)
    return hits / sum(map(len, sent))


@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_the_same_draw_is_the_same_and_others_share_no_beginning(seed: int, draw: int, corpus_seed: int) -> None:
    spec, text = workload(seed=seed), corpus(corpus_seed)
    one, again, other, held = (build_requests(spec, text, draw=d) for d in (draw, draw, draw + 1, HELD_OUT_DRAW))
    assert one.checksum == again.checksum
    assert len({r.checksum for r in (one, other, held)}) == 3
    beginnings = [tuple(p[:UNIQUE_TOKENS]) for r in (one, other, held) for p in prompts(r)]
    long = [b for b in beginnings if len(b) == UNIQUE_TOKENS]
    assert long and len(set(long)) == len(long)


def test_prompts_are_slices_of_the_corpus_with_the_drawn_lengths() -> None:
    text = corpus()
    requests = build_requests(workload(), text, draw=0)
    doubled = ",".join(map(str, [*text, *text]))
    for prompt in prompts(requests):
        assert 3 <= len(prompt) <= 40
        assert ",".join(map(str, prompt)) in doubled
    assert set(requests.max_tokens.tolist()) == {4}


def test_random_text_has_the_corpus_tokens_in_no_order_and_the_same_for_every_configuration() -> None:
    text = np.arange(6000)
    real, one, again = (build_requests(workload(text=t), text, draw=0) for t in ("corpus", "random", "random"))
    follows = [b - a for p in prompts(one) for a, b in pairwise(p)]
    assert follows.count(1) < 5 and all(b - a in (1, -5999) for p in prompts(real) for a, b in pairwise(p))
    assert one.checksum == again.checksum and set(np.concatenate(prompts(one))) <= set(text)
    with pytest.raises(ConfigError, match=r"workload\.text=lorem"):
        workload(text="lorem")


def test_a_prompt_longer_than_the_corpus_continues_at_its_beginning() -> None:
    text = np.arange(50)
    spec = workload(prompt_tokens={"kind": "fixed", "value": 120}, num_requests=2, loads={"concurrency": [1]})
    prompt = np.array(prompts(build_requests(spec, text, draw=0))[0])
    assert len(prompt) == 120
    assert np.array_equal(prompt, (prompt[0] + np.arange(120)) % 50)


CASES: dict[str, dict[str, Any]] = {
    "lognormal": {"prompt_tokens": {"kind": "lognormal", "median": 9, "sigma": 1, "high": 50}},
    "trace": {"trace": {"file": "azure_conv_2023"}, "prompt_tokens": {"kind": "trace"}, "loads": {"rate_scale": [1]}},
    "blocks": {"trace": {"file": "mooncake_conversation", "length_scale": 0.03125, "keep_share": 0.5},
               "prompt_tokens": {"kind": "trace"}, "output_tokens": {"kind": "trace"}, "num_requests": 30},
    "mixture": {"trace": {"file": "servegen_deepseek_r1"}, "prompt_tokens": {"kind": "trace"},
                "classes": {"a": {}, "b": {"temperature": 0.5}}},
    "talk": {"conversation": {"turns": {"kind": "uniform", "low": 1, "high": 6}, "max_tokens": 200},
             "shared_prefix_tokens": 10},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_requests_do_not_depend_on_who_builds_them(case: str) -> None:
    code = (
        "import json, sys, numpy as np; from sweep.measure.workload import *;"
        "base = {'name': 't', 'output_tokens': {'value': 3}, 'prompt_tokens': {'value': 9}, 'num_requests': 50};"
        "spec = WorkloadSpec.from_dict(base | json.loads(sys.argv[1]));"
        "text = np.random.default_rng(0).integers(0, 99, 50000);"
        "print(*(build_requests(spec, text, draw=d).checksum for d in (0, 3, HELD_OUT_DRAW)))"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(CASES[case])],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1
    assert len(set(prints.pop().split())) == 3


def test_shared_prefixes_come_before_the_own_text() -> None:
    spec = workload(shared_prefix_tokens=16, num_shared_prefixes=2, num_requests=30)
    requests = build_requests(spec, corpus(n=9000, vocabulary=500), draw=0)
    sent = prompts(requests)
    assert len({tuple(p[:16]) for p in sent}) == 2
    own = [tuple(p[16 : 16 + UNIQUE_TOKENS]) for p in sent]
    assert len(set(own)) == len(own)
    repeated = 16 * (len(sent) - 2) / sum(map(len, sent))
    assert repeated <= requests.shared_prefix_share <= repeated + 0.05  # own texts may begin alike by chance
    assert requests.shared_prefix_share == pytest.approx(by_hand(sent))
    assert build_requests(workload(), corpus(vocabulary=10**6), draw=0).shared_prefix_share == 0.0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.data())
def test_the_shared_prefix_share_is_the_hit_rate_of_an_infinite_cache(sent: list[list[int]], data: Any) -> None:
    ends = np.cumsum([len(p) for p in sent])
    tokens = np.concatenate([np.array(p) for p in sent])
    requests = RequestSet(tokens.astype(np.int32), np.r_[0, ends], np.ones(len(sent), dtype=np.int64), len(sent))
    assert requests.shared_prefix_share == pytest.approx(by_hand(sent))
    chosen = data.draw(st.lists(st.integers(0, len(sent) - 1), unique=True, min_size=1))
    assert requests.prefix_share(chosen) == pytest.approx(by_hand([sent[i] for i in chosen]))


@given(st.integers(0, 999), st.sampled_from([0, 1, HELD_OUT_DRAW]), st.sampled_from([0.03125, 0.125]))
@settings(max_examples=15, deadline=None)
def test_prompts_share_exactly_what_the_rows_of_the_trace_share(seed: int, draw: int, scale: float) -> None:
    spec = workload(
        trace={"file": "mooncake_synthetic", "length_scale": scale, "keep_share": 0.25},
        prompt_tokens={"kind": "trace"}, output_tokens={"kind": "trace"}, num_requests=190, seed=seed,
    )  # fmt: skip
    requests = build_requests(spec, corpus(n=40_000, vocabulary=5000), draw=draw)
    assert spec.trace is not None
    rows = spec.trace.rows(194, draw, seed)
    assert rows.prompt_tokens is not None
    lengths = np.diff(requests.starts)
    assert np.array_equal(np.roll(lengths, 4), rows.prompt_tokens)  # the first four are the warm-up
    by_chance = UNIQUE_TOKENS / rows.prompt_tokens.mean()
    assert 0 <= requests.shared_prefix_share - rows.reuse_share() < by_chance
    assert rows.reuse_share() > 0.3


def test_every_turn_begins_with_the_whole_former_prompt() -> None:
    spec = workload(
        conversation={"turns": {"kind": "uniform", "low": 2, "high": 6}, "max_tokens": 250},
        shared_prefix_tokens=12, num_shared_prefixes=2, num_requests=80,
    )  # fmt: skip
    requests = build_requests(spec, corpus(n=20_000, vocabulary=5000), draw=0)
    sent, after = prompts(requests), requests.after
    assert after is not None and (after >= 0).sum() > 40
    for i, before in enumerate(after.tolist()):
        if before >= 0:
            assert sent[i][: len(sent[before])] == sent[before]
            assert len(sent[i]) >= len(sent[before]) + requests.max_tokens[before] + 3
    assert requests.shared_prefix_share == pytest.approx(by_hand(sent))
    order = [*range(80, len(requests)), *range(80)]
    place = {index: k for k, index in enumerate(order)}
    assert all(place[b] < place[i] for i, b in enumerate(after.tolist()) if b >= 0)


def test_the_users_own_text_is_sent_as_it_is(tmp_path: Path) -> None:
    rows = [{"prompt": f"Wörter {i % 3} und {i}", "output_tokens": i + 1, "conversation": i % 5} for i in range(40)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    spec = workload(trace={"file": str(path)}, prompt_tokens={"kind": "trace"}, output_tokens={"kind": "trace"},
                    num_requests=10, warmup_requests=2, loads={"concurrency": [2]})  # fmt: skip
    requests = build_requests(spec, corpus(), draw=1)
    texts = [str(requests[i].prompt) for i in range(len(requests))]
    expected = [*rows[14:24], *rows[12:14]]
    assert texts == [row["prompt"] for row in expected]
    assert requests.max_tokens.tolist() == [row["output_tokens"] for row in expected]
    assert requests.shared_prefix_share == pytest.approx(by_hand([list(t.encode()) for t in texts]))
    assert requests.after is not None and requests.after.tolist()[3:6] == [10, 11, 0]
    assert spec.longest_request_tokens is None


def test_a_corpus_too_short_for_the_draw_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"num_requests=20 .* needs 24 distinct texts a draw; .*left for draw 9"):
        build_requests(workload(), corpus(n=200), draw=9)
    with pytest.raises(ConfigError, match=r"different blocks; the corpus of 60 tokens"):
        spec = workload(trace={"file": "mooncake_synthetic"}, prompt_tokens={"kind": "trace"})
        build_requests(spec, corpus(n=60), draw=0)


@pytest.mark.parametrize("case", CASES)
def test_request_sets_survive_the_disk(tmp_path: Path, case: str) -> None:
    requests = build_requests(workload(**CASES[case]), corpus(n=50_000, vocabulary=500), draw=1)
    requests.save(tmp_path / "set.npz")
    loaded = RequestSet.load(tmp_path / "set.npz")
    assert loaded.checksum == requests.checksum
    assert (loaded.num_measured, loaded.fixed_warmup) == (requests.num_measured, requests.fixed_warmup)
    assert [loaded[i] for i in range(3)] == [requests[i] for i in range(3)]
    assert loaded.shared_prefix_share == requests.shared_prefix_share


def test_the_checksum_sees_every_change() -> None:
    requests = build_requests(workload(classes={"a": {}, "b": {}}), corpus(), draw=0)
    tokens, moved = requests.token_ids.copy(), requests.starts.copy()
    tokens[5] += 1
    moved[1] += 1
    n = len(requests)
    values = {name: getattr(requests, name) for name in requests.__dataclass_fields__}
    changes: list[dict[str, Any]] = [
        {"token_ids": tokens}, {"starts": moved}, {"max_tokens": requests.max_tokens + 1}, {"num_measured": 19},
        {"class_ids": np.zeros(n, dtype=np.int64)}, {"class_names": ("a", "c")}, {"temperatures": np.ones(n)},
        {"after": np.zeros(n)}, {"arrivals_s": np.zeros(n)}, {"fixed_warmup": 1},
    ]  # fmt: skip
    changed = [RequestSet(**(values | change)) for change in changes]
    assert len({requests.checksum, *(c.checksum for c in changed)}) == len(changes) + 1
