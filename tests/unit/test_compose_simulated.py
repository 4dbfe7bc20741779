"""`engine=simulated` on the command line: what it needs, and one clear line for every mistake."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sweep import compose
from sweep.engine.engine_args import EngineConfig
from sweep.errors import ConfigError
from sweep.launch.spec import make_spec, read_spec

SIMULATED = ["model=llama31_8b", "hardware=h100x8", "engine=simulated"]


def test_a_launch_carries_all_that_the_simulated_server_needs(tmp_path: Path) -> None:
    config = compose.load_config([*SIMULATED, "engine.simulation.time_scale=0.5"])
    spec = make_spec(
        config, tmp_path, launch_id="1", engine=EngineConfig("m", {}, {}), params=None, purpose="trial", attempt=0,
        loads=(), repeat=0, quality_runs=(),
    )  # fmt: skip
    assert spec.provenance == "simulated" and spec.command[:2] == ("-m", "sweep.engine.simulated_server")
    facts = json.loads(spec.command[spec.command.index("--simulation") + 1])
    assert facts["simulation"]["time_scale"] == 0.5 and facts["hardware"]["memory_gib"] == pytest.approx(79.6)
    assert facts["model"]["weights_gib"] == 15.0 and spec.command[-1] == "--model"
    assert asdict(read_spec(spec.write())) == asdict(spec)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=vllm", "engine.kind=simulated"], "engine.simulation=None"),
        (["engine.kind=vllm"], "engine.kind=vllm with engine.simulation="),
        (["engine.simulation.times=exact"], "engine.simulation.times='exact'"),
        (["engine.simulation.time_scale=0"], "engine.simulation.time_scale=0"),
        (["hardware=cpu"], "hardware=cpu cannot be simulated"),
    ],
)
def test_a_mistake_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose.load_config([*SIMULATED, *overrides])
    assert message in error.value.message and error.value.hint
