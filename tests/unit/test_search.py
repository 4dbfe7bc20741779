"""The search on spaces small enough to know everything about."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config import HardwareConfig, ModelConfig, SpaceConfig
from sweep.measure.workload import Load
from sweep.results.front import nondominated
from sweep.search import Constraint, Evidence, Guess, Options, Search, Tried
from sweep.search.candidates import Candidates, key_of
from sweep.search.feasibility import ELSEWHERE, fit_feasibility, suspicion
from sweep.search.gain import best_loads, chance, draw_places, log_kept, more_loads
from sweep.search.history import Scale
from sweep.search.model import LENGTHS, _evidences, basis, fit
from sweep.space.search_space import Params, SearchSpace, make_search_space

OBJECTIVES = ("cost_usd_per_mtok", "tpot_p50_ms")
LADDER = (Load(64), Load(8), Load(1))
PARAMS = {
    "max_num_seqs": {"choices": [None, 16, 32, 64, 128, 256]},
    "kv_cache_dtype": {"choices": [None, "fp8"]},
    "quantization": {"choices": [None, "fp8"]},
    "max_num_batched_tokens": {"choices": [None, 1024, 2048, 4096, 8192]},
}


def make_space(params=PARAMS, constraints=()) -> SearchSpace:
    hardware = HardwareConfig(name="h100", devices=8, memory_gib=80.0)
    return make_search_space(SpaceConfig("test", dict(params), list(constraints)), ModelConfig(name="m"), hardware)


def truth(params: Params, load: Load) -> tuple[float, float]:
    """Cost and TPOT with effects of single knobs and of one pair."""
    seqs = int(params.get("max_num_seqs") or 512)
    tokens = int(params.get("max_num_batched_tokens") or 16384)
    step = 10.0 * (1.0 + load.concurrency / 32) * (0.6 if params.get("quantization") == "fp8" else 1.0)
    step *= 1.0 + 0.2 * abs(math.log2(tokens / 2048)) / 3
    step *= 0.8 if params.get("kv_cache_dtype") == "fp8" and seqs >= 128 else 1.0
    return step / min(load.concurrency, seqs), step


def launch(params: Params, loads=LADDER, crashes=lambda _: False) -> Tried:
    if crashes(params):
        return Tried(params, {load.label: None for load in loads}, "out_of_memory", 1, 20.0)
    points = {load.label: truth(params, load) for load in loads}
    return Tried(params, points, None, 1, 60.0, {load.label: 30.0 for load in loads})


def prior(factor: float = 1.3, power: float = 1.0):
    return lambda params, load: Guess(tuple(factor * v**power for v in truth(params, load)))


def search(space=None, guess=None, **options) -> Search:
    return Search(space or make_space(), LADDER, OBJECTIVES, guess, 3, options=Options(**options))


def explore(s: Search, launches: int, crashes=lambda _: False) -> list[Tried]:
    history: list[Tried] = []
    for _ in range(launches):
        suggestion = s.ask(history)
        if suggestion is None:
            break
        history.append(launch(suggestion.params, suggestion.loads, crashes))
    return history


def share(history: list[Tried], space: SearchSpace | None = None) -> float:
    import moocore

    everything = np.log([truth(p, load) for p in (space or make_space()).enumerate() for load in LADDER])
    found = np.log([v for t in history for v in t.points.values() if v is not None])
    worst = everything.max(axis=0) + 0.1
    return float(moocore.hypervolume(found, ref=worst) / moocore.hypervolume(everything, ref=worst))


def gpu_seconds(history: list[Tried]) -> float:
    return sum(t.devices * ((t.startup_s or 0.0) + sum(t.load_s.values())) for t in history)


def random_history(gpu_s: float, seed: int) -> list[Tried]:
    members = list(make_space().enumerate())
    history: list[Tried] = []
    for index in np.random.default_rng(seed).permutation(len(members)):
        history.append(launch(members[index]))
        if gpu_seconds(history) >= gpu_s:
            return history
    return history


def test_the_first_suggestion_is_the_default_at_every_load():
    first = search(guess=prior()).ask([])
    assert first is not None
    assert set(first.params.values()) == {None}
    assert first.loads == LADDER
    assert first.why == "vLLM's defaults"


def test_an_objective_that_nobody_estimates_leaves_the_choice_to_the_others():
    """quality_kl is in no kernel table: until something is measured it separates nothing."""
    fast = prior()
    s = Search(
        make_space(), LADDER, (*OBJECTIVES, "quality_kl"), lambda p, load: Guess((*fast(p, load).values, None)), 3
    )
    first = s.ask([])
    assert first is not None and first.stage == "seed"
    second = s.ask([], [first.params])
    assert second is not None and second.params != first.params and second.gain is not None and second.gain > 0


def test_the_same_history_gives_the_same_suggestion_in_a_new_process():
    history = explore(search(guess=prior()), 6)
    assert search(guess=prior()).ask(history) == search(guess=prior()).ask(history)


def test_nothing_is_asked_twice_and_the_space_ends():
    space = make_space({k: PARAMS[k] for k in ("kv_cache_dtype", "quantization")})
    s = search(space)
    history = explore(s, 40)
    asked = [(key_of(t.params), label) for t in history for label in t.points]
    assert len(asked) == len(set(asked)) == 4 * len(LADDER)
    assert s.ask(history) is None
    assert s.stop(history) == "every configuration was launched"


def test_what_is_pending_is_not_suggested():
    s = search(guess=prior())
    history = explore(s, 5)
    pending: list[Params] = []
    for _ in range(4):
        suggestion = s.ask(history, pending)
        assert suggestion is not None
        assert suggestion.params not in pending
        pending.append(suggestion.params)


def test_rules_are_never_launched():
    space = make_space(constraints=["kv_cache_dtype != 'fp8'"])
    history = explore(search(space, prior()), 15)
    assert all(t.params["kv_cache_dtype"] is None for t in history)


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("right", prior()),
        ("no estimator", None),
        ("says the opposite", prior(100.0, -1.0)),
        ("says nothing", lambda *_: Guess((1.0, 1.0))),
    ],
)
def test_it_beats_random_whatever_the_estimator_says(name, guess):
    history = explore(search(guess=guess), 14)
    spent = gpu_seconds(history)
    by_chance = np.mean([share(random_history(spent, seed)) for seed in range(10)])
    assert share(history) >= by_chance - 0.01
    if name == "right":
        assert share(history) > 0.97


def test_regions_that_crash_are_left_alone():
    def crashes(params: Params) -> bool:
        return params["kv_cache_dtype"] == "fp8" and params["quantization"] == "fp8"

    history = explore(search(guess=prior()), 20, crashes)
    assert sum(t.cause is not None for t in history) <= 4
    seen = basis(
        (c := Candidates(make_space(), 0)).likeness(0.35),
        c.codes[[c.row(t.params) for t in history]],
        c.codes[[c.row(t.params) for t in history]],
    )
    model = fit_feasibility(seen, [t.cause for t in history])
    runs = model.runs(seen)
    assert all(r < 0.5 for r, t in zip(runs, history, strict=True) if t.cause)
    assert all(r > 0.5 for r, t in zip(runs, history, strict=True) if not t.cause)


def test_failures_of_an_earlier_study_are_avoided_with_the_same_engine_and_put_off_with_another():
    def crashes(params: Params) -> bool:
        return params["kv_cache_dtype"] == "fp8" and params["quantization"] == "fp8"

    members = list(make_space().enumerate())
    rng = np.random.default_rng(0)
    seen = [members[i] for i in rng.permutation(len(members))[:24]]

    def crashed(same: bool | None) -> list[int]:
        s = search(guess=prior())
        if same is not None:
            s.learn([Evidence(p, "unsupported" if crashes(p) else None, same) for p in seen])
        return [i for i, t in enumerate(explore(s, 12, crashes)) if t.cause is not None]

    assert not crashed(True)
    assert crashed(False)[0] > crashed(None)[0]  # put off, and then found out here

    # Another vLLM mended it: the region is looked at in the end, and then believed.
    s = search(guess=prior())
    s.learn([Evidence(p, "unsupported" if crashes(p) else None, False) for p in members])
    assert any(crashes(t.params) for t in explore(s, 30))


def test_what_happened_elsewhere_is_half_a_failure_and_gives_way_to_a_launch_of_our_own():
    c = Candidates(make_space(), 0)
    rows = c.codes[:1]
    itself = basis(c.likeness(0.35), rows, rows)
    here = fit_feasibility(itself, ["unsupported"], np.array([1.0])).runs(itself)[0]
    elsewhere = fit_feasibility(itself, ["unsupported"], np.array([ELSEWHERE])).runs(itself)[0]
    assert here < 0.1 < 0.3 < elsewhere < 0.7
    failed = np.array([True])
    assert suspicion(rows, rows, failed, np.array([ELSEWHERE]))[0] < suspicion(rows, rows, failed)[0]
    s = search(guess=prior())
    s.learn([Evidence(c.members[0], "unsupported", True)])
    assert s._runs(s._view([], []), np.array([0]))[0][0] < 0.1
    assert s._runs(s._view([launch(c.members[0])], []), np.array([0]))[0][0] > 0.9


def test_it_stops_and_says_why():
    s = search(guess=prior(), least_gain=0.01)
    history: list[Tried] = []
    while (reason := s.stop(history)) is None:
        suggestion = s.ask(history)
        assert suggestion is not None
        history.append(launch(suggestion.params, suggestion.loads))
    assert "1.0% of the hypervolume" in reason
    assert len(history) < 60
    assert share(history) > 0.95


def test_an_override_that_changes_nothing_is_undone():
    space = make_space({"quantization": {"choices": [None, "fp8"]}, "block_size": {"choices": [None, 32]}})

    s = search(space)
    history = [launch({"quantization": None, "block_size": None}), launch({"quantization": "fp8", "block_size": 32})]
    first = s.undo(history)
    assert first is not None
    assert first.stage == "undo"
    assert first.why == "a front point without quantization=fp8: kept if it ties"
    history.append(launch(first.params))
    second = s.undo(history)
    assert second is not None
    assert second.params == {"quantization": "fp8", "block_size": None}
    history.append(launch({"quantization": "fp8", "block_size": None}))
    assert {"quantization": "fp8", "block_size": None} in s.kept(history).values()
    assert {"quantization": "fp8", "block_size": 32} not in s.kept(history).values()


# ---------------------------------------------------------------- constraints

ITL = Constraint("itl_p99_ms", 20.0)


def itl_p99_ms(params: Params) -> float:
    """What is fastest and cheapest breaks the bound; few batched tokens keep it, fp8 weights never do."""
    tokens = int(params.get("max_num_batched_tokens") or 16384)
    return (tokens / 512) ** 0.5 * 10.0 * (4.0 if params["quantization"] == "fp8" else 1.0)


def bounded(launches: int, guess, constraints) -> list[Tried]:
    s = Search(make_space(), LADDER, OBJECTIVES, guess, 3, constraints=constraints)
    further = len(s.metrics) - len(OBJECTIVES)
    history: list[Tried] = []
    while len(history) < launches and (asked := s.ask(history)) is not None:
        values = {
            load.label: (*truth(asked.params, load), itl_p99_ms(asked.params))[: 2 + further] for load in asked.loads
        }
        history.append(Tried(asked.params, values, None, 1, 60.0, dict.fromkeys(values, 30.0)))
    return history


def keeping(history: list[Tried]) -> list[Tried]:
    return [t for t in history if itl_p99_ms(t.params) <= ITL.bound]


def share_within(history: list[Tried]) -> float:
    import moocore

    members = [p for p in make_space().enumerate() if itl_p99_ms(p) <= ITL.bound]
    everything = np.log([truth(p, load) for p in members for load in LADDER])
    found = np.log([v[:2] for t in keeping(history) for v in t.points.values() if v is not None]).reshape(-1, 2)
    worst = everything.max(axis=0) + 0.1
    return (
        float(moocore.hypervolume(found, ref=worst) / moocore.hypervolume(everything, ref=worst)) if len(found) else 0
    )


@pytest.mark.parametrize("guess", [None, prior()], ids=["no estimator", "an estimator that knows nothing of the bound"])
def test_launches_go_where_the_bounds_can_be_kept(guess):
    """Twelve of sixty configurations keep the bound, and the estimated front lies elsewhere."""
    blind, bound = bounded(16, guess, ()), bounded(16, guess, [ITL])
    assert len(keeping(bound)) >= 2 * len(keeping(blind)) and len(keeping(bound)) >= 8
    assert share_within(bound) > 0.98


def test_with_no_point_within_the_bounds_it_moves_towards_them():
    """One knob misses by ever less: the search follows it, and does not collect what is good otherwise."""
    space = make_space({"max_num_seqs": {"choices": [None, 1024, 512, 256, 128, 64, 32, 16]}, **{
        k: PARAMS[k] for k in ("kv_cache_dtype", "quantization")}})  # fmt: skip
    tight = Constraint("itl_p99_ms", 10.0)

    def launched(params: Params) -> Tried:
        itl = 10.0 * (int(params["max_num_seqs"] or 2048) / 20) ** 0.5
        return Tried(params, {load.label: (*truth(params, load), itl) for load in LADDER}, None, 1, 60.0)

    s = Search(space, LADDER, OBJECTIVES, None, 3, constraints=[tight])
    history = [launched({"max_num_seqs": n, "kv_cache_dtype": None, "quantization": None}) for n in (None, 512, 256)]
    history += [launched({"max_num_seqs": n, "kv_cache_dtype": "fp8", "quantization": "fp8"}) for n in (512, 128)]
    for _ in range(4):
        asked = s.ask(history)
        assert asked is not None and s.stop(history) is None
        assert int(asked.params["max_num_seqs"] or 2048) < 128 or asked.stage == "explore"
        history.append(launched(asked.params))
        if asked.params["max_num_seqs"] == 16:
            break
        assert "no point keeps the bounds yet" in asked.why or asked.stage == "explore"
    assert history[-1].params["max_num_seqs"] == 16


def test_a_bound_that_nothing_keeps_is_given_up_late_and_said():
    space = make_space({"max_num_seqs": {"choices": [None, *range(8, 72)]}})
    s = Search(space, LADDER, OBJECTIVES, None, 3, constraints=[Constraint("itl_p99_ms", 1e-3)])
    history = [
        Tried(p, {load.label: (*truth(p, load), 50.0) for load in LADDER}, None, 1, 60.0)
        for p in itertools.islice(space.enumerate(), 40)
    ]
    assert s.stop(history[:20]) is None
    assert "no point keeps the bounds" in (s.stop(history) or "")


def test_a_point_that_breaks_a_bound_is_no_front_and_hides_no_gain():
    good = {"max_num_seqs": None, "kv_cache_dtype": None, "quantization": None, "max_num_batched_tokens": 1024}
    broken = {**good, "quantization": "fp8"}
    values = {load.label: (*truth(good, load), 14.0) for load in LADDER}
    better = {label: (v[0] / 50, v[1] / 50, 56.0) for label, v in values.items()}
    s = Search(make_space(), LADDER, OBJECTIVES, prior(1.0), 3, constraints=[ITL])
    others = [Tried({**good, "max_num_seqs": n}, values) for n in (16, 32)]
    with_it = [*others, Tried(good, values), Tried(broken, better)]
    assert str(good) in s.kept(with_it) and str(broken) not in s.kept(with_it)
    default = dict.fromkeys(PARAMS)
    asked = s.ask(with_it, [default])
    assert asked is not None and asked.gain is not None and asked.gain > 0.01
    unbounded = [Tried(t.params, {k: v[:2] for k, v in t.points.items() if v}) for t in with_it]
    hidden = search(guess=prior(1.0)).ask(unbounded, [default])
    assert hidden is not None and hidden.gain is not None and hidden.gain < asked.gain / 3


def test_a_bound_on_an_objective_ends_its_hypervolume():
    bound = Constraint("tpot_p50_ms", 7.0)
    s = Search(make_space(), LADDER, OBJECTIVES, prior(), 3, constraints=[bound])
    history: list[Tried] = []
    for _ in range(12):
        asked = s.ask(history)
        assert asked is not None
        history.append(launch(asked.params, asked.loads))
    plain = explore(search(guess=prior()), 12)

    def broken(tried: list[Tried]) -> float:
        values = [v for t in tried[4:] for v in t.points.values() if v is not None]
        return float(np.mean([v[1] > bound.bound for v in values]))

    assert s.metrics == OBJECTIVES
    assert broken(history) < broken(plain)


@given(st.lists(st.floats(-40, 40), min_size=2, max_size=6))
def test_the_logarithm_of_keeping_a_bound_is_that_of_the_normal(xs):
    found = log_kept(np.zeros((len(xs), 1)), np.ones((len(xs), 1)), np.array([0.0]) + np.array(xs)[:, None])
    for x, value in zip(xs, found, strict=True):
        if x > -37:
            assert value == pytest.approx(math.log(math.erfc(-x / math.sqrt(2)) / 2), abs=0.02)
    assert log_kept(np.zeros((1, 1)), np.ones((1, 1)), np.array([np.inf])) == [0.0]
    assert log_kept(np.full((1, 1), 900.0), np.ones((1, 1)), np.zeros(1)) > -np.inf


def test_neighbours_differ_in_one_dimension():
    candidates = Candidates(make_space(), 0)
    own = candidates.members[7]
    for row in candidates.neighbours(own):
        assert sum(candidates.members[row][name] != own[name] for name in own) == 1
    assert len(candidates.neighbours(own)) == 5 + 1 + 1 + 4


def test_a_large_space_is_drawn_from():
    params = {f"knob{i}": {"choices": list(range(10))} for i in range(6)}
    params["share"] = {"low": 0.1, "high": 0.9}
    candidates = Candidates(make_space(params), 0, limit=200)
    assert len(candidates) == 200
    assert not candidates.complete
    assert len({key_of(m) for m in candidates.members}) == 200


@given(st.lists(st.sampled_from([None, 1, 2, 4, 8, "a", "b", True]), min_size=2, max_size=7, unique_by=repr))
def test_likeness_is_semidefinite_with_ones_on_its_diagonal(choices):
    for table in Candidates(make_space({"knob": {"choices": choices}}), 0).likeness(0.35):
        assert np.allclose(np.diag(table), 1.0)
        assert np.linalg.eigvalsh(table).min() > -1e-9


def test_the_model_corrects_a_biased_estimate_and_drops_a_useless_one():
    space = make_space()
    candidates = Candidates(space, 0)
    values = np.log([truth(m, LADDER[0])[0] for m in candidates.members])
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(values))[:40]
    rest = np.setdiff1d(np.arange(len(values)), rows)
    codes = candidates.codes
    among = {n: basis(candidates.likeness(n), codes[rows], codes[rows]) for n in LENGTHS}
    for estimate, used in ((values + 0.5, True), (rng.normal(size=len(values)), False)):
        process = fit(among, values[rows], estimate[rows])
        found = basis(candidates.likeness(process.length), codes[rest], codes[rows])
        mean, deviation = process.predict(found, estimate[rest])
        error = np.abs(mean - values[rest])
        assert error.mean() < (0.02 if used else 0.15)
        assert (error < 4 * deviation + 0.02).mean() > 0.9


@given(seed=st.integers(0, 100), n=st.integers(2, 30), kind=st.sampled_from(["none", "residual", "slope"]))
def test_means_at_every_load_are_those_of_the_full_prediction(seed, n, kind):
    rng = np.random.default_rng(seed)
    candidates = Candidates(make_space(), 0)
    rows, loads = rng.integers(len(candidates), size=n), rng.integers(3, size=n)
    near = {length: np.exp(-np.abs(np.subtract.outer(np.arange(3), np.arange(3))) / length) for length in LENGTHS}
    estimate = rng.normal(size=(len(candidates), 3))
    values = {"none": rng.normal(size=n), "residual": estimate[rows, loads] + 0.3, "slope": 3.0 * estimate[rows, loads]}
    codes, tables = candidates.codes, {length: candidates.likeness(length) for length in LENGTHS}
    among = {i: basis(tables[i], codes[rows], codes[rows], near[i][np.ix_(loads, loads)]) for i in LENGTHS}
    process = fit(among, values[kind], None if kind == "none" else estimate[rows, loads])
    found = basis(tables[process.length], codes, codes[rows])
    at_once = process.means(found, len(tables[process.length]), near[process.length][:, loads], estimate)
    for load in range(3):
        alike = np.tile(near[process.length][load, loads], (len(codes), 1))
        alone = process.predict(basis(tables[process.length], codes, codes[rows], alike), estimate[:, load])[0]
        assert np.allclose(at_once[:, load], alone, atol=1e-8)


@given(seed=st.integers(0, 100), n=st.integers(1, 12))
def test_evidence_is_the_log_density_of_the_measurements(seed, n):
    rng = np.random.default_rng(seed)
    root, target, noises = rng.normal(size=(n, n)), 5.0 * rng.normal(size=n), np.array([0.02, 0.07])
    kernel = root @ root.T
    left = target - target.mean()
    for noise, found in zip(noises, _evidences(np.stack([kernel, kernel]), noises, target), strict=True):
        covariance = kernel + (noise**2 + 1e-9) * np.eye(n)
        expected = -0.5 * left @ np.linalg.solve(covariance, left) - 0.5 * np.linalg.slogdet(covariance)[1]
        assert math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)


def quality_of(params: Params) -> float:
    return 0.02 if params.get("kv_cache_dtype") == "fp8" else 0.001


def test_what_a_kind_shares_is_not_expected_to_differ():
    """A quality known to tie with the front's is no gain: the search ends, where it went on for hours."""
    space = make_space()
    members = [m for m in (dict(p) for p in space.enumerate()) if not space.violations(m)]

    def launch(params: Params) -> Tried:
        points = {load.label: (*truth(params, load), quality_of(params)) for load in LADDER}
        return Tried(params, points, None, 1, 60.0, {load.label: 30.0 for load in LADDER})

    history = [launch(m) for m in members[:20]]
    shared = {"quality_kl": lambda params: params.get("kv_cache_dtype")}
    search = Search(space, LADDER, (*OBJECTIVES, "quality_kl"), seed=1, shared=shared)
    view = search._view(history, ())
    search._guess_all()
    scores = search._score(view, search._free(view), np.random.default_rng(0))
    for row, mean, deviation in zip(scores.rows, scores.mean[:, :, 2], scores.deviation[:, :, 2], strict=True):
        open_ = np.isfinite(mean)
        assert np.allclose(mean[open_], math.log(quality_of(search.candidates.members[row])))
        assert (deviation[open_] < 1e-5).all()


def asked_without_value(lacking: bool) -> int:
    """How many of 24 launches measure the load that never has a value, told of that or not."""
    search, history, asked = Search(make_space(), LADDER, OBJECTIVES, seed=1), [], 0
    for _ in range(24):
        suggestion = search.ask(history)
        labels = [load.label for load in suggestion.loads]
        values = {load.label: truth(suggestion.params, load) for load in suggestion.loads}
        points = {label: None if label == "c1" else values[label] for label in labels}
        without = [label for label in labels if label == "c1"]
        seconds = dict.fromkeys(labels, 30.0)
        history.append(Tried(suggestion.params, points, None, 1, 60.0, seconds, without if lacking else ()))
        asked += len(without)
    return asked


def test_a_load_that_never_has_all_values_is_soon_left_alone():
    """With too few requests for a percentile at one load, a search kept paying for that load."""
    assert 1 <= asked_without_value(lacking=True) <= 0.5 * asked_without_value(lacking=False)


@given(st.integers(2, 3), st.integers(0, 50))
def test_the_gain_of_a_certain_point_is_its_hypervolume_improvement(objectives, seed):
    import moocore

    rng = np.random.default_rng(seed)
    measured = rng.random((6, objectives))
    front = measured[nondominated(measured)]
    new = rng.random(objectives) * 0.9
    worst = np.ones(objectives)
    places = draw_places(front, np.concatenate([front, new[None, :]]) - 0.01, worst, seed)
    gain = chance(places.at, new[None, :], np.full((1, objectives), 1e-6)).sum() * places.weight
    reference = worst + np.log(1.1)
    before = moocore.hypervolume(front, ref=reference)
    exact = moocore.hypervolume(np.concatenate([front, new[None, :]]), ref=reference) - before
    assert gain == pytest.approx(exact, abs=0.03)
    assert places.dominated == pytest.approx(before, abs=0.03)


def test_loads_are_added_while_they_gain_more_per_cost_than_anything_else():
    chances = np.zeros((3, 100))
    chances[0, :50], chances[1, 50:60], chances[2, :55] = 1.0, 1.0, 1.0
    costs = np.array([10.0, 10.0, 10.0])
    gain, cost, loads = best_loads(chances, 20.0, costs)
    assert (gain, cost, loads) == (55.0, 30.0, [2])
    assert more_loads(chances, loads, 0.4, costs)[0] == [2, 1]
    assert more_loads(chances, loads, 0.6, costs)[0] == [2]


def measured_floats(low: float, high: float) -> st.SearchStrategy[float]:
    """As measured: six digits, since two neighbours among the floats may share a logarithm."""
    return st.floats(low, high).map(lambda x: float(f"{x:.6g}"))


@given(st.lists(st.tuples(measured_floats(1e-3, 1e3), measured_floats(0.1, 1e4)), min_size=2, max_size=8))
def test_the_scale_keeps_who_dominates_whom(pairs):
    values = np.array(pairs)
    scaled = Scale.of((1.0, -1.0), values).forward(values)
    for (a, x), (b, y) in itertools.combinations(zip(values, scaled, strict=True), 2):
        assert (a[0] < b[0]) == (x[0] < y[0])
        assert (a[1] > b[1]) == (x[1] < y[1])


def test_a_suggestion_at_two_thousand_points_is_fitted_on_a_bounded_number():
    from sweep.search.model import MAX_ROWS
    from sweep.search.search import _relevant

    used = _relevant(np.random.default_rng(0).random((2_000, 3)), np.zeros(2_000))
    assert len(used) <= MAX_ROWS + 1
    assert len(set(used.tolist())) == len(used)
