"""`sweep verify` on a real vLLM server: one fresh launch, every stage, a record that is judged again later."""

from __future__ import annotations

from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from verify_study import small_config, write_study

from sweep import cli
from sweep.decide.opened import open_study
from sweep.engine.engine_args import EngineConfig
from sweep.engine.processes import LAUNCH_ID

pytestmark = pytest.mark.engine

ARGS = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
# What a small CPU keeps even beside another test; what is asked in earnest is asked afterwards, of the same record.
GENEROUS = "ttft_p50_ms<=60000 itl_p50<=20s cost<=100000$"


def test_a_fresh_launch_through_every_stage(
    smollm2: Path, engine_python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(str(smollm2))
    config.engine.python = engine_python
    engine = EngineConfig(str(smollm2), ARGS, {"VLLM_CPU_KVCACHE_SPACE": "1"})
    measured = {"ttft_p50_ms": 100.0, "request_throughput_rps": 3.0, "itl_p50_ms": 50.0, "cost_usd_per_mtok": 1.0}
    folder = tmp_path / "verified"
    study = write_study(folder, config, engine, measured)
    (point,) = study.operating_points

    code = cli.main(["verify", str(folder), "--sla", GENEROUS, "--soak", "5s", "--burst", "3", "--longer", "2"])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    assert "stage bursts" in shown.err and "passed" in shown.out

    (verification,) = open_study(folder).verifications
    assert verification.passed and verification.point_id == point.point_id and verification.cause is None
    assert verification.startup_s is not None and verification.startup_s > 1
    stages = {s.name: s for s in verification.stages}
    assert list(stages) == ["held_out", "bursts", "longer", "soak"]
    assert all(s.state == "measured" and s.metrics["requests_completed"] for s in stages.values())
    assert (stages["held_out"].load_label, stages["bursts"].load_label) == ("c2", "r3cv3")
    rows = {name: pq.read_table(folder / str(s.raw)) for name, s in stages.items()}
    prompts = {name: table["prompt_tokens"].to_numpy() for name, table in rows.items()}
    assert prompts["held_out"].max() <= 32 < prompts["longer"].max() <= 64
    sent = rows["soak"]["sent_s"].to_numpy()
    assert 3.0 < sent.max() - sent.min() < 7.0
    assert stages["soak"].windows and all(w["itl_p50_ms"] for w in stages["soak"].windows)

    # The same record answers another SLA without a server, and tells where it fails.
    study = open_study(folder)
    slowest = max(float(s.metrics["ttft_p50_ms"] or 0) for s in stages.values())
    (again,) = study.verdicts(study.pick(f"ttft_p50_ms<={slowest}"))
    (stricter,) = study.verdicts(study.pick(f"ttft_p50_ms<={max(100.0, slowest - 0.01)}"))
    assert again.passed and not stricter.passed
    assert not (folder / "launches").exists(), "a sweep that continues must not take it for its own"
    left = [p for p in psutil.process_iter() if str(folder) in _environment(p).get(LAUNCH_ID, "")]
    assert left == []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}
