"""The join from records to operating points: states, repeats, quality, and the frame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.results.metrics import METRICS
from sweep.results.points import Join, failures, operating_points, points_frame, settings
from sweep.results.records import LaunchRecord, PointRecord, QualityRecord


def point(state: Any = "measured", *, metrics: dict[str, float | None] | None = None, **changes: Any) -> PointRecord:
    values: dict[str, Any] = {
        "point_id": "p",
        "launch_id": "l1",
        "config_hash": "abc",
        "fingerprint": "bf16",
        "engine": {"model": "m", "args": {"max_num_seqs": 8, "dtype": None}, "env": {"A": "1"}},
        "load": {"concurrency": 4},
        "load_label": "c4",
        "params": None,
        "purpose": "trial",
        "devices": 1,
        "state": state,
        "metrics": metrics or {},
        "cause": None if state == "measured" else "engine_died",
    }
    return PointRecord(**(values | changes))


def quality(kl: float | None, *, floor: float | None = 0.0015, **changes: Any) -> QualityRecord:
    values: dict[str, Any] = {
        "fingerprint": "bf16",
        "reference_fingerprint": "bf16",
        "state": "measured",
        "metrics": {"quality_kl": kl, "quality_top1_agreement": 0.99},
        "noise_floor_kl": floor,
        "positions": 100,
        "launch_id": "l1",
        "finished_at": "",
    }
    return QualityRecord(**(values | changes))


def launch(**changes: Any) -> LaunchRecord:
    values: dict[str, Any] = {
        "launch_id": "l1", "config_hash": "abc", "fingerprint": "bf16", "engine": {"model": "m", "args": {}, "env": {}},
        "params": None, "purpose": "trial", "devices": 1, "device_ids": (0,), "state": "ok", "cause": None,
        "detail": None, "transient": False, "startup_s": 31.5, "duration_s": 80.0, "started_at": "", "finished_at": "",
    }  # fmt: skip
    return LaunchRecord(**(values | changes))


def test_repeats_are_one_point_with_mean_and_spread():
    records = [
        point(metrics={"ttft_p99_ms": 100.0, "itl_p99_ms": 10.0}),
        point(metrics={"ttft_p99_ms": 104.0, "itl_p99_ms": None}, repeat=1, launch_id="l2"),
    ]
    (p,) = operating_points(records)
    assert p.n_repeats == 2
    assert p.metrics["ttft_p99_ms"] == 102.0
    assert p.sd["ttft_p99_ms"] == pytest.approx(8**0.5)
    assert p.metrics["itl_p99_ms"] == 10.0, "a repeat without a value takes no part in the mean"
    assert "itl_p99_ms" not in p.sd
    assert p.launch_id == "l2"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["measured"], "measured"),
        (["transient", "measured"], "measured"),
        (["measured", "transient"], "measured"),
        (["measured", "quarantined"], "quarantined"),
        (["quarantined", "measured"], "measured"),
        (["measured", "quarantined", "transient"], "quarantined"),
        (["measured", "failed"], "failed"),
        (["failed", "measured"], "measured"),
        (["transient"], "failed"),
    ],
)
def test_the_newest_record_that_is_not_a_transient_failure_decides_the_state(states, expected):
    records = [
        point("failed" if s == "transient" else s, transient=s == "transient", metrics={"itl_p50_ms": 5.0})
        for s in states
    ]
    (p,) = operating_points(records)
    assert p.state == expected
    assert (p.metrics.get("itl_p50_ms") == 5.0) == (expected == "measured"), "only measured points carry numbers"
    assert (p.cause is None) == (expected == "measured")


def test_points_differ_by_load_and_by_provenance():
    records = [point(), point(load_label="c8", load={"concurrency": 8}), point(provenance="simulated")]
    points = operating_points(records)
    assert [p.point_id for p in points] == ["abc-c4", "abc-c8", "abc-c4-simulated"]


def test_baseline_wins_over_trial_for_the_same_config():
    (p,) = operating_points([point(purpose="trial", params={"x": 1}), point(purpose="baseline")])
    assert p.purpose == "baseline"
    assert p.params == {"x": 1}


def test_quality_is_joined_by_fingerprint_and_never_below_its_noise_floor():
    assert operating_points([point(), quality(0.0004)])[0].metrics["quality_kl"] == 0.0015
    assert operating_points([point(), quality(0.02)])[0].metrics["quality_kl"] == 0.02
    assert operating_points([point(), quality(0.0004, floor=None)])[0].metrics["quality_kl"] == 0.0004
    assert "quality_kl" not in operating_points([point(), quality(None)])[0].metrics
    assert "quality_kl" not in operating_points([point(fingerprint="other"), quality(0.02)])[0].metrics


def test_the_last_measured_quality_wins_and_a_failure_says_why():
    failed = quality(None, state="failed", cause="request_errors", metrics={})
    assert operating_points([point(), quality(0.02), quality(0.03), failed])[0].metrics["quality_kl"] == 0.03
    (p,) = operating_points([point(), failed])
    assert "quality_kl" not in p.metrics
    assert p.quality_cause == "request_errors"


def test_startup_comes_from_the_launch_unless_the_point_has_it():
    assert operating_points([point(), launch()])[0].metrics["startup_s"] == 31.5
    assert operating_points([point(metrics={"startup_s": 20.0}), launch()])[0].metrics["startup_s"] == 20.0


def test_arguments_left_to_vllm_are_not_settings():
    assert settings(point().engine) == {"model": "m", "args.max_num_seqs": 8, "env.A": "1"}
    assert operating_points([point()])[0].overrides == 2


def test_failures_count_points_launches_and_recoveries():
    records = [
        point("failed", cause="startup_timeout", transient=True, detail="no answer"),
        launch(state="failed", cause="startup_timeout", detail="no answer in 120 s", log="launches/l1/server.log"),
        point(launch_id="l2"),
        point("failed", cause="out_of_memory", load_label="c8", launch_id="l2", detail="first"),
        point("failed", cause="out_of_memory", load_label="c16", launch_id="l2", detail="second"),
        quality(None, state="failed", cause="request_errors", metrics={}, detail="HTTP 400"),
    ]
    by_cause = {f.cause: f for f in failures(records)}
    assert list(by_cause) == ["out_of_memory", "startup_timeout", "request_errors"]
    timeout = by_cause["startup_timeout"]
    assert (timeout.points, timeout.recovered, timeout.launches) == (1, 1, ("l1",))
    assert timeout.detail == "no answer in 120 s"
    assert timeout.log == "launches/l1/server.log"
    assert (by_cause["out_of_memory"].points, by_cause["out_of_memory"].recovered) == (2, 0)
    assert by_cause["out_of_memory"].detail == "second"
    assert by_cause["request_errors"].subject == "quality"


def test_frame_has_one_row_for_each_point_and_nan_only_where_nothing_was_measured():
    frame = points_frame(
        [
            point(metrics={"ttft_p99_ms": 100.0, "cost_usd_per_mtok": 2.0}, params={"max_num_seqs": 8}),
            point(metrics={"ttft_p99_ms": 110.0, "cost_usd_per_mtok": 2.0}, repeat=1),
            point("failed", config_hash="bad", engine={"model": "m", "args": {"spec": {"k": 4}}, "env": {}}),
        ],
        ["cost_usd_per_mtok", "ttft_p99_ms"],
    )
    assert list(frame["point_id"]) == ["abc-c4", "bad-c4"]
    assert list(frame["on_front"]) == [True, False]
    assert frame["ttft_p99_ms"].isna().tolist() == [False, True]
    assert frame.loc[0, "ttft_p99_ms_sd"] == pytest.approx(50**0.5)
    assert frame.loc[0, "args.max_num_seqs"] == 8
    assert str(frame["args.max_num_seqs"].dtype) == "Int64"
    assert frame.loc[1, "args.spec"] == '{"k":4}'
    assert frame["knob.max_num_seqs"].isna().tolist() == [False, True]
    assert "args.dtype" not in frame


def test_metrics_of_request_classes_have_columns_where_there_are_some():
    metrics = {"goodput_rps": 3.0, "goodput_rps.batch": 1.0, "goodput_rps.chat": 2.0}
    frame = points_frame([point(metrics=metrics), point(metrics=metrics | {"goodput_rps.chat": 4.0}, repeat=1)])
    assert frame.loc[0, "goodput_rps.chat"] == 3.0 and frame.loc[0, "goodput_rps.batch"] == 1.0
    assert frame.loc[0, "goodput_rps.chat_sd"] == pytest.approx(2**0.5)
    assert not [name for name in points_frame([point()]) if name.endswith(".chat")]


def test_an_empty_study_gives_an_empty_frame_with_all_columns():
    frame = points_frame([], ["cost_usd_per_mtok"])
    assert len(frame) == 0
    assert {"point_id", "state", "on_front", "model", *METRICS} <= set(frame)
    assert frame["ttft_p99_ms"].dtype == "float64"


@given(st.permutations(range(7)))
def test_joining_as_records_come_is_joining_all_of_them(order):
    records = [
        point(metrics={"ttft_p99_ms": 10.0}),
        point(metrics={"ttft_p99_ms": 30.0}, launch_id="l2"),
        point(load_label="c8", metrics={"ttft_p99_ms": 5.0}),
        point("failed", load_label="c8", launch_id="l2"),
        launch(startup_s=40.0),
        quality(0.02),
        quality(0.03),
    ]
    join, seen = Join(), []
    for i in order:
        seen.append(records[i])
        join.add(records[i])
        found = [replace(p, intervals={}) for p in operating_points(seen)]
        assert join.points() == found
        assert all(join.point(p.config_hash, p.load_label, p.provenance) == p for p in found)
