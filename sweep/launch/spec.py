"""What one launch is asked to do: everything its process needs, as one JSON file that can be read again later."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sweep.config import SweepConfig
from sweep.engine.engine_args import EngineConfig
from sweep.engine.server import VLLM_SERVE
from sweep.measure.workload import Load
from sweep.results.records import Purpose
from sweep.space.rules import parallel_devices

LAUNCHES_DIR = "launches"
SPEC_FILE = "spec.json"
EVENTS_FILE = "events.jsonl"
SERVER_LOG = "server.log"
WORKER_LOG = "worker.log"
RESOLVED_FILE = "resolved.json"
WORKER_LOCK = "worker.lock"
QUALITY_DIR = "quality"
REPEAT, CONTROL, TASKS = "repeat", "control", "tasks"
CONTROLLER_PID = "SWEEP_CONTROLLER_PID"
# On a CPU the engine shares cores with the load client, whose clock is what a TTFT is: the client goes first.
_CPU_NICENESS = 10
# What the points of an engine kind are worth.
_PROVENANCE = {"vllm": "measured", "simulated": "simulated", "estimate": "estimated"}


@dataclass(frozen=True)
class LaunchSpec:
    """One start-to-stop life of a deployment.

    loads: the part of the ladder to measure, in order. workload, quality, proof: plain dicts of the config groups.
    quality_runs: which measurements of its fingerprint to make (see logprobs_path); usually none. niceness: of the
    engine's processes. devices: how many it occupies; the executor fills in device_ids and device_env. command: what
    serves, after the interpreter and before the model. provenance: of the points it measures. within: the study's
    subfolder it writes to. stages: of a verification, measured instead of loads; {"name", "workload", "draw"}, each
    workload with a single load. distinct_numerics: its tokens are not those of its fingerprint (launch.quality).
    ladder: by what it leaves the list of its loads (launch.ladder.LadderRules); empty: never.
    """

    launch_id: str
    study_dir: str
    purpose: Purpose
    attempt: int
    params: Mapping[str, Any] | None
    engine: Mapping[str, Any]
    loads: tuple[Mapping[str, Any], ...]
    repeat: int
    python: str
    startup_timeout_s: float
    stop_timeout_s: float
    workload: Mapping[str, Any]
    quality: Mapping[str, Any]
    quality_runs: tuple[str, ...]
    proof: Mapping[str, Any]
    devices: int
    device_name: str
    niceness: int
    price_usd_per_device_hour: float
    device_ids: tuple[int, ...] = ()
    device_env: Mapping[str, str] | None = None
    command: tuple[str, ...] = VLLM_SERVE
    provenance: str = "measured"
    within: str = LAUNCHES_DIR
    stages: tuple[Mapping[str, Any], ...] = ()
    distinct_numerics: bool = False
    ladder: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.study_dir) / self.within / self.launch_id

    @property
    def mark(self) -> str:
        """What the processes of this launch carry in their environment. launch_id alone repeats between studies."""
        return str(self.folder)

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig.from_dict(self.engine)

    @property
    def fingerprint(self) -> str:
        """Of the numerics that its points have."""
        engine = self.engine_config
        return f"{engine.fingerprint}-{engine.hash}" if self.distinct_numerics else engine.fingerprint

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that every record of this launch, LaunchRecord or PointRecord, shares."""
        engine = self.engine_config
        return {
            "launch_id": self.launch_id,
            "config_hash": engine.hash,
            "fingerprint": self.fingerprint,
            "engine": self.engine,
            "params": self.params,
            "purpose": self.purpose,
            "devices": self.devices,
        }

    def point_identity(self, load: Load) -> dict[str, Any]:
        """The fields that every PointRecord of this launch at one load shares."""
        return {
            **self.identity,
            "point_id": f"{self.launch_id}-{load.label}-r{self.repeat}",
            "load": load.to_dict(),
            "load_label": load.label,
            "repeat": self.repeat,
            "provenance": self.provenance,
        }

    def at_stage(self, stage: Mapping[str, Any]) -> LaunchSpec:
        """This launch as one stage sees it: what it measures lies in a folder of its own inside the launch's."""
        within = f"{self.within}/{self.launch_id}"
        return replace(self, within=within, launch_id=stage["name"], workload=stage["workload"], repeat=stage["draw"])

    def on_devices(self, ids: tuple[int, ...], env: Mapping[str, str]) -> LaunchSpec:
        return replace(self, device_ids=ids, device_env=dict(env))

    def write(self) -> Path:
        """Save as spec.json in the launch's folder; its presence is the promise that this launch was begun."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / SPEC_FILE
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(path)
        return path


_SEQUENCES = ("loads", "device_ids", "quality_runs", "command", "stages")


def read_spec(path: Path) -> LaunchSpec:
    data = json.loads(path.read_text())
    known = {f.name for f in fields(LaunchSpec)}
    values = {k: v for k, v in data.items() if k in known}
    sequences = {k: tuple(values[k]) for k in _SEQUENCES if k in values}
    return LaunchSpec(**{**values, **sequences})


def make_spec(
    config: SweepConfig,
    study_dir: Path,
    *,
    launch_id: str,
    engine: EngineConfig,
    params: Mapping[str, Any] | None,
    purpose: Purpose,
    attempt: int,
    loads: Sequence[Load],
    repeat: int,
    quality_runs: Sequence[str],
    ladder: Mapping[str, Any] | None = None,
) -> LaunchSpec:
    """The launch of one engine config under the settings of this sweep."""
    return LaunchSpec(
        launch_id=launch_id,
        study_dir=str(study_dir),
        purpose=purpose,
        attempt=attempt,
        params=params,
        engine=engine.to_dict(),
        loads=tuple(load.to_dict() for load in loads),
        repeat=repeat,
        python=config.engine.python or sys.executable,
        startup_timeout_s=config.engine.startup_timeout_s,
        stop_timeout_s=config.engine.stop_timeout_s,
        workload=asdict(config.workload),
        quality=asdict(config.quality),
        quality_runs=tuple(quality_runs),
        proof=asdict(config.proof),
        devices=devices_needed(config, engine),
        device_name=config.hardware.name,
        niceness=_CPU_NICENESS if config.hardware.device == "cpu" else 0,
        price_usd_per_device_hour=config.hardware.price_usd_per_device_hour,
        command=_simulated_serve(config) if config.engine.kind == "simulated" else VLLM_SERVE,
        provenance=_PROVENANCE[config.engine.kind],
        ladder=ladder or {},
    )


def _simulated_serve(config: SweepConfig) -> tuple[str, ...]:
    """The simulated server with all it cannot ask a checkpoint or a driver."""
    groups = {name: config.to_dict()[name] for name in ("model", "hardware")}
    facts = {name: {k: v for k, v in group.items() if not isinstance(v, dict)} for name, group in groups.items()}
    described = json.dumps({**facts, "simulation": config.to_dict()["engine"]["simulation"]})
    return ("-m", "sweep.engine.simulated_server", "--simulation", described, "--model")


def build_engine(config: SweepConfig, settings: Mapping[str, Any]) -> EngineConfig:
    """Knob settings over the model's and the engine's own arguments.

    Upper-case knobs are environment variables; true and false become 1 and 0 there, as vLLM reads them.
    """
    args = {**config.model.args, **config.engine.args}
    env = {**config.model.env, **config.engine.env}
    model = config.model.path
    for knob, value in settings.items():
        if knob == "model":
            model = str(value)
        elif knob.isupper():
            env[knob] = str(int(value)) if isinstance(value, bool) else str(value)
            if value is None:
                del env[knob]
        else:
            args[knob] = value
    # One device in a direction is vLLM's default: saying so would only make two names for one configuration.
    defaults = {name for name, value in args.items() if name.endswith("_parallel_size") and value == 1}
    return EngineConfig(model, {k: v for k, v in args.items() if v is not None and k not in defaults}, env)


def devices_needed(config: SweepConfig, engine: EngineConfig) -> int:
    """Devices a deployment occupies. A CPU slot runs any parallel layout by itself."""
    return 1 if config.hardware.device == "cpu" else parallel_devices(engine.args)


def logprobs_path(study_dir: Path, fingerprint: str, run: str = "") -> Path:
    """Where a launch leaves a quality measurement of its fingerprint.

    run: "" the measurement itself; of the reference also REPEAT (one request at a time instead of batched) and CONTROL
    (another engine config of the same fingerprint), whose distance from it is the noise floor.
    """
    return study_dir / QUALITY_DIR / f"{fingerprint}{'-' if run else ''}{run}.npz"


def answers_path(study_dir: Path, fingerprint: str, run: str = TASKS) -> Path:
    """Where a launch leaves what lm-eval found of its fingerprint, or why it found nothing."""
    return study_dir / QUALITY_DIR / f"{fingerprint}-{run}.json"
