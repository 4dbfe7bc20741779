"""An opened study: tables, pick, export, errors, and reading while another process writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pandas as pd
import pytest

import sweep
from sweep.errors import ConfigError, SlaError, StudyError
from sweep.results.metrics import METRICS


def test_tables_of_a_finished_study(study_dir):
    study = sweep.open(study_dir)
    assert study.name == "demo"
    assert study.objectives == ("cost_usd_per_mtok", "ttft_p99_ms", "quality_kl")
    assert study.config["budget"]["trials"] == 36
    assert len(study.points) == 49
    assert study.points["state"].value_counts().to_dict() == {"measured": 36, "failed": 12, "quarantined": 1}
    assert set(study.front()["point_id"]) == set(study.points.query("on_front")["point_id"])
    assert study.front()["cost_usd_per_mtok"].is_monotonic_increasing
    assert len(study.launches) == 13
    assert study.launches["startup_s"].isna().sum() == 4
    failures = study.failures.set_index("cause")
    assert failures.loc["startup_timeout", "recovered"] == 4
    assert "static_scaled_fp8_quant" in failures.loc["died_at_startup", "detail"]
    assert study.hypervolume().value > 0
    assert repr(study) == "<Study demo: 49 operating points, 36 measured>"


def test_a_front_of_one_metric_is_its_best_points(study_dir):
    study = sweep.open(study_dir)
    best = study.front(["ttft_p50_ms"])
    assert best["ttft_p50_ms"].tolist() == [study.points["ttft_p50_ms"].min()]
    with pytest.raises(ConfigError, match="did you mean"):
        study.front(["ttft_p50"])


def test_pick_defaults_to_the_first_objective(study_dir):
    study = sweep.open(study_dir)
    result = study.pick("ttft_p99_ms<=2500 quality_kl<=0.01")
    assert result.target.name == "cost_usd_per_mtok"
    assert result.chosen.load_label == "c8"
    assert result.chosen.engine["args"]["quantization"] == "int8_per_channel_weight_only"
    assert "± " in result.text()
    assert repr(result) == result.text()
    assert not study.pick("ttft_p99_ms<=1").feasible
    assert study.pick(maximize="output_throughput_tok_s").target.direction == "maximize"
    with pytest.raises(SlaError):
        study.pick("ttft_p99_ms<=1 furlongs<=3")


def test_an_empty_study_gives_empty_tables_with_all_columns(empty_study_dir):
    study = sweep.open(empty_study_dir)
    assert len(study.points) == 0
    assert {"point_id", "on_front", *METRICS} <= set(study.points)
    assert list(study.front().columns) == list(study.points.columns)
    assert {"cause", "points", "detail"} <= set(study.failures)
    assert {"launch_id", "startup_s"} <= set(study.launches)
    assert study.hypervolume() is None
    study.plot_front()
    with pytest.raises(StudyError, match="has been measured yet"):
        study.pick("ttft_p99_ms<=500")


def test_reading_while_the_last_line_is_being_written(study_dir, tmp_path):
    copy = shutil.copytree(study_dir, tmp_path / "torn")
    records = copy / "records.jsonl"
    whole = records.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    records.write_bytes(whole[: last + 40])
    study = sweep.open(copy)
    assert len(study.records) == len(sweep.open(study_dir).records) - 1
    records.write_bytes(whole)
    assert len(study.refresh().records) == len(study.records) + 1


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_export_reads_back(study_dir, tmp_path, suffix):
    study = sweep.open(study_dir)
    path = study.export(tmp_path / f"points{suffix}")
    back = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    assert list(back.columns) == list(study.points.columns)
    pd.testing.assert_series_equal(back["ttft_p99_ms"], study.points["ttft_p99_ms"])
    assert back["args.max_num_seqs"].dropna().unique().tolist() == [8]


def test_export_of_an_argument_with_mixed_types(study_dir, tmp_path):
    copy = shutil.copytree(study_dir, tmp_path / "mixed")
    lines = (copy / "records.jsonl").read_text().splitlines()
    for number, value in ((0, '"auto"'), (4, "3")):
        lines[number] = lines[number].replace('"enforce_eager": true', f'"enforce_eager": {value}')
    (copy / "records.jsonl").write_text("\n".join(lines) + "\n")
    path = sweep.open(copy).export(tmp_path / "points.parquet")
    assert {"auto", "3", "True"} <= set(pd.read_parquet(path)["args.enforce_eager"])


@pytest.mark.parametrize(
    ("name", "match"), [("points.xlsx", r"\.csv or \.parquet"), ("missing/points.csv", "does not exist")]
)
def test_export_mistakes(study_dir, tmp_path, name, match):
    with pytest.raises(StudyError, match=match):
        sweep.open(study_dir).export(tmp_path / name)


def test_a_missing_study_names_those_beside_it(study_dir):
    with pytest.raises(StudyError, match=r"no study at .*dmo.*\n.*demo"):
        sweep.open(study_dir.parent / "dmo")


def test_a_folder_that_is_no_study(tmp_path):
    with pytest.raises(StudyError, match=r"not a study folder: it has no study\.json"):
        sweep.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="not a study folder"):
        sweep.open(tmp_path / "file")


@pytest.mark.parametrize("content", ["{", "[]", "", "\x00"])
def test_a_corrupt_study_file(tmp_path, content):
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(StudyError, match=r"cannot read .*study\.json"):
        sweep.open(tmp_path)


def test_objectives_of_another_version(empty_study_dir):
    meta = json.loads((empty_study_dir / "study.json").read_text())
    (empty_study_dir / "study.json").write_text(json.dumps(meta | {"objectives": ["carbon_kg"]}))
    with pytest.raises(StudyError, match="carbon_kg"):
        sweep.open(empty_study_dir)


def test_a_corrupt_record_names_its_line(study_dir, tmp_path):
    copy = shutil.copytree(study_dir, tmp_path / "corrupt")
    lines = (copy / "records.jsonl").read_text().splitlines()
    lines[2] = "not a record"
    (copy / "records.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(StudyError, match=r"records\.jsonl:3"):
        sweep.open(copy)


def test_picking_imports_nothing_heavy(study_dir):
    """`sweep pick` must start at once: tables, figures and dominance libraries load only where they are used."""
    code = (
        "import sys, sweep\n"
        f"result = sweep.open({str(study_dir)!r}).pick('ttft_p99_ms<=2500')\n"
        "assert result.text()\n"
        "heavy = {'pandas', 'plotly', 'pyarrow', 'moocore', 'numpy', 'optuna', 'hydra', 'vllm', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names():
    assert sweep.open is not open
    assert sweep.Study.__name__ == "Study"
    assert isinstance(sweep.__version__, str)
    with pytest.raises(AttributeError, match="no attribute 'close'"):
        sweep.close  # noqa: B018
