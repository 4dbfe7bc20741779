"""The front and the status as people read them in a terminal, and as scripts do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_study import OBJECTIVES, write_meta, write_study

from sweep.decide.opened import Study, open_study
from sweep.decide.tables import front_dict, front_points, front_text, status_text
from sweep.errors import ConfigError
from sweep.results.front import front
from sweep.results.records import PointRecord, RecordStore

STATUS: dict[str, Any] = {
    "state": "running",
    "pid": 4711,
    "counts": {"settled": 5, "measured": 3, "failed": 1, "quarantined": 1, "launches": 2, "configs": 1},
    "jobs": [{"launch_id": "0002-x", "phase": "load c8", "config": "max_num_seqs=4", "running_s": 95.0}],
    "hours_spent": 1.5,
    "usd_spent": 3.0,
    "eta_s": 3725.0,
    "best": {"ttft_p99_ms": {"value": 123.456, "config": "vLLM's defaults", "load": "c1"}},
    "stop_reason": None,
}


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return open_study(write_study(tmp_path / "example"))


def test_the_table_holds_the_front_best_first_and_everything_that_is_not_on_it(study: Study) -> None:
    text = front_text(study)
    points, names = front_points(study, None)
    assert names == OBJECTIVES
    assert {p.point_id for p in points} == {p.point_id for p in front(study.operating_points, OBJECTIVES)}
    costs = [p.metrics["cost_usd_per_mtok"] for p in points]
    assert costs == sorted(costs)
    title, header, *rows = text.splitlines()
    assert title.startswith(f"Pareto front of {', '.join(OBJECTIVES)}: {len(points)} of ")
    assert header.split()[:4] == ["load", *OBJECTIVES]
    assert [row.split()[0] for row in rows[: len(points)]] == [p.load_label for p in points]
    rest = "\n".join(rows[len(points) :])
    for part in (
        "not on any front",
        "invalid_argument: 4 points",
        "died_at_startup: 4 points",
        "4 measured after a retry",
    ):
        assert part in rest


def test_other_objectives_are_sorted_their_own_way(study: Study) -> None:
    points, _ = front_points(study, ["output_throughput_tok_s", "ttft_p99_ms"])
    rates = [p.metrics["output_throughput_tok_s"] for p in points]
    assert rates == sorted(rates, reverse=True)
    with pytest.raises(ConfigError, match="unknown metric 'speed'"):
        front_text(study, ["speed"])


def test_the_front_as_json_gives_reasons_for_every_point_it_leaves_out(study: Study) -> None:
    data = json.loads(json.dumps(front_dict(study), allow_nan=False))
    measured = [p for p in study.operating_points if p.state == "measured"]
    left_out = {row["point_id"]: row["reason"] for row in data["ineligible"]}
    assert len(data["front"]) + len(left_out) <= len(study.operating_points)
    assert any("quality measurement failed" in reason for reason in left_out.values())
    assert len(measured) > len(data["front"]) > 0
    assert [o["direction"] for o in data["objectives"]] == ["minimize"] * 3


def test_a_study_without_points_has_a_title_and_no_table(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    write_meta(folder)
    assert front_text(open_study(folder)) == f"Pareto front of {', '.join(OBJECTIVES)}: 0 of 0 measured points"


def test_a_running_study_shows_what_it_does(study: Study) -> None:
    text = status_text(study, STATUS)
    for part in (
        "demo: running (process 4711)",
        "3 measured, 1 failed, 1 quarantined; 1 configuration in 2 launches",
        "1.50 h, 3.00 USD",
        "ETA       1 h 02 min",
        "0002-x: load c8 (1 min 35 s): max_num_seqs=4",
        "ttft_p99_ms 123.5: vLLM's defaults at c1",
    ):
        assert part in text
    assert "ended" not in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"state": "died"}, "demo: stopped without finishing; the same `sweep run` command continues it"),
        ({"state": "finished", "stop_reason": "budget.trials=5 reached"}, "ended     budget.trials=5 reached"),
        ({"state": "interrupted", "stop_reason": "interrupted"}, "demo: interrupted"),
    ],
)
def test_an_ended_study_says_how(study: Study, changes: dict[str, Any], line: str) -> None:
    text = status_text(study, {**STATUS, **changes, "jobs": [], "eta_s": None})
    assert line in text and "ETA" not in text and "now " not in text


def test_no_status_yet(study: Study) -> None:
    assert status_text(study, None) == "demo: nothing was run yet"


def test_the_front_says_how_sure_it_is(study: Study) -> None:
    lines = front_text(study).splitlines()
    assert "on front" in lines[1] and all("±" in row and "%" in row.split("±")[1] for row in lines[2:4])
    (spread,) = [line for line in lines if line.startswith("spread")]
    assert "repeats" in spread and "ttft_p99_ms" in spread
    points = front_dict(study)["front"]
    assert all(0 < p["probability_on_front"] <= 1 for p in points)


def test_a_study_without_repeats_says_what_it_does_not_know(tmp_path: Path) -> None:
    lines = front_text(two_launches(tmp_path, [("a", 100.0, 1.0), ("b", 101.0, 1.01)])).splitlines()
    assert any(line.startswith("spread") and "nothing was repeated" in line for line in lines)


def test_one_configuration_under_two_names_is_tied_and_a_control_shows_its_drift(tmp_path: Path) -> None:
    """The same truth twice, and the first of them once more 4 % slower: the loser of the draw is named as tied."""
    rows = [("a", 100.0, 1.0), ("b", 101.0, 1.01), ("a", 104.0, 1.04), ("c", 400.0, 4.0)]
    lines = front_text(two_launches(tmp_path, rows)).splitlines()
    (tied,) = [line for line in lines if line.startswith("tied")]
    assert "x=a at c4" in tied and "x=c" not in tied
    (control,) = [line for line in lines if line.startswith("control")]
    assert "ttft_p99_ms +4.0%" in control and "cost_usd_per_mtok +4.0%" in control


def two_launches(folder: Path, rows: list[tuple[str, float, float]]) -> Study:
    """A study of (config, TTFT, cost) in order; config a is the baseline."""
    folder = folder / "s"
    folder.mkdir()
    write_meta(folder)
    store = RecordStore(folder)
    for number, (name, ttft, cost) in enumerate(rows):
        store.append(
            PointRecord(
                point_id=f"p{number}", launch_id=f"l{number}", config_hash=name, fingerprint="f",
                engine={"model": "m", "args": {"x": name}, "env": {}}, load={"concurrency": 4}, load_label="c4",
                params=None, purpose="baseline" if name == "a" else "trial", devices=1, state="measured",
                metrics={"ttft_p99_ms": ttft, "cost_usd_per_mtok": cost, "quality_kl": 0.0}, repeat=number,
            )
        )  # fmt: skip
    return open_study(folder)
