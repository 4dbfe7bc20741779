from __future__ import annotations

import json

import pytest

import sweep
from sweep.cli import main
from sweep.decide.explain import explain
from sweep.errors import ConfigError, StudyError


@pytest.fixture(scope="module")
def study(study_dir):
    return sweep.open(study_dir)


@pytest.fixture(scope="module")
def explanation(study):
    return explain(study)


def test_an_engineer_reads_the_verdicts_first(explanation):
    lines = explanation.text().splitlines()
    assert lines[0] == "demo: 31 points of 8 configs, in cost_usd_per_mtok, ttft_p99_ms, quality_kl"
    assert lines[2].startswith("defaults  ") and len(lines) < 70
    assert max(map(len, lines)) <= 140
    text = "\n".join(lines)
    for heading in ("Front: ", "Along or outward", "Cliffs", "Knobs", "Overrides"):
        assert heading in text


def test_what_the_example_study_teaches(explanation):
    verdicts = {e.level: e.verdict for e in explanation.techniques}
    assert verdicts["quantization=int8_per_channel_weight_only"] == "outward"  # 31 % faster in the example's making
    assert verdicts["data_parallel_size=2"] == "along"  # two devices for 1.38 times the speed
    assert verdicts["speculative_config.method=ngram speculative_config.num_speculative_tokens=4"] == "inward"
    assert verdicts["enable_prefix_caching=false"] in ("cannot tell", "no effect")  # made within 0.5 %
    kv = next(e for e in explanation.techniques if e.level == "kv_cache_dtype=fp8")
    assert kv.effects["quality_kl"].value == pytest.approx(0.0213 - 0.0015)
    causes = {c.cause for c in explanation.cliffs if c.kind == "failure"}
    assert causes == {"invalid_argument", "died_at_startup", "first_request_failed"}
    assert explanation.defaults.outcome == "beaten" and explanation.random.outcome == "cannot tell"


def test_everything_is_json(explanation):
    found = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
    assert {"membership", "progress", "techniques", "cliffs", "importance", "overrides", "defaults"} <= set(found)
    assert found["progress"]["course"][-1]["share"] == pytest.approx(1)


@pytest.mark.parametrize(
    "objectives",
    [
        ["cost_usd_per_mtok"],
        ["quality_kl"],
        ["output_throughput_tok_s", "quality_top1_agreement"],
        ["output_throughput_tok_s", "ttft_p99_ms", "itl_p99_ms", "quality_kl"],
    ],
)
def test_any_number_of_objectives_of_either_direction(study, objectives):
    found = explain(study, objectives)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["objectives"] == objectives
    assert "Along or outward" in found.text()


def test_one_load_and_one_technique(study):
    found = explain(study, load="c8", technique="weights")
    assert {e.technique for e in found.techniques} == {"weights"} and {c.knob for c in found.cliffs} == {"weights"}
    assert set(found.membership["load_label"]) == {"c8"} and found.progress is None
    assert "Overrides" not in found.text() and "at c8" in found.text()


def test_the_overrides_of_a_point(study):
    point = next(p for p in study.operating_points if p.engine["args"].get("max_num_batched_tokens") == 512)
    report = explain(study, point_id=point.point_id).overrides
    worth = {w.setting: w for w in report.worths}
    assert worth["max_num_batched_tokens=512"].without.engine["args"].get("max_num_seqs") == 8
    assert worth["max_num_seqs=8"].without is None


def test_mistakes_are_explained(study, empty_study_dir):
    with pytest.raises(StudyError, match="nothing to explain in 'demo': no measured point has cost_usd_per_mtok"):
        explain(sweep.open(empty_study_dir))
    with pytest.raises(ConfigError, match="unknown metric"):
        explain(study, ["ttft"])
    with pytest.raises(ConfigError, match="no point has the load 'c7'"):
        explain(study, load="c7")
    failed = next(p for p in study.operating_points if p.state == "failed")
    with pytest.raises(StudyError, match="is failed"):
        explain(study, point_id=failed.point_id)


def test_on_the_command_line(study_dir, capsys):
    assert main(["explain", str(study_dir), "--load", "c8", "--technique", "kv_cache"]) == 0
    assert "kv_cache_dtype=fp8" in capsys.readouterr().out
    assert main(["explain", str(study_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["study"] == "demo"
    assert main(["explain", str(study_dir), "--technique", "wieghts"]) == 2
    assert "did you mean 'weights'?" in capsys.readouterr().err
