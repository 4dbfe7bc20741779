from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.errors import ConfigError
from sweep.measure.draws import HELD_OUT_DRAW
from sweep.measure.outline import make_outline
from sweep.measure.workload import WorkloadSpec

TURNS = {"kind": "uniform", "low": 1, "high": 8}


def workload(**changes: Any) -> WorkloadSpec:
    base: dict[str, Any] = {
        "name": "test",
        "prompt_tokens": {"kind": "uniform", "low": 5, "high": 40},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 20},
        "num_requests": 60,
        "warmup_requests": 3,
        "loads": {"concurrency": [4]},
    }
    return WorkloadSpec.from_dict(base | changes)


def talk(**changes: Any) -> WorkloadSpec:
    return workload(conversation={"turns": TURNS, "max_tokens": 300} | changes, shared_prefix_tokens=30)


@given(st.integers(0, 2**32), st.integers(4, 12), st.sampled_from([0, 1, 5, HELD_OUT_DRAW]))
@settings(max_examples=40, deadline=None)
def test_a_turn_extends_the_former_one_by_its_answer_and_more(seed: int, at_once: int, draw: int) -> None:
    spec = workload(
        conversation={"turns": TURNS, "max_tokens": 300, "at_once": at_once}, shared_prefix_tokens=30, seed=seed
    )
    made = make_outline(spec, draw)
    n = len(made.max_tokens)
    assert n == 60 + made.warmup and made.warmup == made.fixed_warmup == at_once
    assert made.text_ids.max() < made.texts
    latest: dict[int, int] = {}
    for i in range(n):
        text = int(made.text_ids[i])
        assert 30 + made.own_tokens[i] + made.max_tokens[i] <= 300
        assert made.after[i] == latest.get(text, -1)
        if text in latest:
            former = latest[text]
            added = made.own_tokens[i] - made.own_tokens[former] - made.max_tokens[former]
            assert 5 <= added <= 40
            assert (made.class_ids[i], made.prefix_ids[i]) == (made.class_ids[former], made.prefix_ids[former])
        latest[text] = i


def test_at_most_so_many_conversations_are_under_way_and_nobody_is_ahead() -> None:
    made = make_outline(talk(at_once=6), 0)
    for start in range(0, len(made.text_ids) - 6, 6):  # a round: everybody's turn, once
        assert len(set(made.text_ids[start : start + 6].tolist())) == 6


def test_a_draw_begins_in_the_middle_of_conversations() -> None:
    spec = workload(
        conversation={"turns": {"value": 10}, "max_tokens": 10_000, "at_once": 200},
        num_requests=2000,
        warmup_requests=0,
    )
    made = make_outline(spec, 0)
    rounds = made.own_tokens.reshape(-1, 200).mean(axis=1)
    assert rounds.std() / rounds.mean() < 0.08  # no growth from short histories to long ones
    assert rounds.mean() == pytest.approx(22.5 * 5.5 + 10.5 * 4.5, rel=0.1)


def test_warmup_holds_what_the_busiest_load_needs() -> None:
    def warmup(**changes: Any) -> tuple[int, int]:
        made = make_outline(workload(**changes), 0)
        return made.warmup, made.fixed_warmup

    assert warmup() == (4, 0)
    assert warmup(warmup_requests=12) == (12, 0)
    assert warmup(loads={"request_rate_rps": [1.0]}) == (60, 0)
    azure = {"file": "azure_conv_2023"}
    assert warmup(trace=azure, loads={"rate_scale": [1]}) == (3, 3)
    assert warmup(trace=azure | {"sampling": "bootstrap"}, loads={"request_rate_rps": [1.0]}) == (60, 0)
    assert warmup(conversation={"turns": TURNS, "max_tokens": 300}) == (4, 4)
    assert warmup(conversation={"turns": TURNS, "max_tokens": 300}, loads={"request_rate_rps": [1.0]}) == (16, 16)


def test_classes_have_their_shares_lengths_and_prefixes() -> None:
    spec = workload(
        num_requests=4000,
        classes={
            "chat": {"share": 3, "shared_prefix_tokens": 7, "num_shared_prefixes": 2},
            "batch": {"share": 1, "output_tokens": {"value": 99}, "shared_prefix_tokens": 9},
        },
    )
    made = make_outline(spec, 0)
    assert (made.class_ids == 0).mean() == pytest.approx(0.75, abs=0.03)
    assert set(made.max_tokens[made.class_ids == 1].tolist()) == {99}
    assert made.max_tokens[made.class_ids == 0].max() == 20
    assert set(made.prefix_ids[made.class_ids == 0].tolist()) == {0, 1}
    assert set(made.prefix_ids[made.class_ids == 1].tolist()) == {2}


def test_rows_of_a_trace_are_taken_as_pairs_and_cut() -> None:
    trace, kinds = {"file": "azure_conv_2023"}, {"kind": "trace"}
    spec = workload(trace=trace, prompt_tokens=kinds | {"high": 1000}, output_tokens=kinds, loads={"rate_scale": [1]})
    made = make_outline(spec, 0)
    assert spec.trace is not None
    rows = spec.trace.rows(63, 0, 0)
    assert rows.prompt_tokens is not None and rows.timestamps_s is not None and made.arrivals_s is not None
    assert np.array_equal(made.own_tokens, np.minimum(rows.prompt_tokens, 1000))
    assert np.array_equal(made.max_tokens, rows.output_tokens)
    assert made.arrivals_s[3] == 0 and made.arrivals_s[0] < 0
    assert np.allclose(np.diff(made.arrivals_s), np.diff(rows.timestamps_s))


def test_measured_first_renumbers_what_refers_to_requests() -> None:
    made = make_outline(talk(at_once=5), 0)
    turned = made.measured_first()
    w, n = made.warmup, len(made.max_tokens)
    for i in range(n):
        place = (i - w) % n
        assert turned.own_tokens[place] == made.own_tokens[i]
        before = made.after[i]
        assert turned.after[place] == (-1 if before < 0 else (before - w) % n)


def test_conversations_that_never_get_a_second_turn_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens=60 is less than one turn"):
        talk(max_tokens=60)
