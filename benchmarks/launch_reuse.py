"""What one launch for a whole load ladder saves against one launch for each point, on real vLLM.

    python benchmarks/launch_reuse.py [--loads 16 8 2] [--json OUT] [key=value ...]

Both ways run here, alternating, on the same machine: `sweep run` of vLLM's defaults with all loads, and the same points
with one load each. Reported as operating points per hour and their ratio. Further overrides go to `sweep run`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sweep.decide.opened import open_study

CPU_DEMO = [
    "model=smollm2_135m", "hardware=cpu", "engine=vllm_cpu", "workload=cpu_demo", "search_space=cpu_small",
    "objectives=speed_cost", "quality=none", "proof=shared_cores",
]  # fmt: skip


def run(folder: Path, study: str, loads: list[int], overrides: list[str]) -> tuple[float, int]:
    """(seconds of wall time, measured points) of one `sweep run` that launches vLLM's defaults once."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "sweep", "run", *CPU_DEMO, f"study={study}", f"storage.dir={folder}"]
    ladder = ",".join(map(str, loads))
    command += [f"workload.loads.concurrency=[{ladder}]", f"budget.trials={len(loads)}", *overrides]
    subprocess.run(command, check=True, stdout=sys.stderr)
    points = open_study(folder / study).operating_points
    return time.perf_counter() - began, sum(p.state in ("measured", "quarantined") for p in points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, nargs="+", default=[16, 8, 2])
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        single = [run(Path(folder), f"single-{c}", [c], overrides) for c in args.loads]
        ladder = run(Path(folder), "ladder", args.loads, overrides)
    single_s, single_points = sum(s for s, _ in single), sum(n for _, n in single)
    ladder_s, ladder_points = ladder
    result = {
        "loads": args.loads,
        "one_launch_each": {"wall_s": round(single_s, 1), "points_per_hour": round(3600 * single_points / single_s, 1)},
        "one_launch_for_all": {
            "wall_s": round(ladder_s, 1),
            "points_per_hour": round(3600 * ladder_points / ladder_s, 1),
        },
        "ratio": round((ladder_points / ladder_s) / (single_points / single_s), 2),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
