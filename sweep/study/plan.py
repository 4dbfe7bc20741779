"""`sweep plan`: everything a sweep would do, found out without launching anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from sweep.config import SweepConfig
from sweep.decide.sla import parse_sla
from sweep.decide.wording import engine_items
from sweep.engine.arguments import check_arguments, known_arguments
from sweep.engine.engine_args import EngineConfig
from sweep.errors import ConfigError
from sweep.estimate import Lengths, Unknown
from sweep.estimate.preview import Candidate, LaunchTimes, Preview, preview, unavailable
from sweep.launch.quality import task_spec
from sweep.launch.spec import build_engine, devices_needed
from sweep.measure.quality.tasks import check_tasks
from sweep.measure.workload import WorkloadSpec
from sweep.results.metrics import get_metric
from sweep.results.points import settings
from sweep.results.status import duration_text
from sweep.space.params import Choice, Param
from sweep.space.search_space import ENUMERATION_LIMIT, SearchSpace, SpaceSize
from sweep.study.forecast import ERROR, forecast
from sweep.study.proposals import load_ladder
from sweep.study.samplers import make_sampler

# Planning figures for a launch nobody has measured yet; a finished study gives better ones.
_START_AND_STOP_S = {"gpu": 150.0, "cpu": 45.0}
_LOAD_S = 30.0
_DRAWS = 300
# Configurations that the preview estimates at most.
_ESTIMATED = 2_000
_OWN_SEARCH = "              at most: our search may make more launches of fewer loads, and ends when none is worth it"
_NOT_CHECKED = {
    "vllm": "not checked: engine.python has no vLLM",
    "simulated": "not checked: no vLLM is launched",
    "estimate": "not checked: no vLLM is launched",
}


@dataclass(frozen=True)
class Plan:
    """What would run. arguments_checked: against which vLLM, or None; problems: what it would refuse.

    estimated_times: whether launch_s is the mean of the estimated launches, not one planning figure for all.
    """

    config: Mapping[str, Any]
    space: SpaceSize
    knobs: tuple[str, ...]
    loads: tuple[str, ...]
    objectives: tuple[str, ...]
    baseline_command: str
    baseline_devices: int
    arguments_checked: str | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    launch_s: float
    launches_side_by_side: float
    launches: int | None
    points: int | None
    hours: float | None
    usd: float | None
    estimated_times: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "space": {**self.space.__dict__, "invalid": dict(self.space.invalid)}}

    def text(self) -> str:
        """For people."""
        of = self.space.total or self.space.sampled
        total = f"{self.space.total:,}" if self.space.total is not None else f"more than {ENUMERATION_LIMIT:,}"
        valid = f"{self.space.valid:,}" if self.space.total is not None else f"{self.space.valid} of {of} random ones"
        unchecked = _NOT_CHECKED[self.config["engine"]["kind"]]
        checked = f"checked against vLLM {self.arguments_checked}" if self.arguments_checked else unchecked
        tasks = self.config["quality"]["tasks"]
        lines = [
            f"study         {self.config['study']}",
            f"model         {self.config['model']['name']} ({self.config['model']['path']})",
            f"hardware      {self.config['hardware']['devices']} x {self.config['hardware']['name']}"
            f" at {self.config['hardware']['price_usd_per_device_hour']:.2f} USD per device-hour",
            f"objectives    {', '.join(f'{o} ({get_metric(o).direction})' for o in self.objectives)}",
            f"space         {self.config['space']['name']}: {total} configurations, {valid} can be launched,"
            f" x {len(self.loads)} loads ({', '.join(self.loads)})",
            *(f"              {count:,} left out: {reason}" for reason, count in self.space.invalid.items()),
            *([f"ladder        {ladder}"] if (ladder := _ladder_line(self.config["ladder"])) else []),
            *(f"knob          {knob}" for knob in self.knobs),
            f"baseline      {self.baseline_command}",
            f"arguments     {checked}",
            *(f"PROBLEM       {problem}" for problem in self.problems),
            *(f"warning       {warning}" for warning in self.warnings),
            f"one launch    about {duration_text(self.launch_s)} with its {len(self.loads)} loads"
            f" ({'estimated' if self.estimated_times else 'planning figure'}),"
            f" {self.launches_side_by_side:.1f} side by side on average",
            *([f"              not counted: {', '.join(tasks)} (lm-eval), once for every format"] if tasks else []),
            self._budget_line(),
            *([_OWN_SEARCH] if self.config["sampler"]["kind"] == "sweep" else []),
            *([] if self.estimated_times else [self._buys_line()]),
        ]
        return "\n".join(lines)

    def _buys_line(self) -> str:
        per_hour, all_of_them = 3600.0 / self.launch_s * self.launches_side_by_side, self.space.launchable
        counts = {hours: min(int(hours * per_hour), all_of_them or sys.maxsize) for hours in (2, 8, 24)}
        return "              " + ", ".join(f"{hours} h buy {count:,} launches" for hours, count in counts.items())

    def _budget_line(self) -> str:
        if self.launches is None or self.hours is None:
            return "budget        none: runs until the space is exhausted or you stop it"
        money = f", about {self.usd:.2f} USD" if self.usd is not None else ""
        counts = f"{self.launches:,} launches, {self.points:,} operating points"
        return f"budget        about {counts}, {self.hours:.1f} h{money}"


def make_plan(config: SweepConfig, space: SearchSpace, cache_dir: Path) -> Plan:
    """Work out the plan. Raises ConfigError for what cannot be planned at all."""
    loads = load_ladder(config)
    params, settings = space.baseline()
    engine = build_engine(config, settings)
    _check(config, space, engine)
    size = space.size()
    python = config.engine.python or sys.executable
    known = known_arguments(python, cache_dir) if config.engine.kind == "vllm" else None
    problems = _argument_problems(config, space, known["arguments"]) if known else []
    levels = len(loads) + config.ladder.extra_levels
    launch_s = _START_AND_STOP_S[config.hardware.device] + levels * min(_LOAD_S, config.workload.max_load_s)
    width = max(1, devices_needed(config, engine))
    parallel = max(1.0, config.hardware.devices / _mean_devices(config, space))
    if config.executor.max_parallel is not None:
        parallel = min(parallel, config.executor.max_parallel)
    return Plan(
        config=config.to_dict(),
        space=size,
        knobs=tuple(_knob_line(p) for p in space.params),
        loads=tuple(load.label for load in loads),
        objectives=tuple(config.objectives.metrics),
        baseline_command=engine.serve_command(),
        baseline_devices=width,
        arguments_checked=known["version"] if known else None,
        problems=tuple(problems),
        warnings=tuple(_warnings(config, space, params is not None)),
        **_bought(config, size, len(loads), launch_s, parallel),
    )


def with_estimated_times(plan: Plan, config: SweepConfig, candidates: Mapping[str, Candidate]) -> Plan:
    """The same plan, counting with what each launch is estimated to take in place of one planning figure."""
    if not candidates:
        return plan
    launch_s = fmean(c.seconds for c in candidates.values())
    device_s = fmean(c.seconds * c.devices for c in candidates.values())
    side_by_side = max(1.0, config.hardware.devices * launch_s / device_s)
    if config.executor.max_parallel is not None:
        side_by_side = min(side_by_side, config.executor.max_parallel)
    bought = _bought(config, plan.space, len(plan.loads), launch_s, side_by_side)
    return replace(plan, estimated_times=True, **bought)


def _bought(config: SweepConfig, size: SpaceSize, loads: int, launch_s: float, side_by_side: float) -> dict[str, Any]:
    launches = _launches(config, size, loads, launch_s, side_by_side)
    hours = None if launches is None else launches * launch_s / side_by_side / 3600.0
    rate = config.hardware.devices * config.hardware.price_usd_per_device_hour
    return {
        "launch_s": launch_s,
        "launches_side_by_side": side_by_side,
        "launches": launches,
        "points": None if launches is None else min(launches * loads, config.budget.trials or sys.maxsize),
        "hours": hours,
        "usd": None if hours is None or rate == 0 else hours * rate,
    }


def estimated_front(config: SweepConfig, space: SearchSpace) -> Preview | str:
    """The front of the space by kernel data, or why there is none. Takes seconds: tables are loaded."""
    reason = unavailable(config.hardware)
    lengths = Lengths.of(WorkloadSpec.from_dict(asdict(config.workload)))
    if reason is not None:
        return reason
    if isinstance(lengths, Unknown):
        return f"not available: {lengths.reason}"
    size = space.size()
    rng = np.random.default_rng(0)
    few = size.total is not None and size.total <= _ESTIMATED
    members = space.enumerate() if few else (space.sample(rng) for _ in range(_ESTIMATED))
    default = settings(build_engine(config, space.baseline()[1]).to_dict())
    engines = {}
    for params in members:
        if not space.violations(params):
            engine = build_engine(config, space.settings(params))
            same = {k: v for k, v in settings(engine.to_dict()).items() if default.get(k) == v}
            name = " ".join(engine_items(engine.to_dict(), same)) or "vLLM's defaults"
            engines[name] = engine, devices_needed(config, engine)
    workload = config.workload
    times = LaunchTimes(
        _START_AND_STOP_S[config.hardware.device],
        workload.num_requests + workload.warmup_requests,
        workload.max_load_s,
    )
    return preview(engines, config.hardware, lengths, load_ladder(config), config.objectives.metrics, times)


def forecast_text(found: Preview, devices: int) -> str:
    """For people: what hours are expected to buy (study/forecast.py)."""
    rows = forecast(found.candidates, devices)
    lines = [
        f"              {row.hours:g} h: about {row.launches:,} launches find {row.at_random:.0%} of the hypervolume at"
        f" random, {row.estimate_first:.0%} along the estimate"
        for row in rows
    ]
    what = f"              expected, if estimates err by {ERROR:.0%}, of {' and '.join(found.objectives)}:"
    return "\n".join([what, *lines]) if rows else ""


def _check(config: SweepConfig, space: SearchSpace, baseline: EngineConfig) -> None:
    """Mistakes that show only where the stations meet. Raises ConfigError."""
    objectives = config.objectives.metrics
    if not objectives or len(set(objectives)) < len(objectives):
        raise ConfigError(f"objectives.metrics={objectives}", "name at least one metric, each once")
    for name in objectives:
        get_metric(name)
    for bound in (b for text in config.constraints.bounds for b in parse_sla(text).bounds):
        if bound.of_reference:
            raise ConfigError(
                f"constraints.bounds: {bound} is relative to the reference, which is not measured yet",
                "give the bound in the metric's own unit; `sweep pick` takes both",
            )
    make_sampler(config.sampler)
    if config.quality.enabled:
        check_tasks(task_spec(asdict(config.quality)))
    if config.sampler.kind == "grid":
        next(space.enumerate())  # refuses a continuous dimension
    needed = devices_needed(config, baseline)
    if needed > config.hardware.devices:
        raise ConfigError(
            f"the baseline needs {needed} devices, hardware.devices={config.hardware.devices}",
            "lower tensor_parallel_size in engine.args or model.args, or choose larger hardware",
        )


def _launches(config: SweepConfig, size: SpaceSize, loads: int, launch_s: float, parallel: float) -> int | None:
    """The tightest of: configurations there are, trials, hours and money in the budget."""
    limits = [size.launchable] if size.launchable is not None else []
    if config.budget.trials is not None:
        limits.append(-(-config.budget.trials // loads))
    hours = [config.budget.hours] if config.budget.hours is not None else []
    if config.budget.usd is not None:
        hours.append(config.budget.usd / (config.hardware.devices * config.hardware.price_usd_per_device_hour))
    if hours:
        limits.append(max(1, int(min(hours) * 3600.0 / launch_s * parallel)))
    return min(limits, default=None)


def _argument_problems(config: SweepConfig, space: SearchSpace, known: Mapping[str, Any]) -> list[str]:
    """Every argument the sweep could pass, checked one value at a time against vLLM's own parser."""
    problems = check_arguments(build_engine(config, {}).args, known)
    for param in space.params:
        for setting in _settings(param):
            args = {k: v for k, v in setting.items() if v is not None and not k.isupper() and k != "model"}
            problems += [f"{param.name}: {problem}" for problem in check_arguments(args, known)]
    return list(dict.fromkeys(problems))


def _warnings(config: SweepConfig, space: SearchSpace, baseline_in_space: bool) -> list[str]:
    warnings = []
    if not baseline_in_space:
        warnings.append("vLLM's defaults are no member of this space; they are measured as baseline all the same")
    if config.hardware.price_usd_per_device_hour <= 0 and "cost_usd_per_mtok" in config.objectives.metrics:
        warnings.append("hardware.price_usd_per_device_hour is 0: cost_usd_per_mtok cannot be computed")
    elif config.hardware.price_note:
        warnings.append(f"price per device-hour: {config.hardware.price_note}")
    if config.engine.kind == "estimate" and config.quality.enabled:
        warnings.append("engine=estimate knows nothing of quality: a table of typical losses stands in for it")
    if not config.quality.enabled and any(o.startswith("quality_") for o in config.objectives.metrics):
        warnings.append("quality is an objective but quality.enabled is false: no point can be on the front")
    if (
        any("p99" in o and not o.startswith("itl") for o in config.objectives.metrics)
        and config.workload.num_requests < 100
    ):
        warnings.append(f"workload.num_requests={config.workload.num_requests} cannot support a p99: 100 at least")
    if config.ladder.extra_levels and not config.constraints.bounds:
        warnings.append("ladder.extra_levels without constraints.bounds: no bound to look for, only the knee is placed")
    if config.ladder.cut_confidence is not None and config.repeats.share <= 0:
        warnings.append("ladder.cut_confidence without repeats: launch-to-launch spread stays unknown, nothing is cut")
    knobs = {name for param in space.params for setting in _settings(param) for name in setting}
    speculative = any(k.startswith("speculative_config") for k in {*knobs, *build_engine(config, {}).args})
    if speculative and config.workload.text == "random":
        warnings.append(
            "workload.text=random with speculative decoding: random tokens make draft acceptance meaningless"
        )
    return warnings


def _settings(param: Param) -> Sequence[Mapping[str, Any]]:
    return param.settings if isinstance(param, Choice) else [{param.name: param.low}]


def _ladder_line(ladder: Mapping[str, Any]) -> str:
    """What launches may make of it; "" where every one measures its loads and no other."""
    extra, confidence = ladder["extra_levels"], ladder["cut_confidence"]
    parts = [f"up to {extra} more levels where the bounds and the knee lie"] if extra else []
    parts += [f"lighter loads left out once all is dominated at {confidence:.0%} confidence"] if confidence else []
    return ", ".join(parts)


def _knob_line(param: Param) -> str:
    when = f"   when {param.when.text}" if param.when else ""
    if not isinstance(param, Choice):
        return f"{param.name}: {param.low} to {param.high}{when}"
    names, labels = "", [str(label) for label in param.labels]
    keys = {tuple(setting) for setting in param.settings}
    if len(keys) == 1 and len(joint := next(iter(keys))) > 1:
        names = f" ({', '.join(joint)})"
        labels = ["(" + ", ".join(map(str, setting.values())) + ")" for setting in param.settings]
    return f"{param.name}{names}: {', '.join(labels)}{when}".replace("None", "default")


def _mean_devices(config: SweepConfig, space: SearchSpace) -> float:
    """Devices of an average launchable configuration, from uniform draws."""
    rng = np.random.default_rng(0)
    draws = [p for p in (space.sample(rng) for _ in range(_DRAWS)) if not space.violations(p)]
    widths = [devices_needed(config, build_engine(config, space.settings(p))) for p in draws]
    return sum(widths) / len(widths) if widths else 1.0
