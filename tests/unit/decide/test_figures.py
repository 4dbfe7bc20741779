"""The other figures: exact surfaces, every value where it was measured, and figures of almost nothing."""

from __future__ import annotations

from dataclasses import replace

import moocore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sweep
from sweep.decide.explain.membership import front_band
from sweep.decide.explain.progress import progress
from sweep.decide.explain.techniques import technique_fronts, techniques
from sweep.decide.plots import (
    cost_figure,
    failure_figure,
    front3d_figure,
    front_figure,
    knobs_figure,
    latency_figure,
    progress_figure,
    quality_figure,
    technique_figure,
    techniques_figure,
)
from sweep.decide.plots.cost import cost_steps
from sweep.decide.plots.knobs import knob_values
from sweep.decide.quality import quality_table
from sweep.decide.staircase import faces
from sweep.measure.cost import Usage, effective_cost_usd_per_mtok

COST, TTFT, KL = "cost_usd_per_mtok", "ttft_p99_ms", "quality_kl"


@pytest.fixture(scope="module")
def study(study_dir):
    return sweep.open(study_dir)


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=14))
@settings(max_examples=200)
def test_surface_of_three_objectives_encloses_exactly_the_hypervolume(values):
    """Seen from each of the three axes: area newly dominated at a level, times the way to the worst corner."""
    worst = (6, 6, 6)
    volume = moocore.hypervolume(np.array(values, dtype=float), ref=worst) if values else 0.0
    boxes = faces(values, worst)
    for axis in range(3):
        u, v = (k for k in range(3) if k != axis)
        seen = [(low, high) for low, high in boxes if low[axis] == high[axis]]
        total = sum((h[u] - lo[u]) * (h[v] - lo[v]) * (worst[axis] - lo[axis]) for lo, h in seen)
        assert total == pytest.approx(volume)
    for low, high in boxes:
        assert sum(a == b for a, b in zip(low, high, strict=True)) == 1, "flat in one axis"


def test_front_of_three_objectives_shows_every_comparable_point_once(study):
    figure = front3d_figure(study.operating_points, [COST, TTFT, KL])
    ids = [i for t in figure.data if t.type == "scatter3d" for i in t.customdata]
    comparable = [p for p in study.operating_points if {COST, TTFT, KL} <= set(p.metrics)]
    assert sorted(ids) == sorted(p.point_id for p in comparable)
    strong = next(t for t in figure.data if t.name == "on the front")
    assert len(strong.x) == len(study.front())


def test_band_lies_around_the_staircase_and_bars_are_the_intervals(study):
    points = study.operating_points
    figure = front_figure(points, COST, "ttft_p50_ms", band=front_band(points, COST, "ttft_p50_ms"))
    band = next(t for t in figure.data if t.name == "band of the front")
    assert band.fill == "toself" and len(band.x) > 8
    bars = next(t for t in figure.data if t.error_x.array is not None)
    known = {(p.metrics[COST], p.metrics["ttft_p50_ms"]): p.intervals for p in points if "ttft_p50_ms" in p.metrics}
    for x, y, up, down in zip(bars.x, bars.y, bars.error_y.array, bars.error_y.arrayminus, strict=True):
        assert (y - down, y + up) == pytest.approx(known[x, y]["ttft_p50_ms"])


def test_cliffs_join_points_that_are_shown(study):
    a, b = study.operating_points[0], study.operating_points[1]
    figure = front_figure(study.operating_points, COST, TTFT, cliffs=[(a.point_id, b.point_id), (a.point_id, "gone")])
    (line,) = [t for t in figure.data if t.name == "cliff: one knob apart"]
    assert line.x == (a.metrics[COST], b.metrics[COST], None)
    assert line.line.dash == "dot"


def test_latency_lines_join_the_loads_of_one_config_in_order(study):
    figure = latency_figure(study.operating_points, TTFT, objectives=study.objectives)
    defaults = next(t for t in figure.data if t.name == "vLLM's defaults")
    assert list(defaults.x) == [1, 4, 8, 16]
    dashes = [(t.line.color, t.line.dash, t.marker.symbol) for t in figure.data if t.name and "other" not in t.name]
    assert len({d for _, d, _ in dashes}) == len(dashes) and len({s for *_, s in dashes}) == len(dashes), "print"


def test_many_configs_stay_few_traces(study):
    points = [
        replace(p, config_hash=f"{k}{p.config_hash}", point_id=f"{k}{p.point_id}")
        for k in range(30)
        for p in study.operating_points
    ]
    figure = latency_figure(points, TTFT, objectives=study.objectives)
    assert len(figure.data) <= 7
    markers = [t for t in front_figure(points, COST, TTFT).data if t.customdata and t.yaxis != "y2"]
    assert {t.type for t in markers} == {"scattergl"}


def test_many_loads_share_few_symbols_and_no_point_is_lost(study):
    first = next(p for p in study.operating_points if p.state == "measured")
    points = [
        replace(first, point_id=f"p{n}", load={"concurrency": n}, load_label=f"c{n}", metrics=first.metrics | {COST: n})
        for n in range(1, 201)
    ]
    figure = front_figure(points, COST, TTFT)
    keys = [t.name for t in figure.data if t.x[0] is None]
    assert len(keys) == 8 and keys[0] == "c1 to c25" and keys[-1] == "c176 to c200"
    assert sum(len(t.customdata) for t in figure.data if t.customdata) == 200
    by_seed = [replace(p, engine={**p.engine, "args": {"seed": f"s{n % 40}"}}) for n, p in enumerate(points)]
    assert "other values" in {t.name for t in front_figure(by_seed, COST, TTFT, color="seed").data}


def test_parallel_coordinates_have_the_varying_knobs_and_every_objective(study):
    figure = knobs_figure(study.operating_points, study.objectives, importance={"kv_cache_dtype": 0.9})
    labels = [d.label.replace("<br>", " ") for d in figure.data[0].dimensions]
    assert labels[0] == "kv cache dtype"
    assert labels[-4:] == ["load", "Cost (USD/Mtok)", "TTFT p99 (ms)", "KL to reference (nats/token)"]
    values = knob_values(study.operating_points)
    assert "max_model_len" not in values and set(values["enable_prefix_caching"]) == {"default", "false"}


def test_progress_steps_and_never_falls(study):
    found = progress(study)
    figure = progress_figure(found.frame, found.text)
    line, marks = figure.data
    assert line.line.shape == "hv"
    assert list(line.y) == sorted(line.y) and line.y[-1] == pytest.approx(1)
    assert set(marks.customdata) <= set(study.points["point_id"])


def test_cost_steps_end_at_what_the_cost_module_says(study):
    points = study.operating_points
    point = next(p for p in points if p.point_id.endswith("-c4") and p.purpose == "baseline")
    usage = Usage(utilization=0.7, peak_to_mean=2.5, starts_per_day=6)
    steps, missing = cost_steps(points, point, usage)
    assert not missing
    assert steps[0][1] == min(p.metrics[COST] for p in points if p.config_hash == point.config_hash)
    assert steps[1][1] == point.metrics[COST]
    expected = effective_cost_usd_per_mtok(point.metrics[COST], usage, point.metrics["startup_s"])
    assert steps[-1][1] == pytest.approx(expected)
    (bars,) = cost_figure(steps).data
    assert sum(bars.y[:-1]) == pytest.approx(bars.y[-1]) == pytest.approx(expected)


def test_what_is_not_stated_is_named_and_not_drawn(study):
    point = next(p for p in study.operating_points if p.purpose == "baseline")
    steps, missing = cost_steps(study.operating_points, point, Usage())
    assert len(steps) == 2 and missing == ["utilization", "peak to mean", "starts per day"]
    assert "not stated in the config: utilization" in cost_figure(steps, missing=missing).layout.title.text
    free = replace(point, metrics={k: v for k, v in point.metrics.items() if k != COST})
    assert cost_steps([free], free, Usage()) == ([], [])
    assert "no price" in cost_figure([]).layout.annotations[0].text


def test_failure_map_counts_points_by_setting_and_cause(study):
    (cells,) = failure_figure(study.operating_points).data
    row = next(i for i, label in enumerate(cells.y) if label.startswith("quantization = fp8"))
    column = next(i for i, cause in enumerate(cells.x) if cause.startswith("died"))
    assert cells.text[row][column] == "4" and cells.z[row][column] == 1
    assert (
        "nothing failed"
        in failure_figure([p for p in study.operating_points if p.state == "measured"]).layout.annotations[0].text
    )


def test_quality_by_format_with_intervals_and_the_noise_floor(study):
    figure = quality_figure(quality_table(study.records))
    (points,) = figure.data
    assert list(points.x) == sorted(points.x, reverse=True), "the best on top: the axis grows upwards"
    assert points.y[-1] == "reference"
    assert all(v > 0 for v in points.error_x.array)
    assert figure.layout.shapes[0].x0 == pytest.approx(0.0015)
    assert (
        "no quality_task_accuracy"
        in quality_figure(quality_table(study.records), "quality_task_accuracy").layout.annotations[0].text
    )


def test_along_or_outward(study):
    effects = techniques(study.operating_points, study.objectives)
    figure = techniques_figure(effects)
    assert {t.name for t in figure.data} == {e.verdict for e in effects if e.gain is not None}
    int8 = next(e for e in effects if "int8" in e.level)
    fronts = technique_figure(technique_fronts(study.operating_points, int8), int8, COST, TTFT)
    assert [t.name for t in fronts.data] == [
        "gained by having it", "front without it", "front having it", "points without it", "points with it",
    ]  # fmt: skip


def test_figures_of_nothing_say_so():
    for figure in (
        front3d_figure([], [COST, TTFT, KL]),
        latency_figure([], TTFT),
        knobs_figure([], [COST]),
        progress_figure(None),
        cost_figure([]),
        failure_figure([]),
        quality_figure(quality_table([])),
        techniques_figure([]),
    ):
        assert figure.layout.annotations[0].text
        figure.to_json()
