"""What `sweep show` tells of a point: metrics with intervals and source, the proof, a cause where it failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from example_study import write_study

from sweep.decide.opened import Study, open_study
from sweep.decide.point_text import point_json, point_text
from sweep.errors import StudyError
from sweep.results.records import PointRecord, RecordStore


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return open_study(write_study(tmp_path / "example"))


def test_a_measured_point_with_its_intervals_command_and_place(study: Study) -> None:
    point = next(p for p in study.operating_points if p.n_repeats > 1)
    text = point_text(study, point.point_id)
    assert "vllm serve" in text and "on the front with probability" in text and f"{point.n_repeats} times" in text
    (cost,) = [line for line in text.splitlines() if line.split()[:1] == ["cost_usd_per_mtok"]]
    low, high = point.intervals["cost_usd_per_mtok"]
    assert f"[{low:.4g}, {high:.4g}]" in cost and cost.endswith("repeats")


def test_a_failed_point_has_its_cause_and_no_numbers(study: Study) -> None:
    point = next(p for p in study.operating_points if p.state == "failed")
    text = point_text(study, point.point_id)
    assert f"failed: {point.cause}" in text and "cost_usd_per_mtok" not in text


def test_the_proof_is_shown_and_what_is_unknown_says_so(study: Study) -> None:
    first = next(r for r in study.records if isinstance(r, PointRecord) and r.state == "measured")
    proof = {"server": {"pid": 77, "foreign_owner": None}, "stationary": True, "devices": None}
    RecordStore(study.path).append(replace(first, repeat=9, proof=proof))
    again = study.refresh()
    point_id = f"{first.config_hash}-{first.load_label}"
    text = point_text(again, point_id)
    assert "pid=77 foreign_owner=unknown" in text and text.endswith("devices    unknown")
    told = json.loads(json.dumps(point_json(again, point_id)))
    assert told["measurements"][-1]["proof"] == proof and told["intervals"]


def test_an_unknown_point_names_the_nearest(study: Study) -> None:
    with pytest.raises(StudyError, match="no point 'nothing'"):
        point_text(study, "nothing")
