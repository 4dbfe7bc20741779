"""A study folder with one measured point of a given config, as a sweep leaves it: what `sweep verify` starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.config import HardwareConfig, LengthConfig, LoadsConfig, ModelConfig, SweepConfig, WorkloadConfig
from sweep.decide.opened import Study, open_study
from sweep.engine.engine_args import EngineConfig
from sweep.results.records import PointRecord, RecordStore


def small_config(model: str, *, device: str = "cpu", devices: int = 1, concurrency: int = 2) -> SweepConfig:
    """Short requests at one concurrency, no quality; the load client shares its cores with the engine."""
    config = SweepConfig(
        study="verified",
        model=ModelConfig(name="m", path=model),
        hardware=HardwareConfig(name=device, device=device, devices=devices, price_usd_per_device_hour=0.1),
        workload=WorkloadConfig(
            name="w",
            prompt_tokens=LengthConfig(kind="uniform", low=16, high=32),
            output_tokens=LengthConfig(value=6),
            num_requests=16,
            warmup_requests=2,
            max_load_s=60.0,
            loads=LoadsConfig(concurrency=[concurrency]),
        ),
    )
    config.space.name = "none"
    config.quality.enabled = False
    # A load client on the engine's own cores, beside other tests, proves nothing; this is not what these tests ask.
    config.proof.max_loop_lag_ms = config.proof.max_send_lateness_ms = 60_000.0
    config.proof.max_undelivered_share, config.proof.max_drift, config.proof.max_client_cpu_share = 0.9, 100.0, 10.0
    return config


def write_study(folder: Path, config: SweepConfig, engine: EngineConfig, metrics: Mapping[str, float]) -> Study:
    """The folder with study.json and one point at the workload's only concurrency."""
    folder.mkdir(parents=True)
    (concurrency,) = config.workload.loads.concurrency
    provenance = "simulated" if config.engine.kind == "simulated" else "measured"
    meta: dict[str, Any] = {"schema": 1, "study": config.study, "config": config.to_dict(), "objectives": [*metrics]}
    (folder / "study.json").write_text(json.dumps(meta))
    RecordStore(folder).append(
        PointRecord(
            point_id="0001-r0", launch_id="0001", config_hash=engine.hash, fingerprint=engine.fingerprint,
            engine=engine.to_dict(), load={"concurrency": concurrency}, load_label=f"c{concurrency}", params={},
            purpose="baseline", devices=1, state="measured", metrics=dict(metrics), provenance=provenance,
        )
    )  # fmt: skip
    return open_study(folder)
