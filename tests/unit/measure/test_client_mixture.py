from __future__ import annotations

from math import gamma

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.measure.client_mixture import Client, ClientMixture, read_client
from sweep.measure.trace_files import read_trace, trace_path


def client(rate: float = 1.0, family: str = "gamma", shape: float = 1.0, name: str | None = None) -> Client:
    row = {"rate_rps": rate, "family": family, "shape": shape, "prompt_tokens": [10, 20, 30], "output_tokens": [5, 5]}
    return read_client("here", row if name is None else row | {"class": name})


@given(st.floats(0.2, 50), st.sampled_from(["gamma", "weibull"]), st.floats(0.6, 2.0), st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_a_client_arrives_at_its_rate_with_its_gaps(rate: float, family: str, shape: float, seed: int) -> None:
    times = client(rate, family, shape).arrivals_s(5000 / rate, np.random.default_rng(seed))
    assert times[0] >= 0 and times[-1] < 5000 / rate and (np.diff(times) >= 0).all()
    assert len(times) == pytest.approx(5000, rel=0.15)
    gaps = np.diff(times)
    weibull_cv = np.sqrt(gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2 - 1)
    expected = shape**-0.5 if family == "gamma" else weibull_cv
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.2)


def test_cv_is_another_word_for_a_gamma_shape() -> None:
    assert read_client("x", {"rate_rps": 1, "cv": 2, "prompt_tokens": [1, 2], "output_tokens": [1, 2]}).shape == 0.25


def test_the_sum_has_every_client_at_its_share_and_with_its_lengths_and_class() -> None:
    mixture = ClientMixture((client(3.0, name="chat"), client(1.0, shape=0.3)))
    times, prompts, outputs, classes = mixture.sample(8000, np.random.SeedSequence(1))
    assert times[0] == 0 and (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(8000 / 4.0, rel=0.05)
    assert classes is not None and classes.count("chat") / 8000 == pytest.approx(0.75, abs=0.02)
    assert (prompts.min(), prompts.max(), set(outputs.tolist())) == (10, 30, {5})


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    mixture = read_trace(trace_path("servegen_deepseek_r1"), 10**6)
    assert isinstance(mixture, ClientMixture)
    one, again, other = (mixture.sample(500, np.random.SeedSequence(s)) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one[:3], again[:3], strict=True))
    assert not np.array_equal(one[1], other[1])


def test_the_shipped_mixture_is_the_service_it_was_taken_from() -> None:
    """Peak hour of ServeGen's deepseek-r1: answers p50 516, p90 1427 (of its largest clients); bursty, long answers."""
    mixture = read_trace(trace_path("servegen_deepseek_r1"), 10**6)
    assert isinstance(mixture, ClientMixture)
    times, _, outputs, classes = mixture.sample(20_000, np.random.SeedSequence(0))
    assert classes is None
    assert np.median(outputs) == pytest.approx(516, rel=0.05)
    assert np.quantile(outputs, 0.9) == pytest.approx(1427, rel=0.05)
    assert 20_000 / times[-1] == pytest.approx(36.3, rel=0.1)
    assert np.diff(times).std() / np.diff(times).mean() > 1.05
