"""Each way to mislead is told from what a study did, and an honest study is told from it too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweep.cli import main
from sweep.decide.opened import Study, open_study
from sweep.decide.scorecard import Line, score_card, score_card_text
from sweep.results.records import LaunchRecord, PointRecord

DISTRIBUTED = {"kind": "lognormal", "median": 100.0}
CONFIG: dict[str, Any] = {
    "model": {"name": "m"},
    "workload": {
        "prompt_tokens": DISTRIBUTED,
        "output_tokens": DISTRIBUTED,
        "temperature": 0.7,
        "cache": "warmed",
        "loads": {"concurrency": [8], "request_rate_rps": [2.0]},
    },
}
PROOF = {
    "cache": {"state": "warmed", "reset": True, "expected_hit_rate": 0.0},
    "engine": {"prefix_cache_hit_rate": 0.0},
}
OBJECTIVES = ("cost_usd_per_mtok", "ttft_p99_ms")


def run(config: str, **changes: Any) -> PointRecord:
    base: dict[str, Any] = {
        "point_id": f"{config}-c8-r0", "launch_id": f"l-{config}", "config_hash": config, "fingerprint": "f",
        "engine": {"model": "m", "args": {}, "env": {}}, "load": {"concurrency": 8}, "load_label": "c8",
        "params": None, "purpose": "trial", "devices": 1, "state": "measured", "proof": PROOF,
        "metrics": {"cost_usd_per_mtok": 1.0, "ttft_p99_ms": 9.0, "requests_completed": 2000.0,
                    "first_request_ms": 80.0},
    }  # fmt: skip
    return PointRecord(**(base | changes))


def launch(number: int, args: dict[str, Any], purpose: Any = "trial") -> LaunchRecord:
    return LaunchRecord(
        launch_id=f"{number:04d}", config_hash=str(args), fingerprint="f",
        engine={"model": "m", "args": args, "env": {}}, params=None, purpose=purpose, devices=1, device_ids=(0,),
        state="ok", cause=None, detail=None, transient=False, startup_s=30.0, duration_s=60.0, started_at="",
        finished_at="",
    )  # fmt: skip


def honest() -> Study:
    """A study that does what it should: every line is ok, or has no object."""
    points = [run("base", purpose="baseline"), run("base", purpose="baseline", repeat=1),
              run("base", purpose="validation", repeat=-1)]  # fmt: skip
    return study([*points, launch(1, {}, "baseline")])


def study(records: list[Any], *, objectives: tuple[str, ...] = OBJECTIVES, **config: Any) -> Study:
    workload = {**CONFIG["workload"], **config.pop("workload", {})}
    meta = {"study": "s", "objectives": list(objectives), "config": {**CONFIG, **config, "workload": workload}}
    return Study(Path("s"), meta, tuple(records))


def line(of: Study, question: str) -> Line:
    (found,) = [x for x in score_card(of) if x.question.startswith(question)]
    return found


def test_an_honest_study_has_nothing_to_hide() -> None:
    verdicts = {x.question: x.verdict for x in score_card(honest())}
    assert set(verdicts.values()) <= {"ok", "not applicable"}, verdicts


POINT = run("base")
LIES: list[tuple[str, str, Study]] = [
    ("fixed lengths", "bad", study([POINT], workload={"prompt_tokens": {"value": 9}, "output_tokens": {"value": 9}})),
    ("fixed lengths", "warn", study([POINT], workload={"output_tokens": {"kind": "fixed", "value": 9}})),
    ("temperature", "warn", study([POINT], workload={"temperature": 0.0})),
    ("synthetic text", "bad", study([POINT], workload={"text": "random"})),
    ("warm cache", "warn", study([replace(POINT, proof={})])),
    ("warm cache", "warn", study([replace(POINT, proof={**PROOF, "cache": {"state": "steady", "reset": True}})])),
    ("warm cache", "bad", study([POINT, run("x", proof={**PROOF, "cache": {"state": None, "reset": False}})])),
    ("closed loop", "warn", study([POINT], workload={"loads": {"concurrency": [1, 8], "request_rate_rps": []}})),
    ("cold start", "warn", study([POINT])),
    ("cold start", "warn", study([run("base", metrics={"ttft_p99_ms": 1.0}), launch(1, {})])),
    ("enough requests", "bad", study([run("base", metrics={"requests_completed": 60.0})])),
    ("enough requests", "warn", study([run("base", metrics={"requests_completed": 300.0})])),
    ("latency by its mean", "bad", study([POINT], objectives=("cost_usd_per_mtok", "ttft_mean_ms"))),
    ("latency by its mean", "warn", study([POINT], objectives=("cost_usd_per_mtok", "ttft_p50_ms"))),
    ("throughput at an unusable", "bad", study([POINT], objectives=("output_throughput_tok_s",))),
    ("dummy weights", "bad", study([run("x", engine={"model": "m", "args": {"load_format": "dummy"}, "env": {}})])),
    ("dummy weights", "bad", study([run("x", provenance="simulated")])),
    ("quantization", "bad", study([run("base", purpose="baseline"), run("fp8", fingerprint="g")])),
    ("one lucky run", "bad", study([POINT])),
    ("finalists", "bad", study([POINT])),
    ("every point", "warn", study([replace(POINT, proof={})])),
    ("every point", "bad", study([POINT, run("a", state="quarantined"), run("b", state="quarantined")])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("question", "verdict", "lying"), LIES, ids=[f"{q}-{v}-{i}" for i, (q, v, _) in enumerate(LIES)]
)
def test_each_way_to_mislead_is_told(question: str, verdict: str, lying: Study) -> None:
    assert line(lying, question).verdict == verdict


def test_a_bound_limits_latency_as_an_objective_does() -> None:
    bounded = study([POINT], objectives=("output_throughput_tok_s",), constraints={"bounds": ["ttft_p99_ms<=500"]})
    assert line(bounded, "throughput at an unusable").verdict == "ok"


def test_quality_that_nothing_judges_is_worth_a_warning() -> None:
    metrics = {**POINT.metrics, "quality_kl": 0.1}
    unjudged = [run("base", purpose="baseline"), run("fp8", fingerprint="g", metrics=metrics)]
    assert line(study(unjudged), "quantization").verdict == "warn"
    assert line(study(unjudged, objectives=(*OBJECTIVES, "quality_kl")), "quantization").verdict == "ok"


def test_a_knob_launched_block_by_block_is_confounded_with_drift() -> None:
    blocks = [launch(i, {"kv_cache_dtype": v}) for i, v in enumerate(["auto", "auto", "fp8", "fp8"])]
    mixed = [launch(i, {"kv_cache_dtype": v}) for i, v in enumerate(["auto", "fp8", "auto", "fp8"])]
    found = line(study(blocks), "order of launches")
    assert found.verdict == "warn" and "kv_cache_dtype" in found.answer
    assert line(study(mixed), "order of launches").verdict == "ok"
    controlled = [launch(0, {}, "baseline"), *blocks, launch(9, {}, "baseline")]
    assert line(study(controlled), "order of launches").verdict == "ok"


def test_classes_are_asked_one_by_one() -> None:
    mixed = study([POINT], workload={"classes": {"a": {"temperature": 0.0}, "b": {"prompt_tokens": {"value": 7}}}})
    assert line(mixed, "temperature").verdict == "ok"
    assert line(mixed, "fixed lengths").verdict == "warn"


def test_on_the_command_line(study_dir: Path, empty_study_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scorecard", str(study_dir)]) == 0
    text = capsys.readouterr().out
    assert text == score_card_text(open_study(study_dir)) + "\n" and text.startswith("realism of demo: ")
    assert main(["scorecard", str(study_dir), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert {x["verdict"] for x in lines} <= {"ok", "warn", "bad", "not applicable"} and len(lines) == 15
    assert main(["scorecard", str(empty_study_dir)]) == 0
