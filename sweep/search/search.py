"""What to launch next, and when to stop: the front of a jagged, noisy space in few GPU-seconds.

History in, suggestion out: a Search holds no state that history does not give back, so it is rebuilt after a crash and
never waits for a batch. One suggestion goes through these stages, and says which one made it:

    seed     vLLM's defaults; then the estimated front, or where there is no estimate an even spread
    exploit  the launch, and the part of its load ladder, with the largest expected gain in hypervolume per GPU-second
             (search.gain), by measurements that correct the estimator (search.model) and failures (search.feasibility)
    refine   the same among one-knob neighbours of the front: it is jagged, and a model is smooth
    explore  any configuration, now and then, so that a wrong model cannot keep the search away from anything
    undo     a front point without one of its overrides: the simpler of two that tie is kept
    stop     no launch is expected to gain more than `least_gain` of the hypervolume that is known

Constraints: only points that keep every bound make the front and its hypervolume, and an expected gain counts as far
as the bounds are likely to be kept (search.gain). While points were measured and none keeps them, the launch is sought
that is likeliest to, per GPU-second, whatever it gains (Gelbart, Snoek & Adams 2014), and the front that is refined is
the point that misses by least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from sweep.measure.workload import Load
from sweep.results.front import nondominated
from sweep.results.metrics import get_metric
from sweep.search.candidates import BoolArray, Candidates, IntArray, key_of
from sweep.search.feasibility import CONVICTED, ELSEWHERE, LENGTH, fit_feasibility, suspicion
from sweep.search.gain import Places, best_loads, chance, draw_places, load_gains, log_kept, more_loads
from sweep.search.history import Constraint, Evidence, FloatArray, Scale, Tried, Values
from sweep.search.model import LENGTHS, MAX_ROWS, Basis, Fit, basis, fit
from sweep.space.search_space import Params, SearchSpace

# What a launch costs while none has been seen, in seconds.
_STARTUP_S, _LOAD_S = 120.0, 30.0
# Configurations looked at closely for one suggestion.
_SHORTLIST = 200
_RANDOM = 40
# Configurations drawn to find one that is unlike the others.
_DRAWN = 64
# And of the shortlist, those whose load ladders are compared.
_CLOSELY = 60
# Relative error of an estimate of which nothing has been measured yet, on the logarithmic scale.
_PRIOR_ERROR = 0.3
_NO_PRIOR_ERROR = 1.0
# Model and estimate are off by at least this much for a configuration nobody launched; a metric that others of the same
# kind have measured (Search.shared) is not.
_LEAST_ERROR = 0.02
_EXACT = 1e-6
# The same of any configuration, where they are only ranked; and predicted points count as within reach, or as the
# front's, if they keep the bounds with these probabilities.
_USUAL_ERROR = 0.15
_WITHIN_REACH, _PROBABLE = 0.1, 0.5
# A bound that nobody kept so far takes this many times the launches before it is given up.
_PATIENCE = 3
# How much better than predicted a configuration may turn out, on the model's scale.
_REACH = 0.35
_TIE = 0.03
# Loads that have all values less often than this are not looked at to see whether a model is wrong.
_TELLING = 0.3
# Bounds beyond this, on the model's scale, are none.
_NO_BOUND = 600.0


@dataclass(frozen=True)
class Guess:
    """What an estimator says of a configuration at a load. values: as Tried.points, natural units, None if unknown.

    fits: whether it would start; None: too close to call.
    """

    values: tuple[float | None, ...]
    fits: bool | None = True


class Prior(Protocol):
    """An estimator as the search sees it. None: nothing is known of this configuration."""

    def __call__(self, params: Params, load: Load) -> Guess | None: ...


@dataclass(frozen=True)
class Options:
    """seeds: launches of the first spread without an estimate. refine_every, explore_every: launches between two;
    explore_then: once the model expects no launch to gain more than small_gain.

    least_gain: share of the known hypervolume; a search stops when no launch is expected to gain more.
    least_launches: before it may stop.
    """

    seeds: int = 5
    refine_every: int = 3
    explore_every: int = 12
    explore_then: int = 3
    small_gain: float = 0.005
    least_gain: float = 0.002
    least_launches: int = 8


@dataclass(frozen=True)
class Suggestion:
    """loads: the part of the ladder worth measuring, busiest first. stage, why: for people.

    gain: expected share of the known hypervolume, or while no point keeps the bounds the probability that one of these
    does; None where nothing is known yet. gpu_seconds: expected cost.
    """

    params: Params
    loads: tuple[Load, ...]
    stage: str
    why: str
    gain: float | None = None
    gpu_seconds: float | None = None


@dataclass
class _View:
    """History as arrays. rows, loads, values, kept: (n,), (n,), (n, metrics), (n,) of the measured points.

    values: in natural units. kept: whether every bound is. yields: (loads,), how likely a load that is measured has a
    value of every metric.
    """

    rows: IntArray
    loads: IntArray
    values: FloatArray
    kept: BoolArray
    tried: dict[int, str | None]
    asked: dict[int, set[int]]
    startup_s: float
    load_s: FloatArray
    yields: FloatArray
    pending: list[int] = field(default_factory=list)

    @property
    def seeking(self) -> bool:
        """Whether points were measured and none keeps the bounds."""
        return len(self.kept) > 0 and not self.kept.any()


@dataclass(frozen=True)
class _Scores:
    """Gains of the shortlisted rows at once. mean, deviation: (rows, loads, objectives), NaN where not to be asked.

    keeps: (rows, loads), P(the bounds are kept) that `places` do not know of; while seeking, relative to the likeliest.
    """

    rows: IntArray
    mean: FloatArray
    deviation: FloatArray
    keeps: FloatArray
    runs: FloatArray
    places: Places
    cause: str | None
    seeking: bool


class Search:
    """space: what may be launched. ladder: loads, busiest first. objectives: metric names. prior: an estimator or None.

    constraints: what a point must keep to count. metrics: what is modelled, the columns of Tried.points: the
    objectives, then what else is constrained. evidence: what became of configurations elsewhere, not of this history.
    shared: metric -> the kind of a configuration, where all of one kind have the same value at every load (quality is a
    matter of the numerics alone). devices_of: of a configuration. allowed: what else must hold of one. members: every
    one there is, where it is known.
    """

    def __init__(
        self,
        space: SearchSpace,
        ladder: Sequence[Load],
        objectives: Sequence[str],
        prior: Prior | None = None,
        seed: int = 0,
        *,
        devices_of: Callable[[Params], int] = lambda _: 1,
        allowed: Callable[[Params], bool] = lambda _: True,
        members: Sequence[Params] | None = None,
        constraints: Sequence[Constraint] = (),
        evidence: Sequence[Evidence] = (),
        shared: Mapping[str, Callable[[Params], Hashable]] | None = None,
        options: Options | None = None,
    ) -> None:
        self.space, self.ladder, self.objectives = space, tuple(ladder), tuple(objectives)
        by_name = {c.name: c for c in constraints}
        self.metrics = tuple(dict.fromkeys([*self.objectives, *by_name]))
        self._signs = tuple(by_name[n].sign if n in by_name else get_metric(n).sign for n in self.metrics)
        self._bounds = np.array([by_name[n].bound if n in by_name else sign * np.inf
                                 for n, sign in zip(self.metrics, self._signs, strict=True)])  # fmt: skip
        self.options = options or Options()
        self.candidates = Candidates(space, seed, allowed, members)
        self._prior, self._seed, self._devices_of = prior, seed, devices_of
        self._labels = [load.label for load in self.ladder]
        self.learn(evidence)
        self._guessed = np.zeros((0, len(self.ladder), len(self.metrics)))
        self._fits: list[bool] = []
        self._devices: list[int] = []
        self._shared = {self.metrics.index(name): kind_of for name, kind_of in (shared or {}).items()}
        self._kinds: dict[int, list[Hashable]] = {j: [] for j in self._shared}
        self._tables = {length: self.candidates.likeness(length) for length in {*LENGTHS, LENGTH}}
        places = np.linspace(0.0, 1.0, len(self.ladder))
        self._load_likeness = {n: np.exp(-np.abs(places[:, None] - places[None, :]) / n) for n in LENGTHS}

    # ------------------------------------------------------------ the three questions

    def ask(self, history: Sequence[Tried], pending: Sequence[Params] = ()) -> Suggestion | None:
        """What to launch next beside what is pending; None when every configuration was launched."""
        view = self._view(history, pending)
        self._guess_all()
        free = self._free(view)
        if not len(free):
            return None
        rng = np.random.default_rng([self._seed, len(history), len(pending)])
        default = self._default(view, free)
        if default is not None:
            return self._whole(default, "seed", "vLLM's defaults")
        launches = len(view.tried) + len(view.pending)
        if not len(view.values) and not self._has_prior:
            return self._spread(view, free, rng)
        if not self._has_prior and len({*view.rows}) < self.options.seeds and launches < 3 * self.options.seeds:
            return self._spread(view, free, rng)
        return self._best(view, free, rng, launches)

    def stop(self, history: Sequence[Tried]) -> str | None:
        """Why it is not worth going on, or None."""
        view = self._view(history, ())
        self._guess_all()
        free = self._free(view)
        if not len(free):
            return "every configuration was launched"
        least = self.options.least_launches * (_PATIENCE if view.seeking else 1)
        if len(view.tried) < least or not len(view.values):
            return None
        if self._undo(view, free) is not None:
            return None
        rng = np.random.default_rng([self._seed, len(history)])
        scores = self._score(view, free, rng)
        gain = self._relative(scores, self._choose(view, scores, scores.rows)[1])
        if gain > self.options.least_gain:
            return None
        if view.seeking:
            return f"no point keeps the bounds, and the likeliest launch does with a probability of {gain:.2%}"
        return (
            f"no launch is expected to gain more than {self.options.least_gain:.1%} of the hypervolume "
            f"(the best {gain:.2%})"
        )

    def learn(self, evidence: Sequence[Evidence]) -> None:
        """Let failures and successes elsewhere count for what is likely to run, in place of what was learnt before."""
        self._evidence = {self.candidates.row(e.params): e for e in evidence if self.candidates.launchable(e.params)}

    def undo(self, history: Sequence[Tried]) -> Suggestion | None:
        """A front point without one of its overrides, where that was not measured; None if there is none left."""
        view = self._view(history, ())
        return self._undo(view, self._free(view))

    def kept(self, history: Sequence[Tried]) -> dict[str, Params]:
        """Of the front: description -> the simplest measured configuration that ties with it."""
        view = self._view(history, ())
        return {str(self.candidates.members[r]): self.candidates.members[self._simplest(view, r)]
                for r in self._front_rows(view)}  # fmt: skip

    # ------------------------------------------------------------ stages

    def _default(self, view: _View, free: IntArray) -> int | None:
        params, _ = self.space.baseline()
        if params is None or not self.candidates.launchable(params):
            return None
        row = self.candidates.row(params)
        known = row in view.tried or row in view.pending
        return None if known or row not in free else row

    def _whole(self, row: int, stage: str, why: str) -> Suggestion:
        return Suggestion(self.candidates.members[row], self.ladder, stage, why)

    def _spread(self, view: _View, free: IntArray, rng: np.random.Generator) -> Suggestion:
        """The configuration least like those launched, of some drawn at random."""
        row, why = self._novel(view, free, rng)
        return self._whole(row, "seed", why)

    def _explore(self, view: _View, free: IntArray, rng: np.random.Generator) -> Suggestion:
        """The same, at the ends and the middle of the ladder: enough to see that a model is wrong."""
        row, why = self._novel(view, free, rng)
        open_ = [load for i, load in enumerate(self.ladder) if i not in view.asked.get(row, ())]
        telling = [load for load in open_ if view.yields[self.ladder.index(load)] > _TELLING]
        open_ = telling or open_
        loads = dict.fromkeys((open_[0], open_[len(open_) // 2], open_[-1]))
        return Suggestion(self.candidates.members[row], tuple(loads), "explore", f"{why}, whatever the model says")

    def _novel(self, view: _View, free: IntArray, rng: np.random.Generator) -> tuple[int, str]:
        drawn = rng.choice(free, size=min(_DRAWN, len(free)), replace=False)
        seen = np.array([*view.tried, *view.pending], dtype=np.int64)
        if not len(seen):
            return int(drawn[0]), "a first look at the space"
        codes = self.candidates.codes
        nearest = basis(self._tables[LENGTHS[0]], codes[drawn], codes[seen]).mean.max(axis=1)
        runs, _ = self._runs(view, drawn)
        worth = (1.0 - nearest) * runs / np.sqrt(np.array(self._devices)[drawn])
        return int(drawn[int(worth.argmax())]), "least like what was launched"

    def _best(self, view: _View, free: IntArray, rng: np.random.Generator, launches: int) -> Suggestion:
        scores = self._score(view, free, rng)
        among, stage = scores.rows, "exploit" if len(view.values) and launches >= 3 else "seed"
        if stage == "exploit" and launches % self.options.refine_every == 0:
            near = self._near_front(view, scores.rows)
            if len(near):
                among, stage = near, "refine"
        index, gain, cost, loads = self._choose(view, scores, among)
        relative = self._relative(scores, gain)
        if stage == "exploit" and relative < self.options.least_gain and not view.seeking:
            undo = self._undo(view, free)
            if undo is not None:
                return undo
        often = self.options.explore_every if relative > self.options.small_gain else self.options.explore_then
        if stage != "seed" and launches % often == often - 1:
            return self._explore(view, free, rng)
        row = int(scores.rows[index])
        why = f"expected to add {relative:.1%} of the hypervolume for {cost:,.0f} GPU-seconds"
        if view.seeking:
            why = f"no point keeps the bounds yet, this one does with {relative:.0%} for {cost:,.0f} GPU-seconds"
        why = {"seed": f"on the estimated front: {why}", "refine": f"beside the front: {why}"}.get(stage, why)
        if scores.cause is not None and scores.runs[index] < 0.9:
            why += f"; {1 - scores.runs[index]:.0%} that it fails"
        chosen = tuple(self.ladder[i] for i in sorted(loads))
        return Suggestion(self.candidates.members[row], chosen, stage, why, relative, cost)

    def _undo(self, view: _View, free: IntArray) -> Suggestion | None:
        """A simplest configuration of the front, without one more of its overrides."""
        open_ = set(free.tolist())
        if view.seeking:
            return None
        for row in self._front_rows(view):
            kept = self._simplest(view, row)
            for simpler in self.candidates.simpler(self.candidates.members[kept]):
                if simpler in open_ and simpler not in view.tried:
                    loads = sorted({int(i) for r, i in zip(view.rows, view.loads, strict=True) if r == kept})
                    what = _difference(self.candidates.members[kept], self.candidates.members[simpler])
                    return Suggestion(
                        self.candidates.members[simpler], tuple(self.ladder[i] for i in loads), "undo",
                        f"a front point without {what}: kept if it ties",
                    )  # fmt: skip
        return None

    # ------------------------------------------------------------ history as arrays

    def _view(self, history: Sequence[Tried], pending: Sequence[Params]) -> _View:
        sums: dict[tuple[int, int], list[Values]] = {}
        tried: dict[int, str | None] = {}
        asked: dict[int, set[int]] = {}
        startups: list[float] = []
        seconds: dict[int, list[float]] = {}
        lacking: Counter[str] = Counter()
        complete: Counter[str] = Counter()
        for launch in history:
            row = self.candidates.row(launch.params)
            tried[row] = launch.cause
            if launch.startup_s is not None and launch.cause is None:
                startups.append(launch.startup_s)
            for label, values in launch.points.items():
                if label in self._labels:
                    load = self._labels.index(label)
                    asked.setdefault(row, set()).add(load)
                    if values is not None:
                        sums.setdefault((row, load), []).append(values)
            lacking.update(launch.lacking)
            complete.update(label for label, values in launch.points.items() if values is not None)
            for label, value in launch.load_s.items():
                if label in self._labels:
                    seconds.setdefault(self._labels.index(label), []).append(value)
        every = [s for values in seconds.values() for s in values]
        usual = float(np.mean(every)) if every else _LOAD_S
        load_s = np.array([float(np.mean(seconds.get(i, [usual]))) for i in range(len(self.ladder))])
        yields = np.array([(complete[n] + 0.5) / (complete[n] + lacking[n] + 0.5) for n in self._labels])
        keys = list(sums)
        totals = np.array([[sum(column) for column in zip(*sums[k], strict=True)] for k in keys])
        counts = np.array([len(sums[k]) for k in keys])
        means = totals.reshape(len(keys), len(self.metrics)) / counts[:, None]
        signs = np.array(self._signs)
        return _View(
            np.array([k[0] for k in keys], dtype=np.int64),
            np.array([k[1] for k in keys], dtype=np.int64),
            means,
            (signs * means <= signs * self._bounds).all(axis=1),
            tried,
            asked,
            float(np.mean(startups)) if startups else _STARTUP_S,
            load_s,
            yields / yields.max(),  # what is lacking everywhere tells nothing of one load
            [self.candidates.row(params) for params in pending],
        )

    def _guess_all(self) -> None:
        """Ask the estimator about members it has not been asked about."""
        new = self.candidates.members[len(self._guessed) :]
        tables = np.full((len(new), len(self.ladder), len(self.metrics)), np.nan)
        for params, table in zip(new, tables, strict=True):
            guesses = [None if self._prior is None else self._prior(params, load) for load in self.ladder]
            for i, guess in enumerate(guesses):
                if guess is not None:
                    table[i, : len(guess.values)] = [np.nan if v is None else v for v in guess.values]
            self._fits.append(not any(g is not None and g.fits is False for g in guesses))
            self._devices.append(self._devices_of(params))
            for j, kind_of in self._shared.items():
                self._kinds[j].append(kind_of(params))
        if len(new):
            self._guessed = np.concatenate([self._guessed, tables])

    @property
    def _has_prior(self) -> bool:
        return bool(np.isfinite(self._guessed).any())

    def _free(self, view: _View) -> IntArray:
        """Rows with a load nobody asked for yet, of those that may run; the estimator's refusals only at the end."""
        busy = set(view.pending)
        rows = [
            row for row in range(len(self.candidates))
            if row not in busy and view.tried.get(row) is None and len(view.asked.get(row, ())) < len(self.ladder)
        ]  # fmt: skip
        fitting = [row for row in rows if self._fits[row]] if len(self._fits) == len(self.candidates) else rows
        return np.array(fitting or rows, dtype=np.int64)

    def _front_rows(self, view: _View) -> list[int]:
        if not len(view.values):
            return []
        scale = Scale.of(self._signs, view.values)
        values = scale.forward(view.values)
        if view.seeking:
            return [int(view.rows[int(_misses(values, scale.forward(self._bounds)).argmin())])]
        return list(dict.fromkeys(view.rows[view.kept][nondominated(self._of_objectives(values[view.kept]))].tolist()))

    def _of_objectives(self, values: FloatArray) -> FloatArray:
        """(..., metrics) -> (..., objectives)"""
        return values[..., : len(self.objectives)]

    def _near_front(self, view: _View, among: IntArray) -> IntArray:
        near = {r for row in self._front_rows(view) for r in self.candidates.neighbours(self.candidates.members[row])}
        return np.array([row for row in among if row in near], dtype=np.int64)

    def _simplest(self, view: _View, row: int) -> int:
        """The simplest measured configuration that ties with this one at every load both were measured at."""
        current = row
        while True:
            ties = [
                r for r in self.candidates.simpler(self.candidates.members[current])
                if r in view.tried and _tie(view, r, row, len(self.objectives))
            ]  # fmt: skip
            if not ties:
                return current
            current = min(ties, key=lambda r: self.candidates.overrides(self.candidates.members[r]))

    # ------------------------------------------------------------ model and gain

    def _runs(self, view: _View, rows: IntArray) -> tuple[FloatArray, str | None]:
        """P(it runs) of each row, and the most frequent cause of failure so far."""
        elsewhere = {row: e for row, e in self._evidence.items() if row not in view.tried}
        causes = [*view.tried.values(), *(e.cause for e in elsewhere.values())]
        if not causes:
            return np.full(len(rows), 0.95), None
        seen = np.array([*view.tried, *elsewhere], dtype=np.int64)
        strength = np.array([*(1.0 for _ in view.tried), *(1.0 if e.same else ELSEWHERE for e in elsewhere.values())])
        facts = strength == 1.0
        codes, tables = self.candidates.codes, self._tables[LENGTH]
        model = fit_feasibility(basis(tables, codes[seen], codes[seen]), causes, strength)
        runs = model.runs(basis(tables, codes[rows], codes[seen]))
        failed = np.array([cause is not None for cause in causes])
        suspect = suspicion(codes[rows], codes[seen], failed, strength)
        known = suspect if facts.all() else suspicion(codes[rows], codes[seen[facts]], failed[facts])
        runs = np.where(known >= CONVICTED, 0.0, np.minimum(runs, 1.0 - suspect))
        return runs, (model.causes[0] if model.causes else None)

    def _score(self, view: _View, free: IntArray, rng: np.random.Generator) -> _Scores:
        """Predictions for a shortlist: the best by a coarse look at all, neighbours of the front, some at random."""
        for row in self._front_rows(view):
            self.candidates.neighbours(self.candidates.members[row])
        if len(self._guessed) < len(self.candidates):
            self._guess_all()
            free = self._free(view)
        known = np.concatenate([view.values, self._guessed.reshape(-1, len(self.metrics))])
        scale = Scale.of(self._signs, known)
        measured, prior, bounds = map(scale.forward, (view.values, self._guessed, self._bounds))
        fits, used = self._fit(view, measured, prior, bounds)
        means = self._predict(view, used, fits, free, prior, bounds, errors=False)[0]
        usual = np.full_like(means, _USUAL_ERROR)
        self._share(view, measured, free, means, usual)
        pending = np.array(view.pending, dtype=np.int64)
        promised = self._predict(view, used, fits, pending, prior, bounds, errors=False)[0]
        self._share(view, measured, pending, promised, np.empty_like(promised))
        expected = _flat(promised)
        places = self._places(view, measured, expected, _flat(means), bounds, int(rng.integers(2**31)))
        runs, cause = self._runs(view, free)
        self._hide_asked(view, free, means)
        coarse, _ = self._keeps(view, means, usual, bounds)
        if not view.seeking:
            coarse *= load_gains(places, self._of_objectives(means), self._of_objectives(usual), coarse=True)
        rate = runs * (coarse / view.load_s).max(axis=1) / np.array(self._devices)[free]
        near = set(self._near_front(view, free).tolist())
        order = np.argsort(-rate)
        picked = dict.fromkeys([*order[:_SHORTLIST].tolist(), *(i for i, r in enumerate(free.tolist()) if r in near)])
        picked |= dict.fromkeys(rng.permutation(len(free))[:_RANDOM].tolist())
        index = np.array(list(picked), dtype=np.int64)
        rows = free[index]
        mean, deviation = self._predict(view, used, fits, rows, prior, bounds, errors=True)
        deviation = np.maximum(deviation, _LEAST_ERROR)
        self._share(view, measured, rows, mean, deviation)
        self._hide_asked(view, rows, mean)
        keeps, likeliest = self._keeps(view, mean, deviation, bounds)
        if view.seeking:
            # One place, which a point covers by keeping the bounds: its weight makes of shares probabilities.
            places = replace(places, at=places.at[:1], weight=likeliest, dominated=1.0)
        mean, deviation = self._of_objectives(mean), self._of_objectives(deviation)
        return _Scores(rows, mean, deviation, keeps, runs[index], places, cause, view.seeking)

    def _places(
        self,
        view: _View,
        measured: FloatArray,
        expected: FloatArray,
        predicted: FloatArray,
        bounds: FloatArray,
        seed: int,
    ) -> Places:
        """Where the front may grow, within the bounds: beyond what is measured and what pending launches promise."""
        probable = _kept_with(expected, bounds) >= _PROBABLE
        known = self._of_objectives(np.concatenate([measured[view.kept], expected[probable]]))
        front = known[nondominated(known)] if len(known) else known
        likely = _kept_with(predicted, bounds) >= _WITHIN_REACH
        reach = self._of_objectives(predicted[likely] if likely.any() else predicted)
        every = self._of_objectives(np.concatenate([predicted, measured]))
        limits = self._of_objectives(bounds)
        worst = np.maximum(np.minimum(every.max(axis=0), limits), np.concatenate([reach, front]).min(axis=0))
        places = draw_places(front, reach - _REACH, worst, seed)
        return replace(places, at=np.minimum(places.at, limits))

    def _keeps(
        self, view: _View, mean: FloatArray, deviation: FloatArray, bounds: FloatArray
    ) -> tuple[FloatArray, float]:
        """(P(the bounds on no objective are kept and it has all values), 1) of each load, (configs, loads); 0 where it
        is not to be asked.

        While seeking: of all bounds, as a share of the likeliest; and the probability of that one.
        """
        first = 0 if view.seeking else len(self.objectives)
        kept = log_kept(mean[..., first:], deviation[..., first:], bounds[first:])
        kept = np.where(np.isfinite(mean).all(axis=-1), kept, -np.inf)
        top = float(kept.max()) if view.seeking else 0.0
        result: FloatArray = np.exp(kept - top) * view.yields
        return result, float(np.exp(top))

    def _fit(
        self, view: _View, measured: FloatArray, prior: FloatArray, bounds: FloatArray
    ) -> tuple[list[Fit], IntArray]:
        """One process per metric, on the measured points that matter most."""
        if not len(measured):
            return [], np.zeros(0, dtype=np.int64)
        used = _relevant(self._of_objectives(measured), _misses(measured, bounds))
        codes = self.candidates.codes[view.rows[used]]
        loads = view.loads[used]
        bases = {
            length: basis(self._tables[length], codes, codes, self._load_likeness[length][np.ix_(loads, loads)])
            for length in LENGTHS
        }
        fits = []
        for j in range(len(self.metrics)):
            known = prior[view.rows[used], loads, j]
            fits.append(fit(bases, measured[used, j], known if np.isfinite(known).any() else None))
        return fits, used

    def _predict(
        self, view: _View, used: IntArray, fits: Sequence[Fit], rows: IntArray, prior: FloatArray, bounds: FloatArray,
        *, errors: bool,
    ) -> tuple[FloatArray, FloatArray]:  # fmt: skip
        """(mean, deviation), each (rows, loads, metrics). Deviations are NaN without errors, which are most of it."""
        if not fits:
            mean, unknown = prior[rows].copy(), np.isnan(prior[rows])
            rows_known = prior.reshape(-1, prior.shape[-1])
            counts = np.isfinite(rows_known).sum(axis=0)  # 0: nobody knows this metric yet, so it separates nothing
            at_its_bound = np.where(np.abs(bounds) < _NO_BOUND, bounds, 0.0)
            usual = np.where(counts > 0, np.nansum(rows_known, axis=0) / np.maximum(counts, 1), at_its_bound)
            mean[unknown] = np.broadcast_to(usual, mean.shape)[unknown]
            return mean, np.where(unknown, _NO_PRIOR_ERROR, _PRIOR_ERROR)
        codes = self.candidates.codes
        mean = np.empty((len(rows), len(self.ladder), len(self.metrics)))
        deviation = np.full_like(mean, np.nan)
        columns, loads = codes[view.rows[used]], view.loads[used]
        alike = {length: basis(self._tables[length], codes[rows], columns) for length in {f.length for f in fits}}
        dimensions = len(self.space.params)
        for j, process in enumerate(fits):
            found, near = alike[process.length], self._load_likeness[process.length][:, loads]
            if not errors:
                mean[:, :, j] = process.means(found, dimensions, near, prior[rows, :, j])
                continue
            for i in range(len(self.ladder)):
                at_load = Basis((found.mean * dimensions + near[i]) / (dimensions + 1), found.product * near[i])
                mean[:, i, j], deviation[:, i, j] = process.predict(at_load, prior[rows, i, j])
        return mean, deviation

    def _share(
        self, view: _View, measured: FloatArray, rows: IntArray, mean: FloatArray, deviation: FloatArray
    ) -> None:
        """What others of the same kind measured is not predicted: put it into mean and deviation of the rows."""
        for j, kinds in self._kinds.items():
            known = {kinds[row]: value for row, value in zip(view.rows, measured[:, j].tolist(), strict=True)}
            for place, row in enumerate(rows.tolist()):
                if kinds[row] in known:
                    mean[place, :, j] = known[kinds[row]]
                    deviation[place, :, j] = _EXACT

    def _hide_asked(self, view: _View, rows: IntArray, mean: FloatArray) -> None:
        for place, row in enumerate(rows.tolist()):
            for load in view.asked.get(row, ()):
                mean[place, load] = np.nan

    def _choose(self, view: _View, scores: _Scores, among: IntArray) -> tuple[int, float, float, list[int]]:
        """(index into scores, gain, GPU-seconds, loads) of the largest expected gain per GPU-second.

        A server that is up measures every further load that gains more per second than the best other launch would.
        """
        indices = np.flatnonzero(np.isin(scores.rows, among))
        chances = np.stack([
            chance(scores.places.at, scores.mean[indices, i], scores.deviation[indices, i])
            for i in range(len(self.ladder))
        ], axis=1)  # fmt: skip
        if scores.seeking:
            chances = np.where(np.isfinite(chances), 1.0, np.nan)
        chances = chances * scores.keeps[indices][:, :, None]
        devices = np.array(self._devices)[scores.rows[indices]]
        alone = np.nan_to_num(chances.sum(axis=2)) / (view.startup_s + view.load_s)
        close = np.argsort(-scores.runs[indices] * alone.max(axis=1) / devices)[:_CLOSELY].tolist()

        def rate_of(place: int, covered: FloatArray) -> tuple[float, list[int]]:
            width = int(devices[place])
            open_ = np.maximum(chances[place] - covered, 0.0)
            places, cost, loads = best_loads(open_, width * view.startup_s, width * view.load_s)
            return float(scores.runs[indices[place]]) * places / cost, loads

        nothing = np.zeros(chances.shape[2])
        rates = {place: rate_of(place, nothing) for place in close}
        best = max(close, key=lambda place: rates[place][0])
        chosen = rates[best][1]
        covered = chances[best, chosen].max(axis=0)
        runs, width = float(scores.runs[indices[best]]), int(devices[best])
        others = 0.0
        for place in sorted((p for p in close if p != best), key=lambda place: -rates[place][0]):
            if rates[place][0] <= others:
                break  # what is covered already only takes from a rate
            others = max(others, rate_of(place, covered)[0])
        chosen, covered = more_loads(chances[best], chosen, others / max(runs, 1e-9), width * view.load_s)
        cost = width * (view.startup_s + float(view.load_s[chosen].sum()))
        return int(indices[best]), float(covered.sum()) * scores.places.weight * runs, cost, chosen

    def _relative(self, scores: _Scores, gain: float) -> float:
        return gain / max(scores.places.dominated, 0.02 * scores.places.box)


def _tie(view: _View, a: int, b: int, objectives: int) -> bool:
    """Whether a differs from b by no more than _TIE of the value, in any objective, at every load of b that counts."""
    values = view.values[:, :objectives]
    own = {int(i): v for r, i, v, k in zip(view.rows, view.loads, values, view.kept, strict=True) if r == a and k}
    others = {int(i): v for r, i, v, k in zip(view.rows, view.loads, values, view.kept, strict=True) if r == b and k}
    return all(i in own and bool((np.abs(own[i] - v) <= _TIE * np.abs(v)).all()) for i, v in others.items())


def _misses(values: FloatArray, bounds: FloatArray) -> FloatArray:
    """How far each point is outside all bounds together, (n,). values: (n, metrics), on the model's scale."""
    result: FloatArray = np.maximum(values - bounds, 0.0).sum(axis=1)
    return result


def _kept_with(values: FloatArray, bounds: FloatArray) -> FloatArray:
    """P(the bounds are kept) of predicted points, (n,), with the usual error."""
    result: FloatArray = np.exp(log_kept(values, np.full_like(values, _USUAL_ERROR), bounds))
    return result


def _difference(params: Mapping[str, object], simpler: Mapping[str, object]) -> str:
    return ", ".join(f"{k}={v}" for k, v in params.items() if simpler.get(k, k) != v) or "one override"


def _relevant(measured: FloatArray, misses: FloatArray) -> IntArray:
    """Which measured points a model is fitted on: all, or those nearest the front and an even share of the others.

    measured: (n, objectives); misses: (n,), how far each is outside the bounds, which is far from the front, too.
    """
    n = len(measured)
    if n <= MAX_ROWS:
        return np.arange(n)
    inside = measured[misses <= 0.0]
    front = inside[nondominated(inside)] if len(inside) else inside
    behind = np.array([(row - front).max(axis=1).min(initial=np.inf) if len(front) else 0.0 for row in measured])
    order = np.argsort(np.maximum(behind, misses))
    close, rest = order[: 2 * MAX_ROWS // 3], order[2 * MAX_ROWS // 3 :]
    return np.concatenate([close, rest[:: max(1, -(-len(rest) // (MAX_ROWS - len(close))))]])


def _flat(values: FloatArray) -> FloatArray:
    """(configs, loads, objectives) -> the rows in which every objective is known."""
    rows = values.reshape(-1, values.shape[-1])
    known: FloatArray = rows[np.isfinite(rows).all(axis=1)]
    return known


__all__ = ["Guess", "Options", "Prior", "Search", "Suggestion", "key_of"]
