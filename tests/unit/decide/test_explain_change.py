from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_points import KL, TTFT, made_point

from sweep.decide.explain.change import change, changes, percent_text
from sweep.results.uncertainty import Spreads

values = st.floats(0.1, 1e4)


def pair(before: float, after: float, metric: str = TTFT, number: int = 0, **changes):
    return (
        made_point({"x": number}, 8, {metric: before}, **changes),
        made_point({"x": number, "y": 1}, 8, {metric: after}, **changes),
    )


def spreads(pairs):
    return Spreads([p for two in pairs for p in two])


@given(values, values)
def test_a_ratio_and_its_inverse_cancel(u, v):
    pairs = [pair(u, v, number=1), pair(v, u, number=2)]
    found = change(pairs, TTFT, spreads(pairs))
    assert found.value == pytest.approx(1) and found.pairs == 2


@given(values, st.floats(0.2, 5))
def test_the_interval_holds_the_value_and_turns_with_the_pair(u, factor):
    pairs = [pair(u, u * factor)]
    there, back = change(pairs, TTFT, spreads(pairs)), change([pairs[0][::-1]], TTFT, spreads(pairs))
    assert there.value == pytest.approx(factor) == pytest.approx(1 / back.value)
    assert there.interval[0] <= there.value <= there.interval[1]
    assert there.interval[0] == pytest.approx(1 / back.interval[1])


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        sides = [np.exp(rng.normal(math.log(m), 0.05, 3)) for m in (100.0, 120.0)]
        points = [made_point({"x": i}, 8, {TTFT: s.mean()}, sd={TTFT: s.std(ddof=1)}) for i, s in enumerate(sides)]
        found = change([tuple(points)], TTFT, Spreads(points))
        covered += found.interval[0] <= 1.2 <= found.interval[1]
    assert covered / 400 > 0.92


def test_loads_of_the_same_two_configs_are_no_further_evidence():
    def at(concurrency):
        return made_point({}, concurrency, {TTFT: 100.0}), made_point({"y": 1}, concurrency, {TTFT: 110.0})

    one, many = [at(8)], [at(2), at(8), at(32)]
    alone, together = change(one, TTFT, spreads(many)), change(many, TTFT, spreads(many))
    assert together.pairs == 1
    assert together.interval == pytest.approx(alone.interval)


def test_how_differently_it_works_in_different_surroundings_counts():
    pairs = [pair(100, 100 * f, number=i) for i, f in enumerate((0.5, 1.0, 2.0, 1.0))]
    found = change(pairs, TTFT, spreads(pairs))
    assert found.value == pytest.approx(1) and not found.within(0.05)


def test_quality_differs_by_a_difference_and_one_measurement_serves_equal_numerics():
    pairs = [pair(0.002, 0.002, KL)]
    same = change(pairs, KL, spreads(pairs))
    assert (same.relative, same.value, same.interval) == (False, 0.0, (0.0, 0.0)) and not same.beyond_noise
    pairs = [pair(0.002, 0.02, KL)]
    found = change(pairs, KL, spreads(pairs))
    assert found.value == pytest.approx(0.018) and found.beyond_noise and found.worse
    assert found.text.startswith("quality_kl +0.018 (")


def test_unknown_noise_is_not_small_noise():
    pairs = [pair(100.0, 500.0, cv=None)]
    found = change(pairs, TTFT, spreads(pairs))
    assert found.interval is None and not found.beyond_noise and not found.within(10)
    assert found.text == "ttft_p50_ms +400 % (noise unknown)"


def test_a_metric_that_nobody_has_is_absent():
    pairs = [pair(100.0, 90.0)]
    assert set(changes(pairs, [TTFT, KL], spreads(pairs))) == {TTFT}


@pytest.mark.parametrize(("fraction", "text"), [(0.0, "+0"), (-0.0001, "+0"), (0.031, "+3.1"), (-0.42, "-42")])
def test_percentages(fraction, text):
    assert percent_text(fraction) == text
