"""The problems of benchmarks/search.py: spaces whose every operating point is known, so that a search can be judged.

measured    the measured table of aiconfigurator-core (silicon_sample.csv, 0.12.0, Apache-2.0): one problem for each
            (backend, model, prompt, output) with at least 25 distinct points. A configuration is GPU x precision x
            parallelism x concurrency, a launch measures one point. Cost by Little's law from TTFT and TPOT at example
            prices. Rows of one configuration are averaged. Every launch costs the same here (what these took is not
            known), so that trials are what is counted. The estimator is that package's own for its backend.
estimated   Llama-70B on 8 H200, Llama-8B on 8 H100 and Qwen3-30B-A3B on 8 H100, every point estimated by
            sweep.estimate and then distorted: a bias, a factor for every label, for every pair of labels, and for
            every configuration, so that the estimator is not the truth. A fifth of the regions (layout x numerics)
            crashes. A launch costs its start and the loads it measures; what it reports is noisy.
real        small spaces measured exhaustively on real vLLM servers (data/), see scripts/exhaustive_table.py.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import moocore
import numpy as np

from sweep.config import HardwareConfig, ModelConfig, SpaceConfig
from sweep.engine.engine_args import EngineConfig
from sweep.estimate import Estimate, Lengths, estimate
from sweep.measure.workload import Load
from sweep.search import Guess, Tried
from sweep.search.candidates import Key, key_of
from sweep.space.search_space import Params, SearchSpace, make_search_space

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
DATA = Path(__file__).parent / "data"

# Example prices, USD per GPU-hour, as in conf/hardware; for GPUs without a file there, a figure in line with them.
PRICES = {"h100_sxm": 2.5, "h200_sxm": 3.2, "b200_sxm": 4.8, "b300_sxm": 5.5, "gb200": 5.5}
LEAST_POINTS = 25
STARTUP_S, LOAD_S = 150.0, 60.0
TPOT_CV, TTFT_CV = 0.06, 0.10
CRASH_SHARE = 0.2
REQUESTS, LONGEST_LOAD_S = 200, 300.0


@dataclass
class Problem:
    """truth: configuration -> (loads, objectives), natural units, lower is better. guesses: the same, as estimated.

    seconds: configuration -> (start, seconds of every load). crashing: keys of truth that never run.
    """

    set: str
    name: str
    space: SearchSpace
    ladder: tuple[Load, ...]
    objectives: tuple[str, ...]
    truth: dict[Key, FloatArray]
    guesses: dict[Key, FloatArray]
    devices: dict[Key, int]
    seconds: dict[Key, tuple[float, FloatArray]]
    crashing: frozenset[Key] = frozenset()
    noise: tuple[float, ...] = ()
    reference: FloatArray = field(init=False)
    volume: float = field(init=False)

    def __post_init__(self) -> None:
        points = np.log(self.all_points())
        self.reference = points.max(axis=0) + math.log(1.1)
        self.volume = float(moocore.hypervolume(points, ref=self.reference))

    def all_points(self) -> FloatArray:
        return np.concatenate([table for key, table in self.truth.items() if key not in self.crashing])

    def allowed(self, params: Params) -> bool:
        return key_of(params) in self.truth

    def devices_of(self, params: Params) -> int:
        return self.devices.get(key_of(params), 1)

    def prior(self, params: Params, load: Load) -> Guess | None:
        table = self.guesses.get(key_of(params))
        if table is None:
            return None
        values = table[self.ladder.index(load)]
        return Guess(tuple(float(v) if math.isfinite(v) else None for v in values))

    def share(self, points: FloatArray) -> float:
        """Of the true hypervolume on the logarithmic scale, what these true values dominate."""
        return float(moocore.hypervolume(np.log(points), ref=self.reference)) / self.volume if len(points) else 0.0

    def launch(self, params: Params, loads: Sequence[Load], rng: np.random.Generator) -> Tried:
        """What a launch of this configuration at these loads would report."""
        key = key_of(params)
        start, seconds = self.seconds[key]
        start *= float(np.exp(rng.normal(0.0, 0.1)))
        if key in self.crashing:
            return Tried(params, {load.label: None for load in loads}, "crash", self.devices[key], 0.6 * start)
        indices = [self.ladder.index(load) for load in loads]
        values = self.truth[key][indices]
        if self.noise:
            values = values * np.exp(rng.normal(0.0, self.noise, size=values.shape))
        return Tried(
            params,
            {load.label: tuple(map(float, row)) for load, row in zip(loads, values, strict=True)},
            None,
            self.devices[key],
            start,
            {load.label: float(seconds[i]) for load, i in zip(loads, indices, strict=True)},
        )


def _space(name: str, params: Mapping[str, Any], constraints: Sequence[str] = ()) -> SearchSpace:
    hardware = HardwareConfig(name="any", device="gpu", devices=1024, memory_gib=None)
    return make_search_space(SpaceConfig(name, dict(params), list(constraints)), ModelConfig(name="any"), hardware)


# ------------------------------------------------------------ measured


def measured_problems(set_name: str, objectives: Sequence[str]) -> list[Problem]:
    """objectives: of cost, tpot, ttft."""
    groups: dict[tuple[str, ...], dict[Key, list[dict[str, str]]]] = {}
    for row in csv.DictReader((_tables() / "systems" / "silicon_sample.csv").open()):
        if row["mode"] == "agg" and row["batch_size"]:
            problem = tuple(row[name] for name in ("backend", "model_path", "isl", "osl"))
            groups.setdefault(problem, {}).setdefault(key_of(_table_params(row)), []).append(row)
    return [
        _measured(set_name, name, points, objectives)
        for name, points in sorted(groups.items())
        if len(points) >= LEAST_POINTS
    ]  # fmt: skip


def _tables() -> Any:
    return files("aiconfigurator_core")


def _number(row: Mapping[str, str], name: str) -> int:
    return int(float(row[name] or 1))


def _table_params(row: Mapping[str, str]) -> Params:
    return {
        "gpu": row["system"],
        "precision": " ".join(dict.fromkeys(row[n] for n in ("precision", "gemm_quant_mode", "moe_quant_mode"))),
        "tensor": _number(row, "tp_size"),
        "data": _number(row, "attention_dp_size"),
        "experts": _number(row, "moe_ep_size"),
        "experts_tensor": _number(row, "moe_tp_size"),
        "concurrency": _number(row, "batch_size") * _number(row, "attention_dp_size"),
    }


def _measured(
    set_name: str, name: tuple[str, ...], points: Mapping[Key, Sequence[Mapping[str, str]]], objectives: Sequence[str]
) -> Problem:
    truth, guesses, devices, seconds = {}, {}, {}, {}
    for key, rows in points.items():
        params = dict(key)
        gpus = int(params["tensor"]) * int(params["data"])  # type: ignore[arg-type]
        times = np.mean([[float(r["silicon_ttft_ms"]), float(r["silicon_tpot_ms"])] for r in rows], axis=0)
        truth[key] = _objectives(params, gpus, *times, int(name[3]), objectives)
        guesses[key] = _objectives(params, gpus, *_package_estimate(rows[0]), int(name[3]), objectives)
        devices[key] = 1
        seconds[key] = (STARTUP_S, np.array([LOAD_S]))
    choices: dict[str, Any] = {}
    for dimension in dict(next(iter(points))):
        values = {dict(key)[dimension] for key in points}
        choices[dimension] = {"choices": sorted(values)}  # type: ignore[type-var]
    label = f"{name[0]} {name[1].rpartition('/')[2]} {name[2]}/{name[3]}"
    order = ("gpu", "precision", "tensor", "data", "experts", "experts_tensor", "concurrency")
    space = _space(label, {dimension: choices[dimension] for dimension in order})
    metrics = tuple(_METRICS[name] for name in objectives)
    return Problem(set_name, label, space, (Load(1),), metrics, truth, guesses, devices, seconds)


_METRICS = {"cost": "cost_usd_per_mtok", "tpot": "tpot_mean_ms", "ttft": "ttft_mean_ms"}


def _objectives(
    params: Mapping[str, Any], gpus: int, ttft_ms: float, tpot_ms: float, output: int, wanted: Sequence[str]
) -> FloatArray:
    """(1, objectives). Little's law: concurrency requests of `output` tokens each in one request's time."""
    tokens_per_s = params["concurrency"] * output / ((ttft_ms + tpot_ms * (output - 1)) / 1e3)
    cost = PRICES[params["gpu"]] * gpus / 3600.0 / tokens_per_s * 1e6
    values = {"cost": cost, "tpot": tpot_ms, "ttft": ttft_ms}
    return np.array([[values[name] for name in wanted]])


# As the table names checkpoints -> as the package does.
_CHECKPOINTS = {"meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B", "zhipuai/GLM-5": "zai-org/GLM-5"}


def _package_estimate(row: Mapping[str, str]) -> tuple[float, float]:
    """(TTFT, TPOT) in ms as the package estimates for this backend; NaN where it has no kernels."""
    return _estimate_cached(tuple(row.items()))


@cache
def _estimate_cached(items: tuple[tuple[str, str], ...]) -> tuple[float, float]:
    from aiconfigurator_core.sdk import config

    row = dict(items)
    logging.getLogger("aiconfigurator_core").setLevel(logging.CRITICAL)
    gemm, moe = row["gemm_quant_mode"] or None, row["moe_quant_mode"] or None
    # The formats as measured; for DeepSeek with 16-bit attention; for gpt-oss as its checkpoint was published.
    for formats in ((gemm, moe, None), (gemm, moe, "bfloat16"), (None, None, None)):
        try:
            model, backend, database = _session(row["backend"], row["model_path"], row["system"], formats, *(
                _number(row, n) for n in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
            ))  # fmt: skip
            asked = config.RuntimeConfig(
                batch_size=_number(row, "batch_size"), isl=int(row["isl"]), osl=int(row["osl"])
            )
            found = backend.run_agg(model, database, asked, ctx_tokens=8192).get_summary_df().iloc[0]
            return float(found["ttft"]), float(found["tpot"])
        except (ValueError, RuntimeError, AssertionError, KeyError, NotImplementedError, OSError):
            continue
    return math.nan, math.nan


@cache
def _session(
    backend: str, model: str, system: str, formats: tuple[str | None, ...], tensor: int, data: int,
    experts_tensor: int, experts: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    gemm, moe, attention = formats
    settings = build_model_config(
        tensor, 1, data, experts_tensor, experts, gemm_quant_mode=gemm, moe_quant_mode=moe, fmha_quant_mode=attention
    )
    built = get_model(_CHECKPOINTS.get(model, model), settings, backend)
    return built, get_backend(backend), get_database(system, backend, "current")


# ------------------------------------------------------------ estimated and distorted


@dataclass(frozen=True)
class Served:
    """What an estimated problem is about. objectives: of cost, tpot, ttft."""

    name: str
    model: str
    hardware: HardwareConfig
    lengths: Lengths
    objectives: tuple[str, ...]
    moe: bool = False


SERVED = (
    Served("llama-70b h200x8", "meta-llama/Llama-3.3-70B-Instruct", HardwareConfig("h200x8", devices=8,
           memory_gib=140.4, price_usd_per_device_hour=3.2), Lengths(1024, 256), ("cost", "tpot")),
    Served("llama-8b h100x8", "meta-llama/Llama-3.1-8B-Instruct", HardwareConfig("h100x8", devices=8,
           memory_gib=79.6, price_usd_per_device_hour=2.5), Lengths(2048, 256), ("cost", "ttft")),
    Served("qwen3-30b-a3b h100x8", "Qwen/Qwen3-30B-A3B", HardwareConfig("h100x8", devices=8,
           memory_gib=79.6, price_usd_per_device_hour=2.5), Lengths(1024, 512), ("cost", "tpot", "ttft"), moe=True),
)  # fmt: skip
CONCURRENCIES = (256, 128, 64, 32, 16, 8, 4, 1)
ACCEPTANCE = 0.6


def estimated_problems() -> list[Problem]:
    return [_estimated(served) for served in SERVED]


def _estimated(served: Served) -> Problem:
    quantization: dict[str, Any] = {"choices": [None, "fp8"]}
    space = make_search_space(
        SpaceConfig(
            served.name,
            {
                "parallel": {
                    "joint": ["tensor_parallel_size", "data_parallel_size"],
                    "choices": [[1, 1], [2, 1], [4, 1], [8, 1], [1, 2], [2, 2], [1, 4], [4, 2]],
                },
                "quantization": quantization,
                "kv_cache_dtype": {"choices": [None, "fp8"]},
                "drafts": {
                    "bundles": {
                        "off": {},
                        **{
                            f"ngram{n}": {
                                "speculative_config.method": "ngram",
                                "speculative_config.num_speculative_tokens": n,
                            }
                            for n in (1, 2, 4)
                        },
                    }
                },
                "max_num_seqs": {"choices": [None, 16, 32, 64, 128, 256]},
                "max_num_batched_tokens": {"choices": [None, 1024, 2048, 4096, 8192]},
            },
            [],
        ),
        ModelConfig(name=served.name, is_moe=served.moe),
        served.hardware,
    )
    ladder = tuple(Load(c) for c in CONCURRENCIES)
    truth, guesses, devices, seconds = {}, {}, {}, {}
    distortion = _Distortion(served.name)
    for params in space.enumerate():
        settings = {k: v for k, v in space.settings(params).items() if v is not None}
        engine = EngineConfig(served.model, {"max_model_len": 8192, **settings}, {})
        width = int(settings["tensor_parallel_size"] * settings["data_parallel_size"])
        found = [estimate(engine, served.hardware, served.lengths, load, acceptance=ACCEPTANCE) for load in ladder]
        good = [e for e in found if isinstance(e, Estimate) and e.fits is not False and e.tpot_ms and e.ttft_ms]
        if len(good) < len(ladder):
            continue
        key = key_of(params)
        price = served.hardware.price_usd_per_device_hour * width / 3600.0 * 1e6
        plain = np.array([[price / e.output_throughput_tok_s, e.tpot_ms, e.ttft_ms] for e in good])  # type: ignore[operator]
        true = plain * distortion.factors(params, len(ladder))
        columns = [("cost", "tpot", "ttft").index(name) for name in served.objectives]
        guesses[key], truth[key], devices[key] = plain[:, columns], true[:, columns], width
        tokens_per_s = price / true[:, 0]
        load_s = np.minimum(REQUESTS * served.lengths.output_tokens / tokens_per_s, LONGEST_LOAD_S) + 5.0
        seconds[key] = (60.0 + good[0].memory_gib / 1.5, load_s)
    return Problem(
        "estimated", served.name, space, ladder, tuple(_METRICS[name] for name in served.objectives), truth, guesses,
        devices, seconds, frozenset(key for key in truth if distortion.crashes(dict(key))),
        tuple(TTFT_CV if name == "ttft" else TPOT_CV for name in served.objectives),
    )  # fmt: skip


@dataclass(frozen=True)
class _Distortion:
    """What the truth has that the estimator does not know. Everything follows from the name."""

    name: str
    bias: float = 0.2
    label: float = 0.15
    pair: float = 0.08
    own: float = 0.04

    def factors(self, params: Params, loads: int) -> FloatArray:
        """(loads, 3), of cost, TPOT and TTFT: cost and TPOT err together, as both are the time of a step."""
        labels = sorted(f"{k}={v}" for k, v in params.items())
        total = self._normal("bias", self.bias, loads)
        for i, label in enumerate(labels):
            total = total + self._normal(label, self.label, loads)
            for other in labels[:i]:
                total = total + self._normal(f"{other}|{label}", self.pair / 2, loads)
        total = total + self._normal("|".join(labels), self.own, loads)
        return np.exp(np.stack([0.8 * total[:, 0] + 0.2 * total[:, 1], total[:, 0], total[:, 2]], axis=1))

    def crashes(self, params: Mapping[str, Any]) -> bool:
        risks = {name: params[name] for name in ("quantization", "kv_cache_dtype", "drafts")}
        if risks == {"quantization": None, "kv_cache_dtype": None, "drafts": "off"}:
            return False
        region = json.dumps([params["parallel"], risks], sort_keys=True)
        return self._rng(region).random() < CRASH_SHARE

    def _normal(self, what: str, deviation: float, loads: int) -> FloatArray:
        """(loads, 3): a factor's logarithm at the lightest and at the busiest load, and in a line between."""
        ends = self._rng(what).normal(0.0, deviation, size=(2, 3))
        along = np.linspace(0.0, 1.0, loads)[:, None]
        line: FloatArray = ends[0] * (1 - along) + ends[1] * along
        return line

    def _rng(self, what: str) -> np.random.Generator:
        return np.random.default_rng(int.from_bytes(hashlib.sha256(f"{self.name} {what}".encode()).digest()[:8], "big"))


# ------------------------------------------------------------ real


def real_problems() -> list[Problem]:
    return [_real(path) for path in sorted(DATA.glob("*.csv"))]


def _real(path: Path) -> Problem:
    """Raises ValueError for a table with holes: then nobody knows its front."""
    facts: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    space = _space(facts["name"], facts["space"]["params"], facts["space"]["constraints"])
    rows = list(csv.DictReader(path.open()))
    objectives = ("cost_usd_per_mtok", "ttft_p50_ms")
    ladder = tuple(Load.from_dict(load) for load in facts["loads"])
    tables: dict[Key, FloatArray] = {}
    seconds: dict[Key, tuple[float, FloatArray]] = {}
    for row in rows:
        key = key_of(json.loads(row["params"]))
        at = [load.label for load in ladder].index(row["load"])
        tables.setdefault(key, np.full((len(ladder), len(objectives)), np.nan))[at] = [
            float(row[n]) for n in objectives
        ]
        _, loads = seconds.setdefault(key, (float(row["startup_s"]), np.zeros(len(ladder))))
        loads[at] = float(row["load_s"])
    if not all(np.isfinite(table).all() for table in tables.values()):
        raise ValueError(f"{path} has holes")
    return Problem(
        "real", facts["name"], space, ladder, objectives, tables, {}, dict.fromkeys(tables, 1), seconds,
    )  # fmt: skip


PROBLEM_SETS: dict[str, Callable[[], list[Problem]]] = {
    "measured": lambda: measured_problems("measured", ("cost", "tpot")),
    "measured3": lambda: measured_problems("measured3", ("cost", "tpot", "ttft")),
    "estimated": estimated_problems,
    "real": real_problems,
}
