"""The front against a brute-force oracle, and hypervolume against hand-computed volumes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.errors import ConfigError
from sweep.results.front import eligible, front, hypervolume, ineligible
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint

# Two minimized, two maximized.
OBJECTIVES = ["cost_usd_per_mtok", "output_throughput_tok_s", "ttft_p99_ms", "quality_top1_agreement"]


def make(number: int, values: dict[str, float], **changes) -> OperatingPoint:
    fields = {
        "point_id": f"p{number}", "config_hash": f"h{number}", "fingerprint": "f", "launch_id": "l",
        "engine": {"model": "m", "args": {}, "env": {}}, "load": {"concurrency": 1}, "load_label": "c1",
        "params": None, "purpose": "trial", "devices": 1, "provenance": "measured", "state": "measured",
        "n_repeats": 1, "metrics": values,
    }  # fmt: skip
    return OperatingPoint(**(fields | changes))


def dominated(a: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    return any(
        all(y <= x for x, y in zip(a, b, strict=True)) and any(y < x for x, y in zip(a, b, strict=True)) for b in others
    )


@given(data=st.data(), dimensions=st.integers(1, 4))
def test_front_equals_brute_force_with_ties_and_duplicates(data, dimensions):
    # A grid of few values makes ties and duplicates the rule; odd floats come in with the second branch.
    value = st.one_of(st.integers(0, 3).map(float), st.floats(-1e6, 1e6))
    rows = data.draw(st.lists(st.tuples(*[value] * dimensions), max_size=40))
    names = OBJECTIVES[:dimensions]
    points = [make(i, dict(zip(names, row, strict=True))) for i, row in enumerate(rows)]
    minimized = [[get_metric(n).sign * v for n, v in zip(names, row, strict=True)] for row in rows]
    expected = [f"p{i}" for i, row in enumerate(minimized) if not dominated(row, minimized)]
    assert [p.point_id for p in front(points, names)] == expected


def test_points_without_a_value_or_a_measurement_are_reported_not_ranked():
    points = [
        make(0, {"cost_usd_per_mtok": 9.0, "ttft_p99_ms": 9.0}),
        make(1, {"cost_usd_per_mtok": 1.0}),
        make(2, {"cost_usd_per_mtok": 0.0, "ttft_p99_ms": 0.0}, state="failed", cause="out_of_memory"),
        make(3, {"cost_usd_per_mtok": 0.0, "ttft_p99_ms": 0.0}, provenance="simulated"),
    ]
    names = ["cost_usd_per_mtok", "ttft_p99_ms"]
    assert [p.point_id for p in front(points, names)] == ["p0"]
    reasons = {p.point_id: reason for p, reason in ineligible(points, names)}
    assert reasons["p1"] == "no ttft_p99_ms"
    assert reasons["p2"] == "failed: out_of_memory"
    assert "simulated" in reasons["p3"]


def test_a_simulated_study_has_a_front_of_its_own():
    points = [make(0, {"ttft_p99_ms": 1.0}, provenance="simulated")]
    assert eligible(points, ["ttft_p99_ms"]) == points


def test_missing_quality_names_its_failure():
    points = [make(0, {}, quality_cause="request_errors")]
    assert ineligible(points, ["quality_kl"])[0][1] == "no quality_kl (its quality measurement failed: request_errors)"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match=r"ttft_p99_ms of point p0"):
        front([make(0, {"ttft_p99_ms": bad})], ["ttft_p99_ms"])


def test_unknown_or_no_objective_is_a_user_error():
    with pytest.raises(ConfigError, match="did you mean 'ttft_p99_ms'"):
        front([], ["ttft_p99"])
    with pytest.raises(ConfigError, match="no objectives"):
        front([], [])


def test_hypervolume_is_the_area_of_a_hand_made_staircase():
    names = ["cost_usd_per_mtok", "output_throughput_tok_s"]
    points = [
        make(0, {"cost_usd_per_mtok": 1.0, "output_throughput_tok_s": 50.0}),
        make(1, {"cost_usd_per_mtok": 2.0, "output_throughput_tok_s": 100.0}),
        make(2, {"cost_usd_per_mtok": 2.0, "output_throughput_tok_s": 20.0}),
    ]
    stated = hypervolume(points, names, {"cost_usd_per_mtok": 4.0, "output_throughput_tok_s": 0.0})
    assert stated is not None
    # Width 1 at height 50, then width 2 at height 100.
    assert stated.value == pytest.approx(1 * 50 + 2 * 100)
    default = hypervolume(points, names)
    assert default is not None
    assert default.reference_point == pytest.approx({"cost_usd_per_mtok": 2.2, "output_throughput_tok_s": 18.0})
    assert default.value == pytest.approx(1.0 * 32 + 0.2 * 82)


def test_an_objective_that_is_zero_everywhere_does_not_swallow_the_volume():
    names = ["cost_usd_per_mtok", "quality_kl"]
    same = hypervolume([make(i, {"cost_usd_per_mtok": 1.0 + i, "quality_kl": 0.0}) for i in range(2)], names)
    assert same is not None and same.value == pytest.approx(1.2 * 0.1)
    fewer = hypervolume([make(0, {"slo_attainment": 0.0}), make(1, {"slo_attainment": 0.5})], ["slo_attainment"])
    assert fewer is not None and fewer.reference_point == pytest.approx({"slo_attainment": -0.05})


def test_no_points_have_no_hypervolume_without_a_reference():
    assert hypervolume([], ["ttft_p99_ms"]) is None
    stated = hypervolume([], ["ttft_p99_ms"], {"ttft_p99_ms": 100.0})
    assert stated is not None
    assert stated.value == 0.0
    with pytest.raises(ConfigError, match="itl_p99_ms"):
        hypervolume([], ["ttft_p99_ms", "itl_p99_ms"], {"ttft_p99_ms": 100.0})
