"""`sweep verify` on the simulated engine, and a study that travels as an archive and is continued elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from verify_study import small_config, write_study

from sweep import cli
from sweep.config import SimulationConfig, SweepConfig
from sweep.decide.archive import export_archive, import_archive
from sweep.decide.opened import Study, open_study
from sweep.decide.sla import parse_sla
from sweep.engine.engine_args import EngineConfig
from sweep.errors import StudyError
from sweep.study.folder import locked
from sweep.study.stages import Stages
from sweep.study.verify import verify

MODEL = "org/m"
ARGS = {"max_model_len": 512, "max_num_seqs": 4}
METRICS = {"ttft_p50_ms": 20.0, "request_throughput_rps": 20.0, "cost_usd_per_mtok": 1.0}
GENEROUS = "ttft_p50_ms<=60000"
STATUS = """{"state": "finished", "node": "n", "pid": 1, "process_started": 0, "jobs": [], "best": {}, "eta_s": null,
 "counts": {"measured": 1, "failed": 0, "quarantined": 0, "configs": 1, "launches": 1}, "hours_spent": 0.1,
 "usd_spent": 0.1, "stop_reason": null}"""


def simulated() -> SweepConfig:
    config = small_config(MODEL, device="gpu", concurrency=4)
    config.hardware.memory_gib = 80.0
    config.hardware.name = "h100"
    config.model.num_attention_heads, config.model.num_key_value_heads = 9, 3
    config.model.num_hidden_layers, config.model.weights_gib = 30, 0.3
    config.engine.kind = "simulated"
    config.engine.simulation = SimulationConfig(times="roofline", startup_s=1.0, time_scale=0.05)
    return config


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return write_study(tmp_path / "verified", simulated(), EngineConfig(MODEL, ARGS, {}), METRICS)


def test_passed_failed_recorded_and_shown(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(study.path)
    assert cli.main(["verify", folder, "--sla", GENEROUS, "--minimize", "cost_usd_per_mtok", "--longer", "1",
                     "--requests", "8"]) == 0  # fmt: skip
    capsys.readouterr()
    assert cli.main(["verify", folder, "--sla", "ttft_p50_ms<=25", "--burst", "0", "--soak", "2s", "--json",
                     "--requests", "8"]) in (0, cli.EXIT_NOT_VERIFIED)  # fmt: skip
    verdict = json.loads(capsys.readouterr().out)
    assert [s["name"] for s in verdict["stages"]] == ["held_out", "longer", "soak"]

    first, second = open_study(study.path).verifications
    assert [s.name for s in first.stages] == ["held_out", "bursts"] and first.passed
    assert (first.provenance, second.verification_id[:4]) == ("simulated", "v002")
    assert cli.main(["pick", folder, "--sla", GENEROUS]) == 0
    shown = capsys.readouterr().out
    status = json.loads(STATUS) | {"node": "elsewhere"}
    (study.path / "status.json").write_text(json.dumps(status))
    assert cli.main(["status", folder]) == 0
    told = capsys.readouterr().out
    assert f"verified  {study.operating_points[0].point_id}: passed, {GENEROUS} ({first.verification_id})" in told
    assert "Verified" in shown and second.verification_id in shown and "held_out (c4)" in shown
    assert [p.n_repeats for p in open_study(study.path).operating_points] == [1], "a verification is no repeat"


def test_an_engine_that_does_not_start_verifies_nothing(study: Study) -> None:
    config = simulated()
    config.hardware.memory_gib = 0.4
    (study.path / "study.json").write_text(json.dumps({**study.meta, "config": config.to_dict()}))
    broken = open_study(study.path)
    verdict = verify(broken, broken.operating_points[0], parse_sla(GENEROUS), Stages(longer=None))
    assert not verdict.passed and verdict.verification.cause == "out_of_memory"
    assert [c.passed for c in verdict.checks] == [None, None]
    assert open_study(study.path).verifications[0].cause == "out_of_memory"


def test_what_cannot_be_verified_is_said_before_anything_starts(study: Study) -> None:
    (point,) = study.operating_points
    with locked(study.path), pytest.raises(StudyError, match="is being run by process"):
        verify(study, point, parse_sla(GENEROUS), Stages())
    (study.path / "study.json").write_text(json.dumps({**study.meta, "config": {"model": {"nonsense": 1}}}))
    with pytest.raises(StudyError, match="does not fit this sweep"):
        verify(open_study(study.path), point, parse_sla(GENEROUS), Stages())
    assert not (study.path / "verifications").exists()


def test_an_imported_study_can_be_verified_too(study: Study, tmp_path: Path) -> None:
    path = export_archive(study, tmp_path / "s.zip").path
    there = open_study(import_archive(path, tmp_path / "there" / "verified").path)
    verdict = verify(there, there.operating_points[0], parse_sla(GENEROUS), Stages(None, 1.0, None, None, 8))
    assert verdict.verification.cause is None and len(there.refresh().verifications) == 1
