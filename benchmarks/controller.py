"""What the controller itself costs with many trials stored: bookkeeping and suggestions, no server involved.

    python benchmarks/controller.py [--points 2000] [--sampler tpe] [--json OUT]

Fills a study folder with synthetic records (3 loads per configuration, one in five failed), then measures on top of
them: reopening (records read, Optuna rebuilt), one suggestion, and the bookkeeping of one settled point (durable
record, index, status file, told to Optuna's journal on disk). Milliseconds, medians and maxima over --rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from sweep.config import HardwareConfig, ModelConfig, ParamConfig, SamplerConfig, SpaceConfig
from sweep.results.records import PointRecord, QualityRecord, RecordStore, to_json
from sweep.space.search_space import Params, make_search_space
from sweep.study.ledger import Ledger
from sweep.study.samplers import make_sampler
from sweep.study.tell import OptunaMirror, create_study

OBJECTIVES = ["cost_usd_per_mtok", "ttft_p99_ms", "quality_kl"]
LOADS = ["c64", "c8", "c1"]
SPACE = {
    "parallel": ParamConfig(
        joint=["tensor_parallel_size", "data_parallel_size"], choices=[[1, 1], [2, 1], [4, 1], [2, 2]]
    ),
    "max_num_seqs": ParamConfig(low=8, high=1024, log=True, step=2),
    "max_num_batched_tokens": ParamConfig(low=1024, high=32768, step=256),
    "kv_cache_dtype": ParamConfig(choices=[None, "fp8"]),
    "enable_prefix_caching": ParamConfig(choices=[None, False]),
    "gpu_memory_utilization": ParamConfig(low=0.8, high=0.95),
    "weights": ParamConfig(bundles={"checkpoint": {}, "fp8": {"quantization": "fp8"}}),
    "speculation": ParamConfig(bundles={"off": {}, "ngram": {"speculative_config.method": "ngram"}}),
    "speculative_config.num_speculative_tokens": ParamConfig(low=2, high=8, when="speculation == 'ngram'"),
    "attention_backend": ParamConfig(choices=[None, "FLASH_ATTN", "FLASHINFER"]),
}


def point(params: Params, load: str, number: int, rng: random.Random) -> PointRecord:
    ran = rng.random() > 0.2
    metrics: dict[str, float | None] = {
        "cost_usd_per_mtok": rng.random(),
        "ttft_p99_ms": 100 * rng.random(),
        "itl_p99_ms": 9.0,
    }
    return PointRecord(
        point_id=f"{number}-{load}", launch_id=f"{number:04d}", config_hash=f"{number:012d}",
        fingerprint=f"f{number % 4}",
        engine={"model": "m", "args": dict(params), "env": {}}, load={"concurrency": int(load[1:])}, load_label=load,
        params=params, purpose="trial", devices=1, state="measured" if ran else "failed",
        cause=None if ran else "out_of_memory", metrics=metrics if ran else {},
        started_at="2026-01-01T00:00:00+00:00", finished_at="2026-01-01T00:01:00+00:00",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sampler", default="tpe")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    model, node = ModelConfig(name="m", path="org/m", num_attention_heads=32), HardwareConfig(name="h100x8", devices=8)
    space = make_search_space(SpaceConfig("benchmark", SPACE), model, node)
    rng = random.Random(0)
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        study_dir = Path(folder)
        store = RecordStore(study_dir)
        records: list[Any] = [
            QualityRecord(f"f{i}", "f0", "measured", {"quality_kl": 0.01 * i}, 0.0, 4080, None, "") for i in range(4)
        ]
        records += [
            point(params, load, n, rng)
            for n in range(args.points // 3)
            for params in [space.sample(generator)]
            for load in LOADS
        ]
        store.path.write_text("".join(to_json(record) + "\n" for record in records))

        began = time.perf_counter()
        ledger = Ledger(store.read(), OBJECTIVES, 1, True)
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(study_dir / "journal")))
        study = create_study(storage, "s", OBJECTIVES, make_sampler(SamplerConfig(args.sampler)))
        mirror = OptunaMirror(study, space, LOADS, OBJECTIVES, (), args.sampler)
        outcomes = [(r, ledger.outcome(r.config_hash, r.load_label)) for r in ledger.newest_points()]
        mirror.add_all([(r.params or {}, r.load_label, o) for r, o in outcomes if o is not None])
        reopen_s = time.perf_counter() - began

        ask_ms, book_ms = [], []
        for number in range(10**6, 10**6 + args.rounds):
            began = time.perf_counter()
            trial, params, load = mirror.ask()
            ask_ms.append(1e3 * (time.perf_counter() - began))
            new = point(params, load, number, rng)
            began = time.perf_counter()
            store.append(new)
            ledger.add(new)
            outcome = ledger.outcome(new.config_hash, new.load_label)
            assert outcome is not None
            mirror.tell(trial, outcome)
            ledger.operating_points()  # what the status file is made from
            assert ledger.settled_points > 0
            book_ms.append(1e3 * (time.perf_counter() - began))
    result = {
        "points": args.points,
        "sampler": args.sampler,
        "reopen_s": round(reopen_s, 2),
        "suggestion_ms": {"median": round(statistics.median(ask_ms), 1), "max": round(max(ask_ms), 1)},
        "bookkeeping_ms": {"median": round(statistics.median(book_ms), 1), "max": round(max(book_ms), 1)},
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
