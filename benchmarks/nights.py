"""Whole nights in virtual time: what `sweep run` finds, and in how many hours, with our search, TPE and random.

    python benchmarks/nights.py [--model llama33_70b] [--hardware h200x8] [--hours 8] [--seeds 3] [--jobs 2]

Every night is the study a user would run (`engine=estimate`): the default objectives with quality, repeats, finalists,
loads without a p99. Printed: the share of the box between the best and the worst measured value of each objective (on
the logarithmic scale, of all nights together) that the front of each night dominates, and the hours it spent. The
values are what the nights measured, noise included, so that a night of more points has more luck in it. The server of
such a night is the estimator with noise, and our search begins on the estimator's front: how it fares where the
estimator is wrong is asked by search.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import moocore
import numpy as np

import sweep
from sweep.results.front import eligible
from sweep.results.status import read_status

SAMPLERS = ("sweep", "tpe", "random")


def night(folder: Path, sampler: str, seed: int, words: list[str]) -> Path:
    study = f"{sampler}-{seed}"
    command = [sys.executable, "-m", "sweep", "run", "engine=estimate", *words]
    command += [f"sampler={sampler}", f"sampler.seed={seed}", f"storage.dir={folder}", f"study={study}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama33_70b")
    parser.add_argument("--hardware", default="h200x8")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    words = [f"model={given.model}", f"hardware={given.hardware}", f"budget.hours={given.hours}"]
    jobs = [(sampler, seed) for sampler in SAMPLERS for seed in range(given.seeds)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        folders = list(pool.map(lambda job: night(Path(folder), *job, words), jobs))
        studies = [sweep.open(path) for path in folders]
        hours = [read_status(path)["hours_spent"] for path in folders]
    names = studies[0].objectives
    values = [np.log([[p.metrics[n] for n in names] for p in eligible(s.operating_points, names)]) for s in studies]
    worst, best = np.concatenate(values).max(axis=0) + np.log(1.1), np.concatenate(values).min(axis=0)
    shares = [moocore.hypervolume(v, ref=worst) / float(np.prod(worst - best)) for v in values]
    print(f"{given.model} on {given.hardware}, {given.hours:g} h, objectives {', '.join(names)}; mean (least, most)")
    for i, sampler in enumerate(SAMPLERS):
        own = slice(i * given.seeds, (i + 1) * given.seeds)
        counts = [len(v) for v in values[own]]
        line = [f"{np.mean(x):.{d}f} ({min(x):.{d}f}, {max(x):.{d}f})" for x, d in ((shares[own], 3), (hours[own], 1))]
        print(f"{sampler:8} hypervolume {line[0]}  hours {line[1]}  points {np.mean(counts):.0f}")


if __name__ == "__main__":
    main()
