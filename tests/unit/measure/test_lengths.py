from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.measure.lengths import LengthDistribution, sample_quantiles


@given(
    st.sampled_from(
        [
            LengthDistribution("fixed", value=7),
            LengthDistribution("uniform", low=2, high=9),
            LengthDistribution("lognormal", median=50, sigma=2.0, low=5, high=60),
            LengthDistribution("empirical", values=(1, 4, 100), high=50),
            LengthDistribution("quantiles", values=(3, 10, 90), high=50),
            LengthDistribution("trace", values=(3, 10, 90), low=5),
        ]
    ),
    st.integers(0, 1000),
)
def test_lengths_stay_inside_their_bounds(lengths: LengthDistribution, seed: int) -> None:
    lengths.validate("x")
    drawn = lengths.sample(np.random.default_rng(seed), 200)
    assert drawn.dtype == np.int64
    assert drawn.min() >= (lengths.low or 1)
    assert lengths.longest is not None and drawn.max() <= lengths.longest


def test_lognormal_lengths_have_the_median_and_sigma_asked() -> None:
    lengths = LengthDistribution("lognormal", median=1020, sigma=0.769, high=10**6)
    drawn = lengths.sample(np.random.default_rng(0), 100_000)
    assert np.median(drawn) == pytest.approx(1020, rel=0.01)
    assert np.quantile(drawn, 0.9) == pytest.approx(2734, rel=0.02)  # the trace the numbers come from


@given(st.lists(st.integers(1, 10**5), min_size=2, max_size=12), st.integers(0, 1000))
def test_quantiles_come_back_as_quantiles(values: list[int], seed: int) -> None:
    values.sort()
    drawn = sample_quantiles(np.random.default_rng(seed), 4000, values)
    probabilities = np.linspace(0, 1, len(values))
    below = [(drawn < value).mean() for value in values]
    up_to = [(drawn <= value).mean() for value in values]
    assert all(b - 0.04 <= p <= u + 0.04 for b, p, u in zip(below, probabilities, up_to, strict=True))


def test_the_longest_draw_is_known_where_something_bounds_it() -> None:
    assert LengthDistribution("fixed", value=9).longest == 9
    assert LengthDistribution("empirical", values=(3, 70), high=50).longest == 50
    assert LengthDistribution("trace", values=(3, 70)).longest == 70
    assert LengthDistribution("trace").longest is None
