"""What deploying a point means, whatever it is written as: engine, devices, mounts, image, start-up, and its origin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.decide.wording import load_text, plural, point_value_text, value_text
from sweep.engine.engine_args import EngineConfig
from sweep.errors import ConfigError, StudyError
from sweep.results.points import OperatingPoint
from sweep.results.records import LaunchRecord, PointRecord
from sweep.space.rules import parallel_devices

if TYPE_CHECKING:
    from sweep.decide.opened import Study

DEFAULT_PORT = 8000
# Read from the environment, never written into an artefact.
API_KEY, HUB_TOKEN = "VLLM_API_KEY", "HF_TOKEN"

# Arguments that may name a file or a folder which must be there to start. Dots as in EngineConfig.args.
_PATH_ARGS = ("tokenizer", "hf_config_path", "generation_config", "chat_template", "speculative_config.model")
_SHOWN = (
    "request_throughput_rps", "output_throughput_tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms",
    "cost_usd_per_mtok", "quality_kl", "startup_s",
)  # fmt: skip
_RELEASE = re.compile(r"\d+\.\d+\.\d+(\.post\d+|rc\d+)?")
# A first start may have to fetch the checkpoint; later ones are as measured, on a node that may be busier.
_LEAST_STARTUP_S = {"local": 600.0, "hub": 1800.0}
_STARTUP_SLACK = 3.0
_SHARED_MEMORY_GIB_PER_PROCESS = 2


@dataclass(frozen=True)
class Deployment:
    """One point of a study, to be served by `replicas` copies on `port`. image: None for vLLM's own.

    Raises StudyError for a point without a measurement, ConfigError for a replica count or port that cannot be.
    """

    point: OperatingPoint
    study: Study
    replicas: int = 1
    port: int = DEFAULT_PORT
    custom_image: str | None = None

    def __post_init__(self) -> None:
        if self.point.state != "measured":
            raise StudyError(
                f"point {self.point.point_id} is {self.point.state} ({self.point.cause}): nothing to deploy",
                "choose a measured one: `sweep front` lists the best",
            )
        if self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas} is not positive", "give 1 or more")
        if not 1024 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is refused by vLLM", "give one from 1024 to 65535")

    @cached_property
    def engine(self) -> EngineConfig:
        """Exactly as measured."""
        return EngineConfig.from_dict(self.point.engine)

    @cached_property
    def settled_engine(self) -> EngineConfig:
        """As measured, with checkpoints that lie in folders named absolutely: a service has its own working folder."""
        args = deepcopy(self.engine.nested_args)
        for name in _PATH_ARGS:
            inner = args
            *path, last = name.split(".")
            for key in path:
                inner = inner[key] if isinstance(inner.get(key), dict) else {}
            if isinstance(inner.get(last), str):
                inner[last] = _absolute(inner[last])
        return EngineConfig(_absolute(self.engine.model), args, self.engine.env)

    @property
    def mounts(self) -> list[str]:
        """Absolute paths that a container must find where the engine names them, read-only."""
        args = self.settled_engine.nested_args
        draft = args.get("speculative_config")
        named = [self.settled_engine.model, *(args.get(name) for name in _PATH_ARGS)]
        named.append(draft.get("model") if isinstance(draft, Mapping) else None)
        return sorted({name for name in named if isinstance(name, str) and name.startswith("/")})

    @property
    def from_hub(self) -> bool:
        """Whether the checkpoint is fetched from a model hub."""
        return not self.settled_engine.model.startswith("/")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with their values; none is a secret (EngineConfig refuses those)."""
        offline = {} if self.from_hub else {"HF_HUB_OFFLINE": "1"}
        return dict(sorted({**offline, **self.engine.env}.items()))

    @property
    def secrets(self) -> list[str]:
        """Names of variables whose values come from elsewhere; all may be absent."""
        return [HUB_TOKEN, API_KEY] if self.from_hub else [API_KEY]

    @property
    def argv(self) -> list[str]:
        """Words after `vllm serve`, the port always said."""
        return [self.settled_engine.model, *self.settled_engine.argv(), "--port", str(self.port)]

    @property
    def name(self) -> str:
        """A name that Kubernetes, compose and systemd all take: lower case, at most 42 characters."""
        study = re.sub(r"[^a-z0-9]+", "-", self.study.name.lower())[:24].strip("-")
        return "-".join(["vllm", *([study] if study else []), self.point.config_hash])

    @property
    def gpus(self) -> int:
        """GPUs of one replica; 0 on a CPU."""
        return 0 if self._hardware.get("device", self._hardware.get("name")) == "cpu" else self.point.devices

    @property
    def cpu_cores(self) -> int | None:
        """Cores the point was measured on, where it was measured on a CPU and the study knows how many."""
        host = self.study.meta.get("host", {})
        cores = host.get("cpu_count", host.get("cores"))
        if self.gpus or not cores:
            return None
        return max(1, int(cores) * self.point.devices // int(self._hardware.get("devices") or 1))

    @property
    def shared_memory_gib(self) -> int | None:
        """/dev/shm of one replica; None where one process runs the model and the default is enough.

        Workers of a parallel engine exchange tensors through it, and a container's default of 64 MiB is too small.
        """
        processes = parallel_devices(self.engine.nested_args)
        return _SHARED_MEMORY_GIB_PER_PROCESS * processes if processes > 1 else None

    @property
    def startup_allowance_s(self) -> float:
        """How long a start may take before it counts as failed: three times the measured one, and never hasty."""
        least = _LEAST_STARTUP_S["hub" if self.from_hub else "local"]
        return max(least, _STARTUP_SLACK * self.point.metrics.get("startup_s", 0.0))

    @property
    def requests_in_flight(self) -> int | None:
        """Requests inside one replica at the measured load; None if it is not known.

        Closed loop: its concurrency. Open loop: throughput x mean time in the system (Little's law).
        """
        concurrency, rate = self.point.load.get("concurrency"), self.point.load.get("request_rate_rps")
        if rate is None:
            return concurrency
        throughput = self.point.metrics.get("request_throughput_rps")
        seconds = self.point.metrics.get("e2e_mean_ms")
        return max(1, int(throughput * seconds / 1000)) if throughput and seconds else None

    @property
    def vllm_version(self) -> str | None:
        """The version that was measured, without a build suffix such as +cpu."""
        launches = [r for r in self.study.records if isinstance(r, LaunchRecord)]
        own = next((r.vllm_version for r in launches if r.launch_id == self.point.launch_id), None)
        found = own or self.study.meta.get("vllm_version")
        return str(found).partition("+")[0] if found else None

    @property
    def image(self) -> str:
        """The image named by the user, else vLLM's own of the measured version; its newest if that was no release."""
        if self.custom_image is not None:
            return self.custom_image
        released = _RELEASE.fullmatch(self.vllm_version or "") is not None
        tag = f"v{self.vllm_version}" if released else "latest"
        if self.gpus:
            return f"vllm/vllm-openai:{tag}"
        system = str(self.study.meta.get("host", {}).get("system", ""))
        return f"vllm/vllm-openai-cpu:{tag}-{'arm64' if 'aarch64' in system else 'x86_64'}"

    @property
    def image_is_what_was_measured(self) -> bool:
        """Whether the image holds the measured version, or the user vouches for it."""
        return self.custom_image is not None or not self.image.partition(":")[2].startswith("latest")

    def origin(self) -> list[str]:
        """Where it comes from and what was measured there, line by line."""
        p = self.point
        times = "once" if p.n_repeats == 1 else f"{p.n_repeats} times"
        version = f"vLLM {self.vllm_version}" if self.vllm_version else "a vLLM of unknown version"
        metrics = [name for name in dict.fromkeys([*self.study.objectives, *_SHOWN]) if name in p.metrics]
        width = max(len(name) for name in metrics) if metrics else 0
        return [
            f"study     {self.study.name}",
            f"point     {p.point_id}",
            f"{p.provenance:<9} {self._date}, {times}, {version}, {self._hardware.get('name', 'unknown hardware')}",
            f"load      {load_text(p.load)} on {plural(p.devices, 'GPU' if self.gpus else 'CPU slot')}",
            *(f"          {name:<{width}}  {_metric_text(p, name)}" for name in metrics),
        ]

    @property
    def origin_labels(self) -> dict[str, str]:
        """The same in short, for labels and annotations."""
        return {"study": self.study.name, "point": self.point.point_id, "measured": self._date}

    @property
    def _hardware(self) -> Mapping[str, Any]:
        hardware: Mapping[str, Any] = self.study.config.get("hardware", {})
        return hardware

    @property
    def _date(self) -> str:
        p = self.point
        finished = [
            r.finished_at
            for r in self.study.records
            if isinstance(r, PointRecord) and r.state == "measured" and r.purpose != "validation"
            and (r.config_hash, r.load_label, r.provenance) == (p.config_hash, p.load_label, p.provenance)
        ]  # fmt: skip
        return max(finished, default="")[:10] or "on an unknown date"


def _metric_text(point: OperatingPoint, name: str) -> str:
    # Repeats of one launch share its start-up: that they agree says nothing.
    return value_text(name, point.metrics[name]) if name == "startup_s" else point_value_text(point, name)


def _absolute(name: str) -> str:
    """A path that exists here in full; a hub id, a text, or a folder of another machine as it is."""
    try:
        return str(Path(name).resolve()) if name and Path(name).exists() else name
    except OSError:  # a template written out is no path, and too long to be asked about as one
        return name
