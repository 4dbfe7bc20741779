"""Which search reaches the true front for the fewest GPU-seconds: our own against a grid, random and Optuna's samplers.

    python benchmarks/search.py [--quick] [--sets measured estimated ...] [--methods ...] [--seeds N] [--json OUT]
                                [--plot OUT.html] [--jobs N] [--known FILE ...]
    python benchmarks/search.py --suggest 2000

The problems are in search_problems.py. Progress is the share of the true hypervolume that the noise-free values of
what was measured dominate, on the logarithm of the objectives (5 % count the same everywhere), up to the worst value of
each + 10 %. A launch of the samplers measures the whole
load ladder, as `sweep run` does; ours may measure a part of it. What a known rule forbids (a hole in the table) costs
nothing and is told to the sampler as infeasible, a repetition costs nothing, as in `sweep run`. The runs of --known
files, written by an earlier --json, are taken as they are. All of it takes days of one core, most of it Optuna's; OUT
is kept up to date, so a run that was stopped goes on with `--known OUT --json OUT`.

Printed: launches to 95 % and 99 %, GPU-seconds to 95 %, mean and worst over problems and seeds; members of the
measured front that the true values of other measured points dominate. A run that never arrives counts as all it did
("*" and how many).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from search_problems import PROBLEM_SETS, Problem

from sweep.measure.workload import Load
from sweep.results.front import nondominated
from sweep.search import Guess, Search, Tried
from sweep.search.candidates import key_of
from sweep.space.search_space import Params
from sweep.study.tell import OptunaMirror, Outcome

MOST_LAUNCHES = 150
FRUITLESS_ASKS = 20
# Where a suggestion takes long, runs over the large tables are shorter and fewer; what is missing is marked.
SHORTER = {"GP": 40}
GP_SEEDS = 2
CURVE_POINTS = 60
WRITE_EVERY_S = 10.0


@dataclass(frozen=True)
class Run:
    """One search. launches, gpu_seconds to a share of the hypervolume: None if it was not reached. launches: in all.

    curve: [GPU-seconds, share] where the share rose. ask_s: mean time of a suggestion.
    """

    set: str
    problem: str
    method: str
    seed: int
    launches_to_95: int | None
    launches_to_99: int | None
    gpu_seconds_to_95: float | None
    gpu_seconds_to_99: float | None
    false_front: int
    launches: int
    gpu_seconds: float
    ask_s: float
    curve: list[list[float]]


Asked = tuple[Params, Sequence[Load]]
Proposer = Callable[[Problem, int, list[Tried]], Iterator[Asked]]


# ------------------------------------------------------------ the methods


def grid(problem: Problem, seed: int, history: list[Tried]) -> Iterator[Asked]:
    """In declared order."""
    for params in problem.space.enumerate():
        if problem.allowed(params):
            yield params, problem.ladder


def random(problem: Problem, seed: int, history: list[Tried]) -> Iterator[Asked]:
    members = [dict(key) for key in problem.truth]
    for index in np.random.default_rng(seed).permutation(len(members)):
        yield members[index], problem.ladder


def estimator_order(problem: Problem, seed: int, history: list[Tried]) -> Iterator[Asked]:
    """By the rank of a configuration's best load among everything estimated; equals and unknowns at random."""
    import moocore

    keys = list(problem.truth)
    flat = [(i, row) for i, key in enumerate(keys) for row in problem.guesses.get(key, ()) if np.isfinite(row).all()]
    best = np.full(len(keys), np.inf)
    if flat:
        ranks = moocore.pareto_rank(np.array([row for _, row in flat]))
        for (i, _), rank in zip(flat, ranks, strict=True):
            best[i] = min(best[i], rank)
    for index in np.lexsort((np.random.default_rng(seed).random(len(keys)), best)):
        yield dict(keys[index]), problem.ladder


def optuna_sampler(make: Callable[[int], optuna.samplers.BaseSampler], kind: str) -> Proposer:
    """A sampler as `sweep run` uses it: rules, no repetitions, the whole ladder told."""

    def propose(problem: Problem, seed: int, history: list[Tried]) -> Iterator[Asked]:
        sampler = make(seed)
        study = optuna.create_study(directions=["minimize"] * len(problem.objectives), sampler=sampler)
        labels = [load.label for load in problem.ladder]
        mirror = OptunaMirror(study, problem.space, labels, problem.objectives, [], kind)
        visited: dict[Any, Tried] = {}
        rest = random(problem, seed, history)
        while len(visited) < len(problem.truth):
            asked = _ask(problem, mirror, visited)
            if asked is None:
                params = next(p for p, _ in rest if key_of(p) not in visited)
                trial, label = None, ""
            else:
                trial, params, label = asked
            yield params, problem.ladder
            visited[key_of(params)] = launch = history[-1]
            for name, values in launch.points.items():
                outcome = Outcome(values, values is None, {}, {})
                if trial is not None and name == label:
                    mirror.tell(trial, outcome)
                else:
                    mirror.add(params, name, outcome)

    return propose


def _ask(
    problem: Problem, mirror: OptunaMirror, visited: dict[Any, Tried]
) -> tuple[optuna.Trial, Params, str] | None:  # fmt: skip
    for _ in range(FRUITLESS_ASKS):
        trial, params, label = mirror.ask()
        if not problem.allowed(params):
            mirror.reject(trial, ["not in the table"])
        elif (known := visited.get(key_of(params))) is not None:
            values = known.points[label]
            mirror.tell(trial, Outcome(values, values is None, {}, {}))
        else:
            return trial, params, label
    return None


def ours(problem: Problem, seed: int, history: list[Tried], prior: Any = True) -> Iterator[Asked]:
    guess = problem.prior if prior is True else prior
    search = Search(
        problem.space, problem.ladder, problem.objectives, guess or None, seed,
        devices_of=problem.devices_of, allowed=problem.allowed,
        members=[dict(key) for key in problem.truth],
    )  # fmt: skip
    while (suggestion := search.ask(history)) is not None:
        yield suggestion.params, suggestion.loads


def ours_alone(problem: Problem, seed: int, history: list[Tried]) -> Iterator[Asked]:
    """Without an estimator."""
    return ours(problem, seed, history, prior=None)


def ours_misled(problem: Problem, seed: int, history: list[Tried]) -> Iterator[Asked]:
    """With an estimator that says the opposite: what is good it calls bad."""

    def opposite(params: Params, load: Load) -> Guess | None:
        found = problem.prior(params, load)
        return None if found is None else Guess(tuple(None if v is None else 1e3 / v for v in found.values))

    return ours(problem, seed, history, prior=opposite)


def knowing_the_truth(problem: Problem, seed: int, history: list[Tried]) -> Iterator[Asked]:
    """What no search can beat by much: each time the configuration whose true values add the most hypervolume."""
    left = {key: rows for key, rows in problem.truth.items() if key not in problem.crashing}
    found = np.empty((0, len(problem.objectives)))
    while left:
        best = max(left, key=lambda key: problem.share(np.concatenate([found, left[key]])))
        found = np.concatenate([found, left.pop(best)])
        found = found[nondominated(found)]
        yield dict(best), problem.ladder


METHODS: dict[str, Proposer] = {
    "grid": grid,
    "random": random,
    "TPE": optuna_sampler(lambda s: optuna.samplers.TPESampler(seed=s, n_startup_trials=16, constant_liar=True), "tpe"),
    "NSGA-II": optuna_sampler(lambda s: optuna.samplers.NSGAIISampler(seed=s, population_size=16), "nsga2"),
    "GP": optuna_sampler(lambda s: optuna.samplers.GPSampler(seed=s, n_startup_trials=16), "gp"),
    "estimator order": estimator_order,
    "ours": ours,
    "ours, no estimator": ours_alone,
    "ours, misled": ours_misled,
    "knowing the truth": knowing_the_truth,
}
SEEDLESS = ("grid", "knowing the truth")


# ------------------------------------------------------------ running


def run(problem: Problem, method: str, seed: int) -> Run:
    """One search until 99 % of the true hypervolume, or too many launches."""
    rng = np.random.default_rng([seed, 1])
    history: list[Tried] = []
    found: list[np.ndarray[Any, Any]] = []
    spent, share, asking = 0.0, 0.0, 0.0
    reached: dict[float, tuple[int, float]] = {}
    curve = [[0.0, 0.0]]
    most = SHORTER.get(method, MOST_LAUNCHES) if problem.set == "estimated" else MOST_LAUNCHES
    proposals = METHODS[method](problem, seed, history)
    while len(history) < most:
        began = time.perf_counter()
        asked = next(proposals, None)
        asking += time.perf_counter() - began
        if asked is None:
            break
        launch = problem.launch(*asked, rng)
        history.append(launch)
        spent += launch.devices * ((launch.startup_s or 0.0) + sum(launch.load_s.values()))
        if launch.cause is None:
            rows = [i for i, load in enumerate(problem.ladder) if load.label in launch.points]
            found.extend(problem.truth[key_of(launch.params)][rows])
        now = problem.share(np.array(found)) if found else 0.0
        if now > share:
            share = now
            curve.append([round(spent), round(share, 4)])
        for target in (0.95, 0.99):
            if share >= target:
                reached.setdefault(target, (len(history), spent))
        if 0.99 in reached:
            break
    to_95, to_99 = reached.get(0.95, (None, None)), reached.get(0.99, (None, None))
    step = max(1, len(curve) // CURVE_POINTS)
    return Run(
        problem.set, problem.name, method, seed, to_95[0], to_99[0], to_95[1], to_99[1],
        _false_front(problem, history), len(history), spent, asking / max(1, len(history)),
        [*curve[::step], [round(spent), round(share, 4)]],
    )  # fmt: skip


def _false_front(problem: Problem, history: Sequence[Tried]) -> int:
    """Members of the measured front that another measured point truly dominates."""
    measured, true = [], []
    for launch in history:
        for i, load in enumerate(problem.ladder):
            values = launch.points.get(load.label)
            if values is not None:
                measured.append(values)
                true.append(problem.truth[key_of(launch.params)][i])
    if not measured:
        return 0
    return int((nondominated(np.array(measured)) & ~nondominated(np.array(true))).sum())


@cache
def _problems(name: str) -> list[Problem]:
    return PROBLEM_SETS[name]()


def _job(job: tuple[str, int, str, int]) -> Run:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    name, index, method, seed = job
    return run(_problems(name)[index], method, seed)


def jobs(sets: Sequence[str], methods: Sequence[str], seeds: int, quick: bool) -> list[tuple[str, int, str, int]]:
    found = []
    for name in sets:
        for method in methods:
            for index in range(len(_problems(name))):
                if quick and name.startswith("measured") and index % 4:
                    continue
                once = method in SEEDLESS or (method == "GP" and name.startswith("measured") and index % 4)
                count = 1 if once else min(seeds, GP_SEEDS) if method == "GP" else seeds
                found.extend((name, index, method, seed) for seed in range(count))
    return sorted(found, key=lambda job: job[3])  # stopped early, every method has had as many seeds


# ------------------------------------------------------------ showing


def table(runs: Sequence[Run]) -> str:
    """Mean (worst) of each method, for every set and, of the measured table, for every engine."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for r in runs:
        engine = f" {r.problem.partition(' ')[0]}" if r.set.startswith("measured") else ""
        groups[r.set + engine, r.method].append(r)
    head = f"{'problems':20} {'method':20} {'launches to 95 %':>20} {'to 99 %':>20} {'GPU-h to 95 %':>20}"
    lines = [head + f" {'false front':>12} {'ask s':>7} {'runs':>5}"]
    for (name, method), found in groups.items():
        cells = [
            _cell([r.launches_to_95 for r in found], [r.launches for r in found], "{:.1f}"),
            _cell([r.launches_to_99 for r in found], [r.launches for r in found], "{:.1f}"),
            _cell([None if r.gpu_seconds_to_95 is None else r.gpu_seconds_to_95 / 3600 for r in found],
                  [r.gpu_seconds / 3600 for r in found], "{:.2f}"),
        ]  # fmt: skip
        false = np.mean([r.false_front for r in found])
        ask = np.mean([r.ask_s for r in found])
        numbers = " ".join(f"{cell:>20}" for cell in cells)
        lines.append(f"{name:20} {method:20} {numbers} {false:12.1f} {ask:7.3f} {len(found):5}")
    return "\n".join(lines)


def _cell(values: Sequence[float | None], otherwise: Sequence[float], form: str) -> str:
    filled = [o if v is None else v for v, o in zip(values, otherwise, strict=True)]
    missed = sum(v is None for v in values)
    star = f" *{missed}" if missed else ""
    return f"{form.format(np.mean(filled))} ({form.format(max(filled))}){star}"


def plot(runs: Sequence[Run], out: Path) -> None:
    """Hypervolume against GPU-hours: means over seeds, a panel for each problem or engine of the table."""
    import plotly.graph_objects as go
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    panels: dict[str, list[Run]] = defaultdict(list)
    for r in runs:
        panels[r.problem if r.set in ("estimated", "real") else f"{r.set} {r.problem.partition(' ')[0]}"].append(r)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = make_subplots(rows, columns, subplot_titles=list(panels), vertical_spacing=0.12)
    colors = dict(zip(METHODS, qualitative.D3, strict=False))
    shown: set[str] = set()
    for place, found in enumerate(panels.values()):
        until = max(r.gpu_seconds for r in found)
        grid_s = np.geomspace(min(r.curve[min(1, len(r.curve) - 1)][0] or 1 for r in found), until, 160)
        for method in METHODS:
            mine = [r for r in found if r.method == method]
            if not mine:
                continue
            shares = np.mean([_at(r.curve, grid_s) for r in mine], axis=0)
            line = {"color": colors[method], "width": 3 if method == "ours" else 1.5}
            figure.add_trace(
                go.Scatter(x=grid_s / 3600, y=shares, name=method, line=line, legendgroup=method,
                           showlegend=method not in shown),
                place // columns + 1, place % columns + 1,
            )  # fmt: skip
            shown.add(method)
    figure.update_xaxes(type="log", title="GPU-hours")
    figure.update_yaxes(range=[0.5, 1.005], title="share of the true hypervolume")
    figure.add_hline(y=0.95, line={"color": "gray", "width": 1, "dash": "dot"})
    figure.update_layout(template="plotly_white", width=520 * columns, height=420 * rows + 60,
                         title="Hypervolume against GPU-hours, mean over problems and seeds")  # fmt: skip
    figure.write_html(out, include_plotlyjs=True)


def _at(curve: Sequence[Sequence[float]], seconds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    times, shares = np.array(curve).T
    return shares[np.maximum(np.searchsorted(times, seconds, side="right") - 1, 0)]


def suggestion_time(points: int, rounds: int = 10) -> str:
    """What one of our own suggestions takes once so many points of the first estimated problem are measured."""
    problem = _problems("estimated")[0]
    rng = np.random.default_rng(0)
    launches = itertools.islice(random(problem, 0, []), points // len(problem.ladder))
    history = [problem.launch(params, loads, rng) for params, loads in launches]
    proposals, seconds = ours(problem, 0, history), []
    for _ in range(rounds):
        began = time.process_time()
        params, loads = next(proposals)
        seconds.append(time.process_time() - began)
        history.append(problem.launch(params, loads, rng))
    # The first one also fills tables that the others find.
    return (
        f"{points:,} points of {problem.name} measured, {len(problem.truth):,} configurations: processor seconds of a "
        f"suggestion, first {seconds[0]:.2f}, then median {np.median(seconds[1:]):.2f}, longest {max(seconds[1:]):.2f}"
    )


def _write(out: Path, runs: Sequence[Run]) -> None:
    partial = out.with_suffix(".tmp")
    partial.write_text(json.dumps([asdict(r) for r in runs]))
    partial.replace(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 seeds, a quarter of the measured problems, no GP")
    parser.add_argument("--sets", nargs="+", default=list(PROBLEM_SETS), choices=list(PROBLEM_SETS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--known", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="OUT.html")
    parser.add_argument("--suggest", type=int, metavar="POINTS", help="only time our suggestions with so many points")
    given = parser.parse_args()
    if given.suggest is not None:
        print(suggestion_time(given.suggest))
        return
    methods = [m for m in given.methods if not (given.quick and m == "GP")]
    rows = (Run(**row) for path in given.known for row in json.loads(path.read_text()))
    known = {(r.set, r.problem, r.method, r.seed): r for r in rows}
    runs = list(known.values())
    asked = jobs(given.sets, methods, given.seeds or (2 if given.quick else 20), given.quick)
    todo = [job for job in asked if (job[0], _problems(job[0])[job[1]].name, *job[2:]) not in known]
    written = time.monotonic()
    with ProcessPoolExecutor(given.jobs) as pool:
        for made in as_completed([pool.submit(_job, job) for job in todo]):
            runs.append(made.result())
            if given.json is not None and time.monotonic() - written > WRITE_EVERY_S:
                _write(given.json, runs)
                written = time.monotonic()
    print(table(runs))
    if given.json is not None:
        _write(given.json, runs)
    if given.plot is not None:
        plot(runs, given.plot)


if __name__ == "__main__":
    main()
