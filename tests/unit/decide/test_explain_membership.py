from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_points import COST, TTFT, made_point

from sweep.decide.explain.membership import front_band, membership, unknown_spread

clouds = st.lists(st.tuples(st.floats(0.1, 10), st.floats(10, 1000)), min_size=1, max_size=12)


def cloud(pairs, **changes):
    return [made_point({"x": i}, 8, {COST: a, TTFT: b}, **changes) for i, (a, b) in enumerate(pairs)]


@given(clouds)
@settings(max_examples=30, deadline=None)
def test_a_surface_reached_more_often_lies_behind_one_reached_less_often(pairs):
    band = front_band(cloud(pairs), COST, TTFT)
    surfaces = [band[band["level"] == level][["x", "y"]].to_numpy() for level in (0.1, 0.5, 0.9)]
    for better, worse in pairwise(surfaces):
        assert len(worse)
        for corner in worse:
            assert (better <= corner + 1e-9).all(axis=1).any()


def test_the_band_holds_the_front_of_a_single_point():
    band = front_band(cloud([(1.0, 100.0)]), COST, TTFT, levels=(0.05, 0.95))
    low, high = (band[band["level"] == level][["x", "y"]].to_numpy() for level in (0.05, 0.95))
    assert (low.min(axis=0) < [1.0, 100.0]).all() and (high.max(axis=0) > [1.0, 100.0]).all()
    assert (np.abs(high / [1.0, 100.0] - 1) < 0.1).all()


def test_a_maximized_metric_keeps_its_sign():
    points = [
        made_point({"x": i}, 8, {"output_throughput_tok_s": v, TTFT: t})
        for i, (v, t) in enumerate([(50, 10), (90, 30)])
    ]
    band = front_band(points, "output_throughput_tok_s", TTFT)
    assert (band["x"] > 0).all() and band["x"].between(40, 110).all()


def test_no_band_without_a_spread():
    points = cloud([(1.0, 100.0), (2.0, 50.0)], cv=None)
    assert front_band(points, COST, TTFT).empty
    assert unknown_spread(points, [COST, TTFT]) == [COST, TTFT]
    assert front_band([], COST, TTFT).empty


def test_membership_is_sure_where_points_are_far_apart_and_open_between_twins():
    points = cloud([(1.0, 100.0), (1.001, 100.1), (0.5, 300.0), (3.0, 900.0)])
    frame = membership(points, [COST, TTFT]).set_index("point_id")
    sure, twins, never = points[2].point_id, [p.point_id for p in points[:2]], points[3].point_id
    assert frame.loc[sure, "probability"] == 1 and frame.loc[never, "probability"] == 0
    assert all(0.2 < frame.loc[twin, "probability"] < 0.95 for twin in twins)
    assert frame.loc[twins[0], "on_front"] and not frame.loc[twins[1], "on_front"]
    assert list(frame["probability"]) == sorted(frame["probability"], reverse=True)


def test_columns_are_the_promised_ones():
    frame = membership(cloud([(1.0, 100.0)]), [COST, TTFT])
    assert list(frame) == ["point_id", "load_label", "engine", "on_front", "probability", COST, TTFT]
    assert frame["probability"].iloc[0] == pytest.approx(1)
