"""How fast the estimator answers, and how far it is from what was measured.

    python benchmarks/estimator.py [--json OUT]

Speed: Llama-3.3-70B on 8 x H200 over tensor parallelism, formats, max_num_seqs, max_num_batched_tokens and load, once
cold (tables are loaded, sessions built) and once warm. Accuracy: the measured vLLM points that aiconfigurator-core
brings (silicon_sample.csv; Apache-2.0), one GPU generation's kernels against whole servers of several vLLM versions.
The constants of the time to first token were calibrated on part of these points, so that figure flatters.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import time
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sweep.config import HardwareConfig
from sweep.engine.engine_args import EngineConfig
from sweep.estimate import Estimate, Lengths, estimate
from sweep.measure.workload import Load

MODEL = "meta-llama/Llama-3.3-70B-Instruct"
H200X8 = HardwareConfig(name="h200x8", devices=8, memory_gib=140.4)
GRID: dict[str, list[Any]] = {
    "tensor_parallel_size": [2, 4, 8],
    "quantization": [None, "fp8"],
    "kv_cache_dtype": [None, "fp8"],
    "max_num_seqs": [None, 64, 256],
    "max_num_batched_tokens": [None, 2048, 8192, 16384],
}
LOADS = {
    "closed loops": [Load(c) for c in (1, 8, 32, 64, 128, 256)],
    "open loops": [Load(None, rate) for rate in (1.0, 2.0, 4.0, 8.0)],
}
LENGTHS = Lengths(1024, 256)
MEMORY_GIB = {"h100": 79.6, "h200": 140.4, "b200": 179.0, "b300": 268.0}
# As the table names them -> (our checkpoint, vLLM arguments that make it so); None: published in that format.
SERVED: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("meta-llama/Llama-3.1-70B", "fp8"): ("meta-llama/Llama-3.1-70B", {"quantization": "fp8"}),
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): ("meta-llama/Llama-3.1-8B", {"quantization": "fp8"}),
    ("Qwen/Qwen3-32B", "fp8"): ("Qwen/Qwen3-32B", {"quantization": "fp8"}),
    ("Qwen/Qwen3-32B", ""): ("Qwen/Qwen3-32B", {}),
    ("Qwen/Qwen3-235B-A22B-FP8", "fp8"): ("Qwen/Qwen3-235B-A22B-FP8", {}),
    ("MiniMaxAI/MiniMax-M2.5", "fp8"): ("MiniMaxAI/MiniMax-M2.5", {}),
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): ("nvidia/MiniMax-M2.5-NVFP4", {}),
    ("openai/gpt-oss-120b", "fp4"): ("openai/gpt-oss-120b", {}),
    ("moonshotai/Kimi-K2.5", "fp4"): ("nvidia/Kimi-K2.5-NVFP4", {}),
    ("moonshotai/Kimi-K2.5", "int4"): ("moonshotai/Kimi-K2.5", {}),
}


def speed() -> dict[str, dict[str, float]]:
    """Estimates per second, cold and warm, by kind of load."""
    combinations = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    engines = [EngineConfig(MODEL, {"max_model_len": 16384, **args}, {}) for args in combinations]
    rates: dict[str, dict[str, float]] = {}
    for kind, loads in LOADS.items():
        rates[kind] = {"estimates": float(len(engines) * len(loads))}
        for run in ("cold", "warm"):
            began = time.perf_counter()
            answers = [estimate(engine, H200X8, LENGTHS, load) for engine in engines for load in loads]
            assert all(isinstance(answer, Estimate) for answer in answers)
            rates[kind][f"{run}_per_s"] = len(answers) / (time.perf_counter() - began)
    return rates


def accuracy() -> dict[str, Any]:
    """Median absolute percentage errors and rank correlations within (model, GPU, precision, lengths)."""
    table = Path(str(files("aiconfigurator_core") / "systems" / "silicon_sample.csv"))
    rows = [r for r in csv.DictReader(table.open()) if r["backend"] == "vllm" and r["mode"] == "agg"]
    groups: dict[tuple[str, ...], list[tuple[float, float, float, float]]] = defaultdict(list)
    unknown: dict[str, int] = defaultdict(int)
    for row in rows:
        found = _estimate_row(row)
        if isinstance(found, Estimate) and found.ttft_ms is not None and found.tpot_ms is not None:
            key = tuple(row[name] for name in ("model_path", "system", "precision", "isl", "osl"))
            measured = float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])
            groups[key].append((found.ttft_ms, measured[0], found.tpot_ms, measured[1]))
        else:
            unknown["would not start" if isinstance(found, Estimate) else str(found)] += 1
    points = np.array([point for group in groups.values() for point in group])
    large = [np.array(group) for group in groups.values() if len(group) >= 5]
    return {
        "points": len(points),
        "of": len(rows),
        "unknown": dict(unknown),
        "ttft_median_error": _error(points[:, 0], points[:, 1]),
        "tpot_median_error": _error(points[:, 2], points[:, 3]),
        "groups": len(large),
        "ttft_rank_correlation": median(_rank_correlation(g[:, 0], g[:, 1]) for g in large),
        "tpot_rank_correlation": median(_rank_correlation(g[:, 2], g[:, 3]) for g in large),
    }


def _estimate_row(row: dict[str, str]) -> Estimate | str:
    served = SERVED.get((row["model_path"], row["precision"]))
    gpu = row["system"].removesuffix("_sxm")
    if served is None or gpu not in MEMORY_GIB or not row["batch_size"]:
        return "not comparable"
    model, args = served
    tensor, data = int(float(row["tp_size"])), int(float(row["attention_dp_size"] or 1))
    args = {**args, "tensor_parallel_size": tensor, "data_parallel_size": data, "max_num_seqs": 1024}
    if float(row["moe_ep_size"] or 1) > 1:
        args["enable_expert_parallel"] = True
    lengths = Lengths(int(row["isl"]), int(row["osl"]))
    args["max_model_len"] = lengths.prompt_tokens + lengths.output_tokens + 200
    concurrency = int(float(row["batch_size"])) * data
    hardware = HardwareConfig(name=gpu, devices=8, memory_gib=MEMORY_GIB[gpu])
    found = estimate(EngineConfig(model, args, {}), hardware, lengths, Load(concurrency))
    return found if isinstance(found, Estimate) else found.reason[:70]


def _error(estimated: np.ndarray[Any, Any], measured: np.ndarray[Any, Any]) -> float:
    return float(np.median(np.abs(estimated / measured - 1.0)))


def _rank_correlation(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Spearman's, ties broken by position."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT")
    out = parser.parse_args().json
    result = {"speed": speed(), "accuracy": accuracy()}
    for kind, rates in result["speed"].items():
        cold, warm = rates["cold_per_s"], rates["warm_per_s"]
        print(f"{kind}: {rates['estimates']:.0f} estimates, {cold:,.0f}/s cold, {warm:,.0f}/s warm")
    found = result["accuracy"]
    print(f"{found['points']} of {found['of']} measured points estimated; the others: {found['unknown']}")
    for name in ("ttft", "tpot"):
        error, rank = found[f"{name}_median_error"], found[f"{name}_rank_correlation"]
        print(f"{name}: median error {error:.1%}, rank correlation {rank:.3f} (median of {found['groups']} groups)")
    if out is not None:
        out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
