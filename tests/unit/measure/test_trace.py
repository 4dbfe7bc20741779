from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.measure.trace import Trace
from sweep.measure.trace_files import read_trace, trace_path


def shipped(name: str) -> Trace:
    trace = read_trace(trace_path(name), 10**6)
    assert isinstance(trace, Trace)
    return trace


def test_reuse_of_a_small_trace_by_hand() -> None:
    trace = Trace(
        prompt_tokens=np.array([1000, 1100, 600]),
        blocks=(np.array([0, 1]), np.array([0, 1, 2]), np.array([0, 3])),
        block_tokens=512,
    )
    assert trace.reuse_share() == pytest.approx((0 + 1024 + 512) / 2700)


def test_the_shipped_samples_reuse_what_their_traces_do() -> None:
    """37.4 % of the whole conversation trace, 65.1 % of the synthetic one (token-weighted, infinite cache)."""
    assert shipped("mooncake_conversation").reuse_share() == pytest.approx(0.366, abs=0.001)
    assert shipped("mooncake_synthetic").reuse_share() == pytest.approx(0.692, abs=0.001)


def test_arrivals_come_off_the_grid_in_their_order() -> None:
    trace = shipped("mooncake_conversation")
    assert trace.timestamps_s is not None
    off = trace.spread(np.random.default_rng(0)).timestamps_s
    assert off is not None and (np.diff(off) >= 0).all()
    moved = off - trace.timestamps_s
    assert moved.min() >= 0 and moved.max() <= 3.01
    assert moved.mean() == pytest.approx(1.5, abs=0.1)
    gaps = np.diff(off)
    assert gaps.std() / gaps.mean() < 1.3 < np.diff(trace.timestamps_s).std() / np.diff(trace.timestamps_s).mean()


@pytest.mark.parametrize("name", ["azure_conv_2023", "mooncake_synthetic", "arxiv_summarization"])
def test_arrivals_recorded_one_by_one_stay_as_they_are(name: str) -> None:
    trace = shipped(name)
    assert trace.spread(np.random.default_rng(0)) is trace


@given(st.floats(0.02, 3.0), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_scaled_lengths_keep_every_block_and_its_share(scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5000, 12)
    blocks = tuple(rng.integers(0, 99, -(-n // 512)) for n in lengths)
    trace = Trace(prompt_tokens=lengths, output_tokens=rng.integers(1, 99, 12), blocks=blocks)
    small = trace.scaled(scale, smallest_block=8)
    assert small.prompt_tokens is not None and small.output_tokens is not None
    assert (-(-small.prompt_tokens // small.block_tokens) == [len(b) for b in blocks]).all()
    assert small.prompt_tokens.sum() == pytest.approx(lengths.sum() * small.block_tokens / 512, abs=12)
    assert small.output_tokens.min() >= 1
    assert small.reuse_share() == pytest.approx(trace.reuse_share(), abs=12 / small.prompt_tokens.sum() + 1e-9)


def test_rows_that_share_a_document_are_a_family_and_a_system_prompt_makes_none() -> None:
    rows = [[0, 1, 2], [0, 1, 3], [0, 4], *([0, 100 + i] for i in range(20))]
    trace = Trace(prompt_tokens=np.full(23, 512), blocks=tuple(np.array(r) for r in rows))
    families = trace.families().tolist()
    assert families[0] == families[1] and len(set(families)) == 22
    assert Trace(prompt_tokens=np.ones(3), conversations=np.array([4, 4, 1])).families().tolist() == [4, 4, 1]


@given(st.data())
def test_taking_rows_takes_every_column(data: Any) -> None:
    n = data.draw(st.integers(1, 20))
    trace = Trace(
        timestamps_s=np.arange(n, dtype=float),
        prompt_tokens=np.arange(n),
        prompts=tuple(map(str, range(n))),
        blocks=tuple(np.array([i]) for i in range(n)),
    )
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1)))
    part = trace.take(rows)
    assert part.timestamps_s is not None and part.prompt_tokens is not None and part.blocks is not None
    for i, row in enumerate(rows.tolist()):
        assert part.timestamps_s[i] == part.prompt_tokens[i] == part.blocks[i][0] == row
        assert part.prompts is not None and part.prompts[i] == str(row)
    assert part.output_tokens is None and len(part) == len(rows)
