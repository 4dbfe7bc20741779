from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from example_study import write_study
from hypothesis import given
from hypothesis import strategies as st

import sweep
from sweep.cli import main
from sweep.decide.compare import compare, discoveries
from sweep.errors import StudyError

COST, TTFT, KL = "cost_usd_per_mtok", "ttft_p99_ms", "quality_kl"


def changed(source, target, *, points=None, meta=None, keep=lambda record: True):
    """A copy of a study: points(record) edits its point records, meta(study.json's object) its settings."""
    shutil.copytree(source, target)
    if meta is not None:
        data = json.loads((target / "study.json").read_text())
        meta(data)
        (target / "study.json").write_text(json.dumps(data))
    lines = [json.loads(line) for line in (target / "records.jsonl").read_text().splitlines()]
    for record in lines:
        if points is not None and record["kind"] == "point":
            points(record)
    (target / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines if keep(r)))
    return sweep.open(target)


@pytest.fixture(scope="module")
def study(study_dir):
    return sweep.open(study_dir)


def test_a_study_against_itself(study):
    found = compare(study, study)
    assert found.n_matched == 36 and not found.differences and found.only == ((), ()) and not found.states
    assert not found.matched["moved"].any() and (found.matched["p_value"] > 0.99).all()
    volumes = found.hypervolumes
    assert volumes.a == volumes.b and volumes.ratio == 1 and volumes.interval[0] < 1 < volumes.interval[1]
    assert volumes.beaten_a == volumes.beaten_b == ()
    assert found.fronts["on_both"].all()


def test_a_second_draw_of_the_same_noise_moves_nothing(study, tmp_path):
    found = compare(study, sweep.open(write_study(tmp_path / "again", seed=11)))
    assert found.matched["moved"].sum() <= 1
    assert found.hypervolumes.interval[0] < 1 < found.hypervolumes.interval[1]


def slower(record):
    if record["state"] == "measured" and record["metrics"].get(TTFT):
        record["metrics"][TTFT] *= 1.5


def test_what_got_slower_is_found_and_what_did_not_is_not(study, tmp_path):
    found = compare(study, changed(study.path, tmp_path / "b", points=slower))
    moved = found.matched[found.matched["moved"]]
    assert set(moved["metric"]) == {TTFT} and not moved["better"].any()
    assert len(moved) == (found.matched["metric"] == TTFT).sum()
    assert moved["change"].to_numpy() == pytest.approx(1.5)
    assert found.shifts[TTFT].value == pytest.approx(1.5) and found.shifts[COST].value == pytest.approx(1)
    assert found.hypervolumes.ratio < 1 and len(found.hypervolumes.beaten_b) > 10 and not found.hypervolumes.beaten_a
    text = found.text()
    assert "ttft_p99_ms +50 %" in text and "0 better, 35 worse, 0 within noise" in text
    json.dumps(found.to_dict(), allow_nan=False)


def test_what_differs_comes_first(study, tmp_path):
    def meta(data):
        data["config"]["hardware"] = {"name": "h200x8", "devices": 8}
        data["config"]["workload"]["num_requests"] = 64
        data["workload_checksum"] = "b" * 64

    other = changed(study.path, tmp_path / "b", meta=meta)
    lines = compare(study, other).text().splitlines()
    assert lines[3] == "What differs (DIFFERENT requests: matched points answered other questions)"
    assert any(line.split() == ["hardware", "cpu", "->", "h200x8"] for line in lines[4:9])
    told = {d.what: (d.a, d.b) for d in compare(study, other).differences}
    assert told["workload.num_requests"] == (32, 64) and told["hardware.price_usd_per_device_hour"] == (0.09, None)
    silent = changed(other.path, tmp_path / "c", meta=lambda data: data.pop("workload_checksum"))
    assert "not recorded whether the requests were the same" in compare(other, silent).text()
    assert "(the same requests)" in compare(other, other).text()


def test_points_of_one_study_only_and_what_stopped_working(study, tmp_path):
    def points(record):
        if record["engine"]["args"].get("data_parallel_size") == 2:
            record.update(state="failed", cause="out_of_memory", metrics={})

    def keep(record):
        return record["kind"] != "point" or record["engine"]["args"].get("max_num_batched_tokens") != 512

    found = compare(study, changed(study.path, tmp_path / "b", points=points, keep=keep))
    assert {p.engine["args"].get("max_num_batched_tokens") for p in found.only[0]} == {512} and found.only[1] == ()
    assert {(a.state, b.state, b.cause) for a, b in found.states} == {("measured", "failed", "out_of_memory")}
    assert "no longer works (out_of_memory) at c16, c8, c4, c1" in found.text()
    back = compare(sweep.open(tmp_path / "b"), study)
    assert "works now (was out_of_memory)" in back.text()


def test_another_version_of_the_model_matches(study, tmp_path):
    def points(record):
        record["engine"]["model"] = "models/smollm3"
        record["config_hash"] = "f" + record["config_hash"][1:]

    def meta(data):
        data["config"]["model"]["path"] = "models/smollm3"

    found = compare(study, changed(study.path, tmp_path / "b", points=points, meta=meta))
    assert found.n_matched == 36
    assert [(d.what, d.b) for d in found.differences] == [("model", "models/smollm3")]
    assert not found.fronts["engine"].str.contains("model").any()


def test_quality_is_compared_once_for_each_format(study):
    rows = compare(study, study).matched
    assert (rows["metric"] == KL).sum() == 3  # int8-kv-fp8 failed


def test_studies_without_a_common_objective(study, tmp_path):
    other = changed(study.path, tmp_path / "b", meta=lambda data: data.update(objectives=["goodput_rps"]))
    with pytest.raises(StudyError, match="share no objective"):
        compare(study, other)
    assert compare(study, other, [COST]).objectives == (COST,)


@pytest.mark.parametrize(
    "objectives", [[COST], [KL], ["output_throughput_tok_s", "quality_top1_agreement"], [COST, TTFT, "itl_p99_ms", KL]]
)
def test_any_number_of_objectives_of_either_direction(study, objectives):
    found = compare(study, study, objectives)
    assert found.hypervolumes.beaten_a == () and found.objectives == tuple(objectives) and found.text()


def test_an_empty_study(study, empty_study_dir):
    found = compare(study, sweep.open(empty_study_dir))
    assert found.hypervolumes is None and found.n_matched == 0 and "cannot tell" in found.text()
    json.dumps(found.to_dict(), allow_nan=False)


def test_on_the_command_line(study_dir, tmp_path, capsys):
    other = write_study(tmp_path / "other", seed=3)
    assert main(["compare", str(study_dir), str(other)]) == 0
    assert "Fronts, B against A: hypervolume" in capsys.readouterr().out
    assert main(["compare", str(study_dir), str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_matched"] == 36
    assert main(["compare", str(study_dir), str(tmp_path / "none")]) == 2
    assert "no study at" in capsys.readouterr().err


# ---------------------------------------------------------------- false discoveries


def test_benjamini_and_hochberg_by_hand():
    # Ranks 1 to 5 at 5 %: 0.01, 0.02, 0.03, 0.04, 0.05. The third passes and takes the second along.
    p = np.array([0.3, 0.005, 0.025, 0.03, np.nan, 0.9])
    assert discoveries(p, 0.05).tolist() == [False, True, True, True, False, False]


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.01, 0.2))
def test_discoveries_are_the_smallest_p_values(values, rate):
    p = np.array(values)
    found = discoveries(p, rate)
    assert found.shape == p.shape
    if found.any():
        assert p[found].max() <= rate
        assert (p[~found] > p[found].max()).all() or not (~found).any()


def test_among_nothing_few_discoveries_are_made():
    rng = np.random.default_rng(0)
    assert np.mean([discoveries(rng.uniform(size=50)).any() for _ in range(200)]) < 0.09
