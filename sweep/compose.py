"""Hydra at the edge: configuration files plus command-line overrides in, one validated SweepConfig out.

The Compose API is used, not @hydra.main: subcommands are ours, the rest of the line is Hydra's. Every mistake a
user can make on that line becomes one ConfigError that names the key, the value and what to type instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweep import config as schema
from sweep.config import ModelConfig, SweepConfig, TraceConfig
from sweep.engine.devices import detect_gpus
from sweep.errors import ConfigError, did_you_mean
from sweep.measure.trace_files import SHIPPED, trace_checksum, trace_path
from sweep.measure.workload import WorkloadSpec
from sweep.results.metrics import PER_TASK
from sweep.results.quality import check_margins

CONFIG_NAME = "config"
_OWN_ARGUMENTS = {"host", "port", "model", "api_key", "uds", "ssl_keyfile"}
_OWN_REASON = "every launch serves model.path on its own free local port"

ConfigStore.instance().store(name="sweep_schema", node=SweepConfig)


def config_dir() -> Path:
    """The folder with config.yaml: the checkout's conf/, or the copy inside an installed package."""
    packaged = Path(__file__).parent / "_conf"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "conf"


@contextmanager
def hydra_context() -> Iterator[None]:
    """Hydra initialized on our config folder, and its global state cleared afterwards."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir().resolve()), version_base="1.3"):
        yield


def full_overrides(overrides: Sequence[str], user_config_dir: Path | None) -> list[str]:
    """The user's overrides, their own config folder first on the search path, `hardware=auto` made concrete."""
    search = [f"hydra.searchpath=[file://{user_config_dir.resolve()}]"] if user_config_dir else []
    named = next((text for text in overrides if text.startswith("hardware=")), "hardware=auto")
    detected = _detected_hardware() if named == "hardware=auto" else []
    return [*search, *detected, *(text for text in overrides if text != "hardware=auto")]


def compose_raw(overrides: Sequence[str], user_config_dir: Path | None = None) -> DictConfig:
    """The composed, typed and still Hydra-shaped config (for `--cfg job`). Raises ConfigError."""
    if user_config_dir is not None and not user_config_dir.is_dir():
        raise ConfigError(f"--config-dir {user_config_dir} is not a folder", "name an existing folder")
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"'{text}' is not an override", "write key=value, for example budget.hours=8")
    try:
        with hydra_context():
            return compose(CONFIG_NAME, overrides=full_overrides(overrides, user_config_dir))
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error) from error


def load_config(overrides: Sequence[str], user_config_dir: Path | None = None) -> SweepConfig:
    """Compose, resolve interpolations, fill model facts, and check what types alone cannot. Raises ConfigError."""
    raw = compose_raw(overrides, user_config_dir)
    try:
        OmegaConf.resolve(raw)
        config: SweepConfig = OmegaConf.to_object(raw)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise ConfigError(f"{key} has no value", f"set it: {key}=…") from error
    except OmegaConfBaseException as error:
        raise _explain(error) from error
    _fill_model_facts(config.model)
    _fill_trace_facts(config.workload.trace)
    _check(config)
    return config


def config_text(overrides: Sequence[str], user_config_dir: Path | None, *, resolve: bool) -> str:
    """The composed config as YAML, for `--cfg job`."""
    return OmegaConf.to_yaml(compose_raw(overrides, user_config_dir), resolve=resolve)


def defaults_text(overrides: Sequence[str], user_config_dir: Path | None) -> str:
    """Which file each group came from, one line each in order of merging, for `--info defaults`."""
    with hydra_context():
        try:
            loader = GlobalHydra.instance().config_loader()
            defaults = loader.compute_defaults_list(
                CONFIG_NAME, full_overrides(overrides, user_config_dir), RunMode.RUN
            ).defaults
        except (HydraException, OmegaConfBaseException) as error:
            raise _explain(error) from error
    rows = [(d.config_path or "", d.package or "", "" if d.parent is None else d.parent) for d in defaults]
    shown = [("config", "package", "chosen by"), *(r for r in rows if not r[0].startswith("hydra"))]
    return "\n".join(f"{path:<32}{package:<16}{parent}".rstrip() for path, package, parent in shown)


def _detected_hardware() -> list[str]:
    gpus = detect_gpus()
    if not gpus:
        return ["hardware=cpu"]
    names = {gpu.name for gpu in gpus}
    if len(names) > 1:
        raise ConfigError(
            f"hardware=auto found different GPUs: {sorted(names)}",
            "choose one kind with CUDA_VISIBLE_DEVICES and name it: hardware=h100 hardware.devices=4",
        )
    known = [p.stem for p in (config_dir() / "hardware").glob("*.yaml")]
    words = re.split(r"[^a-z0-9]+", gpus[0].name.lower())
    match = next((w for w in words if w in known), None)
    if match is None:
        return [
            "hardware=gpu",
            f"hardware.name='{gpus[0].name}'",
            f"hardware.devices={len(gpus)}",
            f"hardware.memory_gib={gpus[0].memory_gib:.1f}",
        ]
    return [f"hardware={match}", f"hardware.devices={len(gpus)}"]


def _fill_model_facts(model: ModelConfig) -> None:
    """Read heads, layers and experts of a local checkpoint from its own config.json."""
    path = Path(model.path).expanduser()
    looks_local = model.path.startswith(("/", "./", "../", "~"))
    if looks_local and not (path / "config.json").is_file():
        raise ConfigError(f"model.path={model.path} holds no config.json", model.obtain)
    if not (path / "config.json").is_file():
        return
    model.path = str(path.resolve())
    facts = json.loads((path / "config.json").read_text())
    facts = facts.get("text_config") or facts
    model.num_attention_heads = model.num_attention_heads or facts.get("num_attention_heads")
    model.num_key_value_heads = model.num_key_value_heads or facts.get("num_key_value_heads")
    model.num_hidden_layers = model.num_hidden_layers or facts.get("num_hidden_layers")
    model.num_experts = model.num_experts or facts.get("num_experts") or facts.get("num_local_experts")
    model.is_moe = model.is_moe or bool(model.num_experts)
    if model.weights_gib is None:
        size = sum(p.stat().st_size for p in path.glob("*.safetensors"))
        model.weights_gib = round(size / 2**30, 3) or None


def _fill_trace_facts(trace: TraceConfig) -> None:
    """Where the trace lies and what is in it: a study belongs to this content."""
    if trace.file is not None:
        path = trace_path(trace.file)
        trace.sha256 = trace.sha256 or trace_checksum(path)
        trace.file = trace.file if path.parent == SHIPPED else str(path.resolve())


def _check(config: SweepConfig) -> None:
    """Cross-field checks: one clear error each, before any GPU-minute is spent."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.study):
        raise ConfigError(f"study={config.study!r} is not a folder name", "use letters, digits, '.', '_' and '-'")
    if config.hardware.device not in ("gpu", "cpu"):
        raise ConfigError(f"hardware.device={config.hardware.device!r}", "use gpu or cpu")
    positive = {
        "hardware.devices": config.hardware.devices,
        "workload.num_requests": config.workload.num_requests,
        "workload.max_load_s": config.workload.max_load_s,
        "engine.startup_timeout_s": config.engine.startup_timeout_s,
        "budget.trials": config.budget.trials,
        "budget.hours": config.budget.hours,
        "budget.usd": config.budget.usd,
        "executor.max_parallel": config.executor.max_parallel,
    }
    for key, value in positive.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{key}={value} is not positive", "give a number above 0, or null for no bound")
    if config.budget.usd is not None and config.hardware.price_usd_per_device_hour <= 0:
        raise ConfigError(
            f"budget.usd={config.budget.usd} needs a price",
            "set hardware.price_usd_per_device_hour to what you pay",
        )
    for key, args in (("engine.args", config.engine.args), ("model.args", config.model.args)):
        for name in sorted(_OWN_ARGUMENTS & args.keys()):
            raise ConfigError(
                f"{key}.{name}={args[name]} is set by sweep itself", f"remove {key}.{name}: {_OWN_REASON}"
            )
    _check_workload(config)
    _check_engine(config)
    _check_quality(config)
    _check_ladder(config)
    if config.executor.kind != "local":
        raise ConfigError(f"executor.kind={config.executor.kind!r} is unknown", "known: local")
    modes = ("auto", "ignore", "exclusive")
    if config.executor.interference not in modes:
        mode = config.executor.interference
        raise ConfigError(f"executor.interference={mode!r} is unknown", did_you_mean(mode, modes))


def _check_ladder(config: SweepConfig) -> None:
    extra, confidence = config.ladder.extra_levels, config.ladder.cut_confidence
    if extra < 0:
        raise ConfigError(f"ladder.extra_levels={extra} is negative", "give 0 to measure the loads of the ladder alone")
    if confidence is not None and not 0.5 < confidence < 1:
        raise ConfigError(
            f"ladder.cut_confidence={confidence} is no confidence", "give one between 0.5 and 1, or null to cut nothing"
        )


def _check_quality(config: SweepConfig) -> None:
    quality = config.quality
    check_margins(quality.non_inferiority)
    named = [*quality.non_inferiority, *config.objectives.metrics]
    asked = next((name for name in named if name.partition(".")[0] == PER_TASK), None)
    if asked is not None and not quality.tasks:
        raise ConfigError(f"{asked} is asked for but quality.tasks is empty", "set quality.tasks=[everyday]")
    if quality.non_inferiority and not quality.enabled:
        raise ConfigError("quality.non_inferiority needs quality.enabled", "choose quality=kl, or drop the margins")
    if quality.tasks and config.engine.kind != "vllm":
        raise ConfigError("quality.tasks ask a real model", f"leave quality.tasks=[] with engine={config.engine.kind}")
    if quality.under_load_max_kl <= 0 or quality.task_timeout_s <= 0:
        raise ConfigError("quality.under_load_max_kl and quality.task_timeout_s must be above 0", "give such numbers")


def _check_workload(config: SweepConfig) -> None:
    workload = WorkloadSpec.from_dict(asdict(config.workload))
    longest, limit = workload.longest_request_tokens, config.model.args.get("max_model_len")
    if isinstance(limit, int) and longest is not None and longest > limit:
        what = "conversation.max_tokens" if workload.conversation else "prompt_tokens.high or output_tokens.high"
        raise ConfigError(
            f"workload '{workload.name}': its longest request of {longest} tokens, shared prefix and answer included,"
            f" exceeds model.args.max_model_len={limit}",
            f"lower workload.{what}, or raise model.args.max_model_len to {longest}",
        )
    if not workload.loads:
        raise ConfigError("workload.loads is empty", "set workload.loads.concurrency=[1,8,32]")


def _check_engine(config: SweepConfig) -> None:
    kind, simulation = config.engine.kind, config.engine.simulation
    kinds = ("vllm", "simulated", "estimate")
    if kind not in kinds:
        raise ConfigError(f"engine.kind={kind!r} is unknown", did_you_mean(kind, kinds))
    if (simulation is None) != (kind == "vllm"):
        fix = "write engine=vllm, engine=simulated or engine=estimate"
        raise ConfigError(f"engine.kind={kind} with engine.simulation={simulation}", fix)
    if simulation is None:
        return
    if simulation.times not in ("auto", "roofline"):
        raise ConfigError(f"engine.simulation.times={simulation.times!r} is unknown", "known: auto, roofline")
    if simulation.time_scale <= 0:
        raise ConfigError(f"engine.simulation.time_scale={simulation.time_scale}", "give a number above 0")
    if config.hardware.device != "gpu" or config.hardware.memory_gib is None:
        raise ConfigError(
            f"hardware={config.hardware.name} cannot be simulated", "name a GPU whose memory is known: hardware=h100x8"
        )


def _explain(error: Exception) -> ConfigError:
    """Hydra's and OmegaConf's messages, cut to the line that matters, with the nearest valid key."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = str(root).strip()
    first = text.splitlines()[0] if text else type(root).__name__
    full_key = re.search(r"full_key: (\S+)", text)
    missing = re.search(r"Key '([^']+)' (?:is )?not in (?:'(\w+)'|struct)", first)
    if missing:
        key = full_key.group(1) if full_key else missing.group(1)
        inside_a_knob = re.fullmatch(r"space\.params\..+\.\w+", key)
        known = _known_keys("ParamConfig" if inside_a_knob else missing.group(2))
        hint = did_you_mean(missing.group(1), known) if known else f"to add it, write +{key}=…"
        return ConfigError(f"unknown key '{key}'", hint)
    group = re.search(r"Could not find '([\w@/]+)/(\S+)'", str(error))
    if group:
        options = re.search(r"Available options in '[^']+':\s*((?:\s*\S+)+)", str(error))
        names = re.findall(r"^\s+([\w.-]+)$", str(error), flags=re.M) if options else []
        return ConfigError(f"{group.group(1)}={group.group(2)} does not exist", did_you_mean(group.group(2), names))
    unknown_group = re.search(r"Could not override '([^']+)'", str(error))
    if unknown_group:
        return ConfigError(
            f"unknown key '{unknown_group.group(1)}'",
            did_you_mean(unknown_group.group(1), _known_keys("SweepConfig")),
        )
    unspecified = re.search(r"You must specify '(\w+)'", str(error))
    if unspecified:
        group_name = unspecified.group(1)
        shipped = ", ".join(sorted(p.stem for p in (config_dir() / group_name).glob("*.yaml")))
        return ConfigError(f"no {group_name} chosen", f"write {group_name}=NAME; there are {shipped}")
    where = f"{full_key.group(1)}: " if full_key else ""
    return ConfigError(f"{where}{first}", "see `sweep plan --cfg job` for every key and its type")


def _known_keys(class_name: str | None) -> list[str]:
    cls: Any = getattr(schema, class_name, None) if class_name else None
    names = [f.name for f in fields(cls)] if is_dataclass(cls) else []
    return [*names, "search_space"] if cls is SweepConfig else names
