"""The figure: a staircase in all orientations, nothing hidden, and figures of almost nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sweep
from sweep.decide.plots import front_figure, hover_text
from sweep.decide.staircase import axis_range, log_ticks, staircase
from sweep.decide.wording import shared_settings
from sweep.errors import ConfigError
from sweep.results.front import front
from sweep.results.metrics import get_metric

LOW, HIGH = get_metric("cost_usd_per_mtok"), get_metric("goodput_rps")
LOW_Y, HIGH_Y = get_metric("ttft_p99_ms"), get_metric("output_throughput_tok_s")


@pytest.mark.parametrize(
    ("x", "y", "worst", "expected"),
    [
        # The same three points, (1,3) (2,2) (3,1) and (2,2)'s mirror images, seen from each good corner.
        (LOW, LOW_Y, (9, 9), [(1, 9), (1, 3), (2, 3), (2, 2), (3, 2), (3, 1), (9, 1)]),
        (HIGH, HIGH_Y, (0, 0), [(3, 0), (3, 1), (2, 1), (2, 2), (1, 2), (1, 3), (0, 3)]),
        (LOW, HIGH_Y, (9, 0), [(1, 0), (1, 3), (9, 3)]),
        (HIGH, LOW_Y, (0, 9), [(3, 9), (3, 1), (0, 1)]),
    ],
)
def test_staircase_corners_in_all_four_orientations(x, y, worst, expected):
    assert staircase([(2, 2), (3, 1), (1, 3)], x, y, worst) == expected


def test_staircase_leaves_out_dominated_points_and_duplicates():
    values = [(1, 3), (1, 3), (1, 5), (2, 3), (3, 1), (4, 1)]
    assert staircase(values, LOW, LOW_Y, (9, 9)) == [(1, 9), (1, 3), (3, 3), (3, 1), (9, 1)]
    assert staircase([], LOW, LOW_Y, (9, 9)) == []
    assert staircase([(1, 1)], LOW, LOW_Y, (9, 9)) == [(1, 9), (1, 1), (9, 1)]


@given(
    values=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=25),
    x=st.sampled_from([LOW, HIGH]),
    y=st.sampled_from([LOW_Y, HIGH_Y]),
)
def test_staircase_is_axis_parallel_and_no_point_lies_beyond_it(values, x, y):
    worst = (30 if x.sign > 0 else -10, 30 if y.sign > 0 else -10)
    corners = staircase(values, x, y, worst)
    for (a, b), (c, d) in pairwise(corners):
        assert (a == c) != (b == d), "one coordinate changes in every step: never a slanted line"
    for a, b in values:
        # Beyond = strictly better than every corner that could cover it: its x and y reach some corner.
        assert any(x.sign * c <= x.sign * a and y.sign * d <= y.sign * b for c, d in corners[1::2])
    assert set(corners[1::2]) <= set(values), "every second corner is a measured point"


def test_axis_is_logarithmic_only_over_a_wide_positive_range():
    assert axis_range([1.0, 100.0])[1]
    assert not axis_range([1.0, 10.0])[1]
    assert not axis_range([0.0, 100.0])[1]
    for values in ([], [3.0], [0.0], [1.0, 500.0], [-1.0, 1.0]):
        (low, high), _ = axis_range(values)
        assert low < high
        assert all(low < v < high for v in values)
    assert log_ticks((0.9, 60.0)) == [1, 2, 5, 10, 20, 50]


def by_mode(figure, mode):
    return [t for t in figure.data if t.mode == mode]


def test_every_point_of_the_study_is_in_the_figure_once(study_dir):
    study = sweep.open(study_dir)
    figure = study.plot_front()
    hovers = [text for t in figure.data for text in (t.hovertext or ())]
    assert len(hovers) == len(study.points)
    for point_id in study.points["point_id"]:
        assert sum(f"<b>{point_id}</b>" in h for h in hovers) == 1
    strip = [t for t in figure.data if t.yaxis == "y2"]
    assert {y for t in strip for y in t.y} == {
        "died_at_startup (4)", "first_request_failed (4)", "invalid_argument (4)", "proof_failed (1)",
        "no ttft_p99_ms (1)",
    }  # fmt: skip


def test_line_goes_through_measured_front_points_only(study_dir):
    study = sweep.open(study_dir)
    (line,) = by_mode(study.plot_front(["output_throughput_tok_s", "ttft_p50_ms"]), "lines")
    assert line.line.shape == "linear"
    assert line.line.smoothing is None
    corners = list(zip(line.x, line.y, strict=True))[1::2]
    expected = {
        (p.metrics["output_throughput_tok_s"], p.metrics["ttft_p50_ms"])
        for p in front(study.operating_points, ["output_throughput_tok_s", "ttft_p50_ms"])
    }
    assert set(corners) == expected


def test_front_is_strong_dominated_faint_and_the_defaults_are_marked(study_dir):
    study = sweep.open(study_dir)
    figure = study.plot_front(["cost_usd_per_mtok", "user_throughput_tok_s"])
    strong = sum(len(t.x) for t in figure.data if t.hovertext and t.marker.opacity == 1.0 and t.yaxis != "y2")
    assert strong == len(study.front(["cost_usd_per_mtok", "user_throughput_tok_s"]))
    (ring,) = [t for t in figure.data if t.name == "vLLM's defaults"]
    assert len(ring.x) == 4
    assert figure.layout.xaxis.title.text.startswith("Cost (USD per million output tokens)")
    assert "higher is better" in figure.layout.yaxis.title.text


def test_third_objective_is_the_colour_and_a_knob_can_be(study_dir):
    study = sweep.open(study_dir)
    assert study.plot_front().layout.coloraxis.colorbar.title.text == "KL to reference<br>(nats/token)"
    by_knob = study.plot_front(["cost_usd_per_mtok", "ttft_p50_ms"], color="kv_cache_dtype")
    assert {"default", "fp8"} <= {t.name for t in by_knob.data}
    with pytest.raises(ConfigError, match="did you mean 'kv_cache_dtype'"):
        study.plot_front(color="kv_cache_dtpe")


@pytest.mark.parametrize("count", [0, 1])
def test_figures_of_almost_nothing(study_dir, count):
    points = sweep.open(study_dir).operating_points[:count]
    figure = front_figure(points, "cost_usd_per_mtok", "ttft_p50_ms")
    assert len(by_mode(figure, "lines")[0].x) == 3 * count
    figure.to_json()


def test_hover_shows_arguments_and_escapes_them(study_dir):
    points = sweep.open(study_dir).operating_points
    shared = shared_settings(points)
    text = hover_text(next(p for p in points if p.cause == "first_request_failed"), shared, False)
    assert "pipeline_parallel_size=2" in text
    assert "&lt;see stack<br>trace&gt;" in text
    assert "max_model_len" not in text, "what every point shares is not repeated"


def test_colour_scale_spans_the_values_and_not_what_plotly_makes_of_equal_ones(study_dir):
    points = sweep.open(study_dir).operating_points
    figure = front_figure(points, "cost_usd_per_mtok", "ttft_p50_ms", color="quality_kl")
    values = [v for t in figure.data if t.marker.coloraxis for v in t.marker.color]
    axis = figure.layout.coloraxis
    assert (axis.cmin, axis.cmax) == (min(values), max(values)) and axis.cmin < axis.cmax


def test_an_axis_of_zeros_does_not_show_negative_numbers():
    assert axis_range([0.0, 0.0]) == ((-0.05, 1.0), False)
