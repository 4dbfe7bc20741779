"""Quality by format: the table, the warnings, and a pick that leaves out what is not shown to be good enough."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_study import NOISE_FLOOR_KL

import sweep
from sweep.cli import main
from sweep.decide.quality import COLUMNS, quality_checks, quality_table, quality_warnings, table_lines
from sweep.errors import SlaError
from sweep.measure.quality.completions import judge
from sweep.results.records import QualityRecord, RecordStore


def with_results(kl: float, worse: int, better: int = 0, **changes: Any) -> dict[str, Any]:
    task = {
        "items": 200, "accuracy": 0.7 - (worse - better) / 200, "low": 0.6, "high": 0.8, "better": better,
        "worse": worse, "mcnemar_p": 0.01, "difference": (better - worse) / 200, "difference_low": -0.1,
        "difference_high": 0.01,
    }  # fmt: skip
    return {
        "metrics": {"quality_kl": kl, "quality_top1_agreement": 0.9, "quality_perplexity": 25.0,
                    "quality_task_accuracy": task["accuracy"]},
        "intervals": {"quality_kl": (0.9 * kl, 1.1 * kl), "quality_task_accuracy": (0.6, 0.8)},
        "losses": {"quality_kl": {"loss": kl, "low": 0.9 * kl, "high": 1.1 * kl},
                   "quality_task_accuracy": {"loss": (worse - better) / 200, "low": -0.01, "high": 0.1}},
        "tasks": {"all tasks": task},
        **changes,
    }  # fmt: skip


@pytest.fixture
def study(study_dir: Path, tmp_path: Path) -> Path:
    """The example study with full results of three formats; margins are what a test writes into study.json."""
    folder = shutil.copytree(study_dir, tmp_path / "demo")
    store = RecordStore(folder)
    old = {r.fingerprint: r for r in store.read() if isinstance(r, QualityRecord)}
    store.append(replace(old["bf16"], **with_results(0.0, 0)))
    store.append(replace(old["int8"], **with_results(0.0, 0, identical=True)))
    store.append(replace(old["kv-fp8"], **with_results(0.02, 12, 3, task_failure=None)))
    return folder


def margins(folder: Path, **metrics: float) -> None:
    meta = json.loads((folder / "study.json").read_text())
    meta["config"]["quality"] = {"non_inferiority": metrics}
    (folder / "study.json").write_text(json.dumps(meta))


def test_one_row_for_each_format_the_reference_first(study: Path) -> None:
    frame = quality_table(sweep.open(study).records)
    assert list(frame.columns) == list(COLUMNS)
    assert frame["settings"].tolist() == [
        "reference",
        "quantization=int8_per_channel_weight_only",
        "kv_cache_dtype=fp8",
        "kv_cache_dtype=fp8 max_num_seqs=8 quantization=int8_per_channel_weight_only",
    ]
    fp8 = frame.iloc[2]
    assert (fp8["quality_kl"], fp8["quality_kl_low"], fp8["quality_kl_high"]) == pytest.approx((0.02, 0.018, 0.022))
    assert (fp8["flips_better"], fp8["flips_worse"], fp8["task_items"], fp8["mcnemar_p"]) == (3, 12, 200, 0.01)
    assert fp8["noise_floor_kl"] == NOISE_FLOOR_KL
    lost = frame.iloc[3]
    assert lost["state"] == "failed" and lost.isna()["quality_kl"] and "request_errors" in lost["note"]
    assert frame["verdict"].isna().tolist() == [False, True, True, True]


def test_records_of_an_older_sweep_have_intervals_from_their_standard_errors(study_dir: Path) -> None:
    frame = quality_table(sweep.open(study_dir).records).set_index("settings")
    row = frame.loc["kv_cache_dtype=fp8"]
    assert row["quality_kl_high"] - row["quality_kl"] == pytest.approx(1.95996 * 0.0213 / 12, rel=1e-4)
    assert frame["quality_task_accuracy"].isna().all()


def test_no_quality_is_an_empty_table(empty_study_dir: Path) -> None:
    study = sweep.open(empty_study_dir)
    assert study.quality.empty and list(study.quality.columns) == list(COLUMNS)
    assert table_lines(study.quality) == ["no quality was measured in this study"]


def test_a_format_without_effect_is_flagged_and_the_reference_is_not(study: Path) -> None:
    opened = sweep.open(study)
    warnings = quality_warnings(opened.meta, opened.records)
    assert warnings[0] == (
        "quantization=int8_per_channel_weight_only: what was asked for had no effect:"
        " every log-probability equals the reference's"
    )
    assert len(warnings) == 2 and "request_errors" in warnings[1]


def test_answers_that_change_under_load_are_a_warning(study: Path) -> None:
    found = {"load": "c16", "kl": 0.2, "max_kl": 0.005, "greedy_identical": 0.5, "unchanged": False}
    records = sweep.open(study).records
    assert quality_checks({"quality_under_load": found}) == []
    fine = quality_checks({"quality_under_load": {**found, "kl": 0.0, "answered": 17, "unchanged": True}})
    assert fine[0].startswith("answers under load (c16, 17 requests answered meanwhile): KL 0 nats/token")
    warning = quality_warnings({"quality_under_load": found}, records)[-1]
    assert "at c16 the answers are KL 0.2" in warning and "50%" in warning
    assert len(quality_warnings({"quality_under_load": {**found, "unchanged": True}}, records)) == 2
    assert "could not be checked: dead" in quality_warnings({"quality_under_load": {"failed": "dead"}}, records)[-1]


def test_lossless_speculation_is_said_to_be_so() -> None:
    check = {**judge([np.array([0.0, 0.125]), np.zeros(2)]).to_dict()}
    (line,) = quality_checks({"speculation.abc": check, "study": "s"})
    assert line == (
        "speculation of abc is lossless: 50% of 2 greedy completions are the target's own, token by token"
        " (largest gap 0.125 nats, near-ties up to 0.25)"
    )
    assert quality_checks({"speculation.abc": {**check, "lossless": False}}) == []


def test_the_terminal_shows_values_with_intervals_flips_and_verdicts(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    margins(study, quality_kl=0.05, quality_task_accuracy=0.05)
    assert main(["quality", str(study)]) == 0
    out = capsys.readouterr().out
    line = next(text for text in out.splitlines() if text.startswith("kv_cache_dtype=fp8"))
    assert "0.02 (0.018 to 0.022)" in line and "+3/-12" in line and line.endswith("not shown")
    assert "warning: quantization=int8_per_channel_weight_only: what was asked for had no effect" in out
    assert main(["quality", str(study), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in told["formats"]][:3] == ["reference", "not shown", "not shown"]


def test_what_is_not_shown_non_inferior_is_not_picked_unless_asked_for(study: Path) -> None:
    free = sweep.open(study).pick(minimize="cost_usd_per_mtok")
    margins(study, quality_kl=0.01)
    opened = sweep.open(study)
    assert set(opened.not_shown) == {"kv-fp8", "int8-kv-fp8"}
    bound = opened.pick(minimize="cost_usd_per_mtok")
    assert free.chosen.fingerprint == "int8-kv-fp8" and bound.chosen.fingerprint not in opened.not_shown
    assert "2 formats took no part, not shown to be non-inferior" in bound.why[-1]
    asked = opened.pick(minimize="cost_usd_per_mtok", allow_inferior=True)
    assert asked.chosen.point_id == free.chosen.point_id


def test_where_no_format_is_good_enough_the_pick_says_so(study: Path) -> None:
    margins(study, **{"quality_task_accuracy.facts": 0.01})
    with pytest.raises(SlaError, match="no measured point is shown to be non-inferior") as refused:
        sweep.open(study).pick(minimize="cost_usd_per_mtok")
    assert "--allow-inferior" in (refused.value.hint or "")
