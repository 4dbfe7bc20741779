"""Measure a small space exhaustively on real servers, and write it as a table that searches can be replayed on.

    python scripts/exhaustive_table.py NAME [key=value ...]        e.g. NAME=cpu_small_table, see benchmarks/README.md
    python scripts/exhaustive_table.py NAME --export FOLDER        only export a study that was measured before

Runs `sweep run sampler=grid` over the whole space (interrupted, the same command continues) and writes
benchmarks/data/NAME.csv, one row for each operating point, and NAME.json beside it: the space, the loads, and where,
when and with what it was measured. A table with holes is refused.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from sweep.config import HardwareConfig, ModelConfig, SpaceConfig
from sweep.results.points import operating_points
from sweep.results.records import LaunchRecord, PointRecord, RecordStore
from sweep.space.search_space import make_search_space

DATA = Path(__file__).resolve().parent.parent / "benchmarks" / "data"
METRICS = (
    "cost_usd_per_mtok", "ttft_p50_ms", "ttft_mean_ms", "tpot_p50_ms", "tpot_mean_ms", "e2e_p50_ms",
    "output_throughput_tok_s",
)  # fmt: skip
# The whole grid once: no repeats, no validation, nothing but the load ladder.
GRID = ("sampler=grid", "validation=none", "repeats=none", "quality=none", "budget=unlimited")


def export(folder: Path, name: str) -> Path:
    """The measured points of a study as NAME.csv and NAME.json. Exits naming the points that are missing."""
    study: dict[str, Any] = json.loads((folder / "study.json").read_text())
    config = study["config"]
    records = RecordStore(folder).read()
    launches = {r.launch_id: r for r in records if isinstance(r, LaunchRecord)}
    load_s = {(r.config_hash, r.load_label): _seconds(r) for r in records if isinstance(r, PointRecord)}
    rows, missing = [], []
    for point in operating_points(records):
        values = [point.metrics.get(metric) for metric in METRICS]
        if point.state != "measured" or None in values or point.params is None:
            missing.append(f"{point.point_id}: {point.cause or 'no value'}")
            continue
        start = launches[point.launch_id].startup_s
        seconds = round(load_s[point.config_hash, point.load_label], 2)
        rows.append([json.dumps(point.params), point.load_label, point.devices, start, seconds, *values])
    measured = {row[0] for row in rows}
    space = make_search_space(SpaceConfig(**config["space"]), ModelConfig(name="any"), HardwareConfig(name="any"))
    never = [params for params in space.enumerate() if json.dumps(params) not in measured]
    missing += [f"never measured: {params}" for params in never if not space.violations(params)]
    if missing:
        raise SystemExit("the table has holes:\n" + "\n".join(missing))
    DATA.mkdir(exist_ok=True)
    with (DATA / f"{name}.csv").open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["params", "load", "devices", "startup_s", "load_s", *METRICS])
        writer.writerows(sorted(rows))
    loads = {p.load_label: dict(p.load) for p in operating_points(records)}
    busiest = sorted(loads.values(), key=lambda load: -(load.get("concurrency") or load.get("request_rate_rps") or 0))
    finished = [r.finished_at for r in launches.values()]
    facts = {
        "name": name,
        "space": config["space"],
        "loads": busiest,
        "model": config["model"]["name"],
        "workload": config["workload"],
        "engine_args": config["engine"]["args"],
        "hardware": config["hardware"],
        "vllm_version": study.get("vllm_version"),
        "machine": f"{platform.machine()}, {psutil.cpu_count()} shared cores, no GPU" if
                   config["hardware"]["device"] == "cpu" else config["hardware"]["name"],
        "measured": [min(finished), max(finished)],
        "launches": len(launches),
        "how": "scripts/exhaustive_table.py; one measurement of each point, noise included",
    }  # fmt: skip
    (DATA / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return DATA / f"{name}.csv"


def _seconds(point: PointRecord) -> float:
    return (datetime.fromisoformat(point.finished_at) - datetime.fromisoformat(point.started_at)).total_seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("overrides", nargs="*", help="as for `sweep run`")
    parser.add_argument("--export", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    folder: Path = given.export or Path("runs") / given.name
    if given.export is None:
        command = [sys.executable, "-m", "sweep", "run", f"study={given.name}", *GRID, *given.overrides]
        subprocess.run(command, check=True)
    print(export(folder, given.name))


if __name__ == "__main__":
    main()
