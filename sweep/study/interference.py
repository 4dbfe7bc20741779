"""Do launches side by side distort each other? Asked once, before the search, with vLLM's defaults.

The baseline is measured alone at its busiest load, then as many copies of it as the node holds are measured at once.
Metrics of the copies are compared with the lone launch's by Student's t on their logarithms. The spread between the
copies knows little of itself, so the spread between launches that others have seen counts as PRIOR_DEGREES more of
them (TPOT 6 %, TTFT 10 %: nine tenths of the repeated points of a public table lie below). Where a difference is beyond
that, launches of the study run one at a time. These launches are no points of the study; they lie in interference/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from sweep.config import SweepConfig
from sweep.engine.engine_args import EngineConfig
from sweep.engine.processes import kill_leftovers
from sweep.executor import Executor, Job
from sweep.executor.clock import Clock
from sweep.launch.spec import SPEC_FILE, devices_needed, make_spec, read_spec
from sweep.measure.workload import Load
from sweep.results.records import LaunchRecord, PointRecord, record_from_dict
from sweep.results.uncertainty import COVERAGE, PRIOR_DEGREES, t_quantile

FOLDER = "interference"
_POLL_S = 0.2
_COMPARED = ("output_throughput_tok_s", "tpot_p50_ms", "ttft_p50_ms")
_USUAL_CV = {"ttft_p50_ms": 0.10}
_OTHER_CV = 0.06
_LEAST_COPIES = 2


@dataclass(frozen=True)
class Change:
    """A metric alone and beside copies. change: relative, of the copies' geometric mean. limit: what noise allows."""

    alone: float
    beside: tuple[float, ...]
    change: float
    limit: float

    @property
    def beyond_noise(self) -> bool:
        return abs(math.log1p(self.change)) > math.log1p(self.limit)


@dataclass(frozen=True)
class Interference:
    """verdict: "none", "distorts" or "not checked" (why says why). copies: that ran side by side."""

    verdict: str
    why: str
    copies: int = 0
    load: str = ""
    metrics: dict[str, Change] | None = None

    @property
    def distorts(self) -> bool:
        return self.verdict == "distorts"

    def to_dict(self) -> dict[str, Any]:
        """As in study.json."""
        metrics = {
            name: {"alone": c.alone, "beside": list(c.beside), "change": c.change, "limit": c.limit}
            for name, c in (self.metrics or {}).items()
        }
        return {"verdict": self.verdict, "why": self.why, "copies": self.copies, "load": self.load, "metrics": metrics}


def check_interference(
    config: SweepConfig, folder: Path, executor: Executor, clock: Clock, engine: EngineConfig, load: Load
) -> Interference:
    """Measure the baseline alone and beside copies of itself. No launch outlives the call."""
    width = devices_needed(config, engine)
    most = config.executor.max_parallel or config.hardware.devices
    copies = min(config.hardware.devices // width, most)
    if copies < _LEAST_COPIES:
        return Interference("not checked", f"two launches of {width} devices do not run side by side here")
    _end_leftovers(folder)
    attempt = len(list((folder / FOLDER).glob("*")))
    groups = []
    for number in (1, copies):
        specs = []
        for i in range(number):
            spec = make_spec(
                config, folder, launch_id=f"{attempt + i + 1:04d}-{engine.hash}", engine=engine, params=None,
                purpose="baseline", attempt=0, loads=(load,), repeat=0, quality_runs=(),
            )  # fmt: skip
            specs.append(replace(spec, within=FOLDER))
        attempt += number
        found = _measure([executor.submit(spec) for spec in specs], clock)
        if isinstance(found, str):
            return Interference("not checked", f"the baseline could not be measured: {found}")
        groups.append(found)
    return judge(groups[0][0], groups[1], load.label)


def judge(alone: PointRecord, beside: Sequence[PointRecord], load: str) -> Interference:
    """The verdict from the measurements. beside: at least two, of copies that ran at the same time."""
    metrics = {}
    for name in _COMPARED:
        one, many = alone.metrics.get(name), [p.metrics.get(name) for p in beside]
        values = [v for v in many if v is not None and v > 0]
        if one is not None and one > 0 and len(values) == len(beside):
            metrics[name] = _change(name, one, values)
    if not metrics:
        return Interference("not checked", "nothing was measured both alone and side by side", len(beside), load)
    worst = max(metrics, key=lambda n: abs(math.log1p(metrics[n].change)) / math.log1p(metrics[n].limit))
    found = metrics[worst]
    words = f"{worst} {found.change:+.1%} beside {len(beside) - 1} more at {load}, noise allows {found.limit:.1%}"
    return Interference("distorts" if found.beyond_noise else "none", words, len(beside), load, metrics)


def _change(name: str, alone: float, beside: Sequence[float]) -> Change:
    logs = [math.log(value) for value in beside]
    own, prior = len(logs) - 1, PRIOR_DEGREES
    usual = _USUAL_CV.get(name, _OTHER_CV)
    spread = math.sqrt((own * variance(logs) + prior * usual**2) / (own + prior))
    reach = t_quantile((1 + COVERAGE) / 2, own + prior) * spread * math.sqrt(1 + 1 / len(logs))
    return Change(alone, tuple(beside), math.expm1(fmean(logs) - math.log(alone)), math.expm1(reach))


def _measure(jobs: Sequence[Job], clock: Clock) -> list[PointRecord] | str:
    """One point of each launch, or why there is none."""
    points, failures = [], []
    try:
        left = list(jobs)
        while left:
            for job in list(left):
                running = job.running
                for event in job.poll():
                    if event["event"] != "record":
                        continue
                    record = record_from_dict(event["record"])
                    if isinstance(record, PointRecord) and record.state == "measured":
                        points.append(record)
                    elif isinstance(record, PointRecord | LaunchRecord) and record.cause is not None:
                        failures.append(f"{record.cause}: {record.detail}")
                if not running:
                    left.remove(job)
            if left:
                clock.sleep(_POLL_S)
    finally:
        for job in jobs:
            job.cancel()
        while any(job.running for job in jobs):
            clock.sleep(_POLL_S)
    return points if len(points) == len(jobs) else (failures[0] if failures else "the launch said nothing")


def _end_leftovers(folder: Path) -> None:
    """Of a check that was killed."""
    for path in (folder / FOLDER).glob(f"*/{SPEC_FILE}"):
        kill_leftovers(replace(read_spec(path), study_dir=str(folder)).mark)
