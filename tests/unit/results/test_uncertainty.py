"""What repeats, runs and quality measurements leave open, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_points import bare_point as make

from sweep.results.uncertainty import (
    Spreads,
    draws,
    front_probability,
    interval,
    run_standard_errors,
    t_cdf,
    t_quantile,
    with_intervals,
)

COST, TTFT, KL = "cost_usd_per_mtok", "ttft_p99_ms", "quality_kl"


# ---------------------------------------------------------------- the distribution


# Quantiles as printed in tables of Student's t: (degrees of freedom, probability, t).
@pytest.mark.parametrize(
    ("degrees", "p", "t"),
    [(1, 0.9, 3.078), (1, 0.975, 12.706), (2, 0.9, 1.886), (3, 0.95, 2.353), (4, 0.99, 3.747), (10, 0.975, 2.228),
     (29, 0.95, 1.699), (30, 0.995, 2.750), (None, 0.975, 1.960)],
)  # fmt: skip
def test_students_t_as_tabulated(degrees, p, t):
    assert t_quantile(p, degrees) == pytest.approx(t, abs=6e-4)
    assert t_cdf(t_quantile(p, degrees), degrees) == pytest.approx(p, abs=1e-9)


@given(st.floats(-50, 50), st.integers(1, 60))
def test_a_distribution_function(t, degrees):
    assert t_cdf(t, degrees) + t_cdf(-t, degrees) == pytest.approx(1)
    assert t_cdf(t, degrees) <= t_cdf(t + 0.1, degrees) + 1e-12


def test_one_degree_is_cauchy_and_many_are_normal():
    assert t_cdf(2.0, 1) == pytest.approx(0.5 + math.atan(2.0) / math.pi)
    assert t_cdf(1.0, 500) == pytest.approx(t_cdf(1.0, None), abs=1e-3)


# ---------------------------------------------------------------- the sources


def test_no_repeat_and_no_interval_is_no_spread():
    (p,) = with_intervals([make("a", {COST: 1.0})])
    assert Spreads([p]).of(p, COST) is None and p.intervals == {}
    assert Spreads([p]).of(p, TTFT) is None


def test_requests_of_one_run_alone():
    p = make("a", {TTFT: 100.0}, run_se={TTFT: 5.0})
    spread = Spreads([p]).of(p, TTFT)
    assert spread is not None
    assert (spread.standard_error, spread.degrees, spread.source) == (5.0, None, "requests")
    low, high = interval(100.0, spread)
    assert low == pytest.approx(100 * math.exp(-1.96 * 0.05), rel=1e-4) and low * high == pytest.approx(100.0**2)


def test_repeats_are_moderated_by_the_study():
    """cv² 4e-4 on 1 degree beside two points of 1e-4 on 1 degree each: pooled 2e-4 on 3, moderated 2.5e-4 on 4."""
    noisy = make("a", {TTFT: 100.0}, n_repeats=2, sd={TTFT: 2.0})
    calm = [make(n, {TTFT: 200.0}, n_repeats=2, sd={TTFT: 2.0}) for n in "bc"]
    spreads = Spreads([noisy, *calm])
    assert spreads.pooled_cv(TTFT) == pytest.approx(math.sqrt(2e-4))
    spread = spreads.of(noisy, TTFT)
    assert spread is not None and spread.degrees == 4 and spread.source == "repeats"
    assert spread.standard_error == pytest.approx(100 * math.sqrt((1 * 4e-4 + 3 * 2e-4) / 4 / 2))


def test_a_point_measured_once_has_the_spread_of_the_study_and_at_least_its_own():
    repeated = [make(n, {TTFT: 200.0}, n_repeats=2, sd={TTFT: 2.0}) for n in "bc"]
    once = make("a", {TTFT: 50.0}, run_se={TTFT: 0.1})
    loose = make("d", {TTFT: 50.0}, run_se={TTFT: 9.0})
    spreads = Spreads([once, loose, *repeated])
    spread = spreads.of(once, TTFT)
    assert spread is not None and (spread.source, spread.degrees) == ("study", 2)
    assert spread.standard_error == pytest.approx(0.5)
    wider = spreads.of(loose, TTFT)
    assert wider is not None and wider.standard_error == 9.0


@pytest.mark.parametrize(("within", "reach"), [(1.0, 4.302653 / math.sqrt(2)), (8.0, 8 * 1.959964)])
def test_requests_do_not_get_the_heavy_tail_of_two_launches(within, reach):
    """t of two degrees reaches 4.3 standard errors: it belongs to what the launches tell, not to a run of many."""
    p = make("a", {TTFT: 100.0}, n_repeats=2, sd={TTFT: 1.0}, run_se={TTFT: within})
    spread = Spreads([p]).of(p, TTFT)
    assert spread is not None and spread.reach == pytest.approx(reach, rel=1e-5)


def test_standard_errors_of_runs_average_and_shrink_with_their_number():
    found = run_standard_errors([{TTFT: (90.0, 110.0), COST: (1.0, 2.0)}, {TTFT: (80.0, 120.0)}], 2)
    assert list(found) == [TTFT]
    assert found[TTFT] == pytest.approx(math.sqrt((10**2 + 20**2) / 2 / 2) / 1.95996, rel=1e-5)
    assert run_standard_errors([], 0) == {}


@given(st.floats(1e-3, 1e6), st.floats(1e-6, 10.0), st.sampled_from([None, 3, 4, 9]))
def test_an_interval_holds_the_value_and_never_reaches_zero(value, relative, degrees):
    p = make("a", {TTFT: value}, run_se={TTFT: value * relative})
    spread = Spreads([p]).of(p, TTFT)
    assert spread is not None
    low, high = interval(value, spread)
    assert 0 <= low <= value <= high


# ---------------------------------------------------------------- the front


def test_points_of_one_fingerprint_share_their_quality_draw():
    points = [make(n, {COST: 1.0, KL: 0.02}, quality_se={KL: 0.01}) for n in "ab"]
    drawn = draws(points, [COST, KL])
    assert np.array_equal(drawn[:, 0, 1], drawn[:, 1, 1]) and drawn[:, 0, 1].std() == pytest.approx(0.01, rel=0.2)
    assert (drawn[:, :, 0] == 1.0).all() and (drawn[:, :, 1] >= 0).all()


def test_membership_of_a_clear_front_is_certain_and_of_a_tie_is_open():
    clear = [
        make("fast", {COST: 2.0, TTFT: 100.0}, run_se={COST: 0.02, TTFT: 1.0}),
        make("cheap", {COST: 1.0, TTFT: 300.0}, run_se={COST: 0.01, TTFT: 3.0}),
        make("bad", {COST: 3.0, TTFT: 400.0}, run_se={COST: 0.03, TTFT: 4.0}),
    ]
    assert front_probability(clear, [COST, TTFT]) == {"fast": 1.0, "cheap": 1.0, "bad": 0.0}
    tied = [make(n, {COST: c, TTFT: t}, run_se={COST: 0.05, TTFT: 5.0}) for n, c, t in
            [("a", 1.0, 100.0), ("b", 1.01, 101.0)]]  # fmt: skip
    found = front_probability(tied, [COST, TTFT])
    assert 0.5 < found["b"] < found["a"] < 0.95


def test_ineligible_points_have_no_probability():
    points = [make("a", {COST: 1.0}), make("b", {}, state="failed", cause="out_of_memory")]
    assert front_probability(points, [COST]) == {"a": 1.0}
    assert front_probability(points[1:], [COST]) == {}
