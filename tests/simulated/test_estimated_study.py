"""Whole studies on eight H200s in virtual time: a night, an interrupted one, a warm-started one, a revalidation."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

import sweep
from sweep.cli import main
from sweep.decide.opened import Study
from sweep.estimate import is_available
from sweep.results.front import front
from sweep.results.records import LaunchRecord

pytestmark = pytest.mark.skipif(not is_available(), reason="needs aiconfigurator-core")
HOURS = 2.0
SPACE = """\
# @package space
name: estimated
params:
  parallel:
    joint: [tensor_parallel_size]
    choices: [[1], [2], [4], [8]]
  max_num_seqs: {choices: [null, 64, 256]}
  kv_cache_dtype: {choices: [null, fp8, fp8_e5m2]}
  quantization: {choices: [null, fp8]}
"""
WORDS = (
    "model=llama33_70b", "hardware=h200x8", "engine=estimate", "quality.num_prompts=4", "quality.prompt_tokens=64",
    "repeats.share=0.2", "workload.loads.concurrency=[8,64,256]", "search_space=estimated",
)  # fmt: skip


def run(home: Path, study: str, *overrides: str) -> Study:
    words = [*WORDS, f"study={study}", f"storage.dir={home}", *overrides]
    assert main(["run", "--config-dir", str(home / "conf"), *words]) == 0
    return sweep.open(home / study)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("estimated")
    (made / "conf" / "search_space").mkdir(parents=True)
    (made / "conf" / "search_space" / "estimated.yaml").write_text(SPACE)
    return made


@pytest.fixture(scope="module")
def night(home: Path) -> Study:
    return run(home, "night", f"budget.hours={HOURS}", "sampler=random")


def launches(study: Study) -> list[LaunchRecord]:
    return [r for r in study.records if isinstance(r, LaunchRecord)]


def hours(study: Study) -> float:
    moments = [datetime.fromisoformat(t) for r in launches(study) for t in (r.started_at, r.finished_at)]
    return (max(moments) - min(moments)).total_seconds() / 3600


def test_simulated_hours_are_spent_in_seconds(night: Study) -> None:
    assert 0.7 * HOURS < hours(night) < 1.4 * HOURS  # finalists come after the budget
    ended = json.loads((night.path / "status.json").read_text())
    assert "budget.hours" in ended["stop_reason"]
    assert ended["controller_s"] < HOURS * 3600 / 100


def test_every_point_is_estimated_and_there_is_a_front_to_pick_from(night: Study) -> None:
    points = night.operating_points
    assert {p.provenance for p in points} == {"estimated"} and len(points) > 20
    best = front(points, list(night.objectives))
    assert len(best) > 3
    assert night.pick("ttft_p99_ms<=5000").feasible


def test_what_the_data_does_not_cover_has_failed_and_has_no_number(night: Study) -> None:
    unknown = [p for p in night.operating_points if p.engine["args"].get("kv_cache_dtype") == "fp8_e5m2"]
    assert unknown and {(p.state, p.cause) for p in unknown} == {("failed", "unknown_to_estimator")}
    assert all(not p.metrics for p in unknown)


def test_launches_of_all_widths_share_the_node(night: Study) -> None:
    found = launches(night)
    assert len({r.devices for r in found}) >= 3
    moments = sorted({datetime.fromisoformat(t) for r in found for t in (r.started_at, r.finished_at)})
    for one, other in pairwise(moments):
        middle = one + (other - one) / 2
        alive = [
            r for r in found if datetime.fromisoformat(r.started_at) < middle < datetime.fromisoformat(r.finished_at)
        ]
        devices = [d for r in alive for d in r.device_ids]
        assert len(devices) == len(set(devices)) <= 8


def test_the_verdict_on_interference_is_a_fact_with_numbers(home: Path, night: Study) -> None:
    assert night.meta["interference"]["verdict"] == "none"
    study = run(home, "slowed", "budget.trials=6", "sampler=random", "engine.simulation.interference=0.5")
    found = study.meta["interference"]
    assert found["verdict"] == "distorts" and found["copies"] >= 2
    tpot = found["metrics"]["tpot_p50_ms"]
    assert tpot["change"] > tpot["limit"] and len(tpot["beside"]) == found["copies"]
    spans = sorted((r.started_at, r.finished_at) for r in launches(study))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_an_interrupted_study_goes_on_in_virtual_time(home: Path) -> None:
    first = run(home, "again", "budget.hours=0.5", "sampler=random", "validation.finalists=0")
    before = len(launches(first))
    second = run(home, "again", "budget.hours=1", "sampler=random", "validation.finalists=0")
    assert len(launches(second)) > before
    early, late = launches(second)[:before], launches(second)[before:]
    assert max(r.finished_at for r in early) <= min(r.started_at for r in late)


def test_a_warm_start_launches_the_earlier_front_first_and_notes_where_from(home: Path, night: Study) -> None:
    study = run(
        home, "warm", "budget.trials=12", "sampler=random", "model.weights_gib=130", "validation.finalists=0",
        f"warm_start=[{night.path}]", "repeats=none",
    )  # fmt: skip
    noted = study.meta["warm_start"]
    assert [n["study"] for n in noted] == ["night"] and noted[0]["hints"] > 0
    best = {p.config_hash for p in front(night.operating_points, list(night.objectives))}
    first = [r.config_hash for r in launches(study) if r.purpose == "trial"]
    assert first and set(first) <= best
    ids = {r.launch_id for r in launches(study)}
    assert all(p.launch_id in ids for p in study.operating_points)  # nothing was taken over as measured


def test_a_revalidation_measures_the_front_only_and_says_what_moved(
    home: Path, night: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {p.config_hash for p in front(night.operating_points, list(night.objectives))}
    assert main(["revalidate", str(night.path), "study=same"]) == 0
    assert "0 better, 0 worse" in capsys.readouterr().out
    same = sweep.open(home / "same")
    baseline = {p.config_hash for p in night.operating_points if p.purpose == "baseline"}
    assert {p.config_hash for p in same.operating_points} == best | baseline
    slower = ["engine.simulation.interference=1.0", "executor.interference=ignore", "study=slower"]
    assert main(["revalidate", str(night.path), *slower]) == 1
    text = capsys.readouterr().out
    assert "beyond noise" in text or "WORSE" in text
    assert main(["revalidate", str(night.path), "nonsense"]) == 2
