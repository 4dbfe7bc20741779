from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_points import COST, KL, OBJECTIVES, TTFT, made_grid, made_point

import sweep
from sweep.decide.explain.verdict import against_defaults, against_random
from sweep.results.records import PointRecord, RecordStore

KNOBS = {"max_num_seqs": [None, 8, 64], "kv_cache_dtype": [None, "fp8"]}


def test_the_defaults_are_fine_where_everything_is_alike():
    found = against_defaults(made_grid(KNOBS, lambda a, c: (1, 1, 0.001)), OBJECTIVES)
    assert found.outcome == "fine" and found.text.startswith("the defaults are fine: none of their 3 points is beaten")


def test_the_defaults_stay_fine_under_noise():
    """17 configs that are no better, each with noise of 3 %: the best of them always looks better."""
    knobs = {"max_num_batched_tokens": [None, *range(1024, 9216, 1024)], "max_num_seqs": [None, 8]}
    fine = 0
    for seed in range(20):
        points = made_grid(knobs, lambda a, c: (1, 1, 0.001), cv=0.03 * 3**0.5, noise=0.03, seed=seed)
        fine += against_defaults(points, OBJECTIVES).outcome == "fine"
    assert fine >= 18


def test_the_defaults_are_beaten_by_what_is_better_at_equal_quality():
    found = against_defaults(made_grid(KNOBS, lambda a, c: (0.8 if a.get("max_num_seqs") else 1, 1, 0.001)), OBJECTIVES)
    assert found.outcome == "beaten" and "3 of their 3 points beaten" in found.text
    assert found.gain_interval[0] > 0


def test_cheaper_at_a_loss_of_quality_is_a_trade():
    points = made_grid(KNOBS, lambda a, c: (0.8, 1, 0.02) if "kv_cache_dtype" in a else (1, 1, 0.001))
    found = against_defaults(points, OBJECTIVES)
    assert found.outcome == "beaten" and "can be traded for better" in found.text
    assert "cost_usd_per_mtok -20 %" in found.text and "(KL 0.02)" in found.text


def test_without_defaults_or_noise_there_is_no_verdict():
    points = made_grid(KNOBS, lambda a, c: (1, 1, 0.001))
    without = [replace(p, purpose="trial") for p in points]
    assert against_defaults(without, OBJECTIVES).text.startswith("cannot tell: vLLM's defaults have no measured point")
    alone = [p for p in points if p.purpose == "baseline"]
    assert against_defaults(alone, OBJECTIVES).text.startswith("cannot tell: nothing but vLLM's defaults")
    unknown = made_grid(KNOBS, lambda a, c: (0.5 if a else 1, 1, 0.001), cv=None)
    assert "noise of cost_usd_per_mtok, ttft_p50_ms is unknown" in against_defaults(unknown, OBJECTIVES).text
    assert against_defaults([], OBJECTIVES).outcome == "cannot tell"


def write_study(folder, costs, *, sampler, startup_trials=6):
    """One point for each cost, measured twice, one after the other."""
    folder.mkdir()
    config = {"sampler": sampler and {"kind": sampler, "startup_trials": startup_trials}}
    meta = {"study": "made", "objectives": [COST, TTFT], "config": config if sampler else {}}
    (folder / "study.json").write_text(json.dumps(meta))
    store = RecordStore(folder)
    for number, cost in enumerate(costs):
        args = {"max_num_seqs": number} if number else {}
        point = made_point(args, 8, {COST: cost, TTFT: 100.0})
        for repeat, slip in enumerate((0.99, 1.01)):
            store.append(
                PointRecord(
                    point_id=f"{number}-r{repeat}", launch_id=f"l{number}", config_hash=point.config_hash,
                    fingerprint="f", engine=point.engine, load=point.load, load_label="c8", params=args or None,
                    purpose=point.purpose, devices=1, state="measured", repeat=repeat,
                    metrics={COST: cost * slip, TTFT: 100.0 * slip},
                    started_at=f"2026-05-04T10:{2 * number:02d}:00+00:00",
                    finished_at=f"2026-05-04T10:{2 * number + 1:02d}:0{repeat}+00:00",
                )
            )  # fmt: skip
    return sweep.open(folder)


RANDOM = [1.0, 0.95, 1.05, 0.9, 1.1, 0.97, 0.93]  # the defaults and what chance gives


@pytest.mark.parametrize(
    ("later", "outcome"), [([0.5, 0.45, 0.4, 0.5, 0.6, 0.5], "better"), ([1.0, 1.1, 0.95, 0.91, 1.2, 1.0], "no better")]
)
def test_a_search_against_its_own_random_start(tmp_path, later, outcome):
    study = write_study(tmp_path / "s", [*RANDOM, *later], sampler="tpe", startup_trials=14)
    found = against_random(study)
    assert found.outcome == outcome and "tpe's first 6 configs against as many random ones" in found.text
    assert (found.gain > 0.5) == (outcome == "better")


def test_what_was_launched_before_the_start_up_trials_were_in_is_random(tmp_path):
    study = write_study(tmp_path / "s", [*RANDOM, 0.5, 0.5], sampler="tpe", startup_trials=6)
    assert against_random(study).text == "cannot tell: 2 random configs, 6 chosen by tpe; 5 of each are needed"


def test_studies_without_a_random_share(tmp_path):
    assert against_random(write_study(tmp_path / "a", RANDOM, sampler="random")).outcome == "is random"
    grid = against_random(write_study(tmp_path / "b", RANDOM, sampler="grid"))
    assert grid.outcome == "cannot tell" and "grid draws none of its configs at random" in grid.text
    unknown = against_random(write_study(tmp_path / "c", RANDOM, sampler=None))
    assert unknown.outcome == "cannot tell" and "does not say which sampler" in unknown.text
    json.dumps(unknown.to_dict(), allow_nan=False)


def test_other_objectives_than_the_studys(tmp_path):
    study = write_study(tmp_path / "s", RANDOM, sampler="tpe")
    assert against_random(study, [KL]).outcome == "cannot tell"
