from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_points import COST, KL, OBJECTIVES, TTFT, made_grid, made_point

from sweep.decide.explain.arena import Arena, beats, traded
from sweep.decide.explain.interactions import interactions
from sweep.decide.explain.techniques import technique_fronts, techniques
from sweep.errors import ConfigError
from sweep.results.front import hypervolume

SEQS = {"max_num_seqs": [None, 8]}


def neutral(args, concurrency):
    return 1.0, 1.0, 0.001


def by_level(points, **chosen):
    """Level -> its effect."""
    return {e.level: e for e in techniques(points, OBJECTIVES, **chosen)}


def test_faster_and_cheaper_is_outward_and_its_quality_is_told():
    def effect(args, concurrency):
        fp8 = "kv_cache_dtype" in args
        return (0.8, 0.9, 0.02) if fp8 else (1.0, 1.0, 0.001)

    points = made_grid({"kv_cache_dtype": [None, "fp8"], **SEQS}, effect)
    found = by_level(points, technique="kv_cache")["kv_cache_dtype=fp8"]
    assert found.verdict == "outward" and found.objectives == (COST, TTFT)
    assert found.loads == ("c2", "c8", "c32") and found.n_pairs == 2
    assert found.effects[COST].value == pytest.approx(0.8) and found.effects[COST].beyond_noise
    assert found.improvements[COST] >= 0.2 - 1e-9
    assert found.region[COST] == pytest.approx((0.4, 2.0))  # of the defaults, from the busiest load to the lightest
    assert found.gain_interval[0] > 0 and found.gain_interval[0] <= found.gain <= found.gain_interval[1]
    assert found.quality == pytest.approx((0.02, 0.001)) and "KL 0.02 instead of 0.001" in found.text


def test_cheaper_but_slower_is_only_along():
    def effect(args, concurrency):
        return (0.6, 2.5, 0.001) if "data_parallel_size" in args else (1.0, 1.0, 0.001)

    points = made_grid({"data_parallel_size": [None, 2], **SEQS}, effect)
    found = by_level(points, technique="parallelism")["data_parallel_size=2"]
    assert found.verdict == "along" and not found.beaten and not found.improvements
    assert found.gain > 0  # it fills and widens the front, and that is all
    assert "at equal quality" in found.text


def test_worse_everywhere_is_inward():
    def effect(args, concurrency):
        return (1.3, 1.2, 0.001) if "speculative_config.method" in args else (1.0, 1.0, 0.001)

    points = made_grid({"speculative_config.method": [None, "ngram"], **SEQS}, effect)
    found = by_level(points, technique="speculation")["speculative_config.method=ngram"]
    assert found.verdict == "inward" and found.gain == 0
    assert "cost_usd_per_mtok +30 %" in found.text


def test_nothing_changes_with_little_noise_is_no_effect_and_with_much_is_unknown():
    knobs = {"enable_prefix_caching": [None, False], **SEQS}
    quiet = by_level(made_grid(knobs, neutral, cv=0.005))["enable_prefix_caching=false"]
    assert quiet.verdict == "no effect" and "within 5%" in quiet.text
    loud = by_level(made_grid(knobs, neutral, cv=0.3))["enable_prefix_caching=false"]
    assert loud.verdict == "cannot tell" and "nothing beyond noise" in loud.text


def test_thin_data_and_unknown_noise_are_said():
    alone = [
        made_point({}, 8, {COST: 1.0, TTFT: 100.0, KL: 0.001}),
        made_point({"kv_cache_dtype": "fp8", "max_num_seqs": 8}, 8, {COST: 0.5, TTFT: 50.0, KL: 0.001}),
    ]
    for found in techniques(alone, OBJECTIVES):
        assert found.text == "cannot tell: 1 config with, 1 without, 0 matched pairs"
    unknown = made_grid({"kv_cache_dtype": [None, "fp8"]}, lambda a, c: (0.5 if a else 1, 1, 0.001), cv=None)
    (found,) = techniques(unknown, OBJECTIVES)
    assert found.verdict == "cannot tell" and "noise of cost_usd_per_mtok, ttft_p50_ms is unknown" in found.text
    assert found.gain > 0 and found.gain_interval is None


@pytest.mark.parametrize(("cv", "verdict"), [(0.01, "no effect"), (0.05, "cannot tell")])
def test_a_knob_that_rides_along_gets_no_credit(cv, verdict):
    """fp8 does everything; block_size=32 was only ever combined with it, and once measured without."""

    def points_of(args, cost):
        return [made_point(args, c, {COST: cost / c, TTFT: 100.0 * c * cost, KL: 0.001}, cv=cv) for c in (2, 8)]

    points = [
        *points_of({}, 1.0),
        *points_of({"block_size": 32}, 1.0),
        *points_of({"block_size": 32, "quantization": "fp8"}, 0.5),
    ]
    found = by_level(points)
    assert found["quantization=fp8"].verdict == "outward"
    assert found["block_size=32"].verdict == verdict and found["block_size=32"].improvements[COST] == 0.5


def test_the_best_of_many_by_chance_is_not_credited():
    """Twelve values that do nothing, noise of 5 %: some of 36 points always looks better than the few without."""
    knobs = {"max_num_batched_tokens": [None, *(1024 * i for i in range(1, 13))]}
    outward = 0
    for seed in range(20):
        points = made_grid(knobs, neutral, cv=0.05 * 3**0.5, noise=0.05, seed=seed)
        outward += any(e.verdict == "outward" for e in techniques(points, OBJECTIVES))
    assert outward <= 2


def test_what_helps_but_was_never_combined_with_the_best_is_not_called_useless():
    points = [
        made_point({}, 8, {COST: 1.0, TTFT: 100.0, KL: 0.001}),
        made_point({"kv_cache_dtype": "fp8"}, 8, {COST: 0.9, TTFT: 90.0, KL: 0.001}),
        made_point({"quantization": "fp8"}, 8, {COST: 0.5, TTFT: 50.0, KL: 0.001}),
    ]
    found = {e.level: e for e in techniques(points, OBJECTIVES)}["kv_cache_dtype=fp8"]
    assert found.verdict == "cannot tell" and "was not tried with what is on the front" in found.text


def test_a_technique_without_effect_is_rarely_called_outward():
    """Noise of 3 % on every point, known as such: whatever is found is chance."""
    outward = 0
    for seed in range(40):
        points = made_grid({"enable_prefix_caching": [None, False], **SEQS}, neutral, cv=0.03 * 3**0.5, noise=0.03,
                           seed=seed)  # fmt: skip
        outward += any(e.verdict == "outward" for e in techniques(points, OBJECTIVES))
    assert outward <= 3


def test_one_load_only():
    def effect(args, concurrency):
        return (0.5 if "max_num_seqs" in args and concurrency == 32 else 1.0, 1.0, 0.001)

    points = made_grid({"kv_cache_dtype": [None, "fp8"], **SEQS}, effect)
    busy, light = (by_level(points, load=load, technique="batch_limits")["max_num_seqs=8"] for load in ("c32", "c2"))
    assert busy.verdict == "outward" and busy.loads == ("c32",)
    assert light.verdict == "no effect"
    with pytest.raises(ConfigError, match="no point has the load 'c31'"):
        techniques(points, OBJECTIVES, load="c31")


def test_many_values_are_one_row_until_asked_for():
    knobs = {"max_num_seqs": [None, 8, 16, 32, 64, 128]}
    points = made_grid(knobs, lambda args, c: (1 / (1 + args.get("max_num_seqs", 4)), 1.0, 0.001))
    assert [e.level for e in techniques(points, OBJECTIVES)] == ["max_num_seqs: any of 5 values"]
    assert len(techniques(points, OBJECTIVES, technique="max_num_seqs")) == 6


def test_fronts_of_both_sides_for_the_figure():
    points = made_grid({"kv_cache_dtype": [None, "fp8"]}, lambda a, c: (0.8 if a else 1, 1, 0.001))
    (effect,) = techniques(points, OBJECTIVES)
    frame = technique_fronts(points, effect)
    assert list(frame) == ["side", "point_id", "load_label", "x", "y", "on_front"]
    assert dict(frame["side"].value_counts()) == {"with": 3, "without": 3} and frame["on_front"].all()
    assert set(frame.loc[frame["side"] == "with", "point_id"]) == set(effect.with_ids)


def test_a_space_that_changes_no_numerics_has_no_quality_dimension():
    points = made_grid({"data_parallel_size": [None, 2]}, lambda a, c: (0.8 if a else 1, 1, 0.0))
    arena = Arena(points, OBJECTIVES, quality_is_a_price=False)
    assert arena.objectives == (COST, TTFT) and arena.everything.min() > 0


def test_quality_is_an_objective_where_fewer_than_two_others_are():
    assert traded([COST, TTFT, KL]) == (COST, TTFT)
    assert traded([COST, KL]) == (COST, KL)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ((1.0, 100.0), False),  # equal
        ((0.9, 100.0), True),
        ((0.9, 103.0), True),  # 10 % for 3 %
        ((0.95, 104.0), False),  # 5 % for 4 % is a trade
        ((0.5, 106.0), False),  # more than 5 % worse is a trade, whatever it buys
        ((1.1, 90.0), False),
    ],
)
def test_what_beating_means(ours, expected):
    assert beats(np.array(ours), np.array([1.0, 100.0]), [COST, TTFT]) == expected


def test_beating_with_a_maximized_metric_and_with_quality():
    def beat(*ours):
        return beats(np.array(ours), np.array([-100.0, 0.001]), ["output_throughput_tok_s", KL])

    assert beat(-120.0, 0.001) and beat(-120.0, 0.0005)
    assert not beat(-80.0, 0.001)
    assert not beat(-200.0, 0.00101)  # quality gives no slack
    assert not beat(-100.0, 0.0005)  # and nothing faster is no gain in speed


clouds = st.lists(st.tuples(st.floats(0.1, 10), st.floats(10, 1000)), min_size=2, max_size=15)


@given(clouds, st.integers(0, 2**15))
@settings(max_examples=30, deadline=None)
def test_what_a_set_adds_is_never_negative_and_agrees_with_the_hypervolume(pairs, bits):
    points = [made_point({"x": i}, 8, {COST: a, TTFT: b}) for i, (a, b) in enumerate(pairs)]
    arena = Arena(points, [COST, TTFT])
    mask = np.array([bool(bits >> i & 1) for i in range(len(points))])
    gain, interval = arena.gain(mask)
    rest = [p for p, m in zip(points, mask, strict=True) if not m]
    if not rest or not mask.any():
        assert gain is None or not rest or not mask.any()
        return
    whole = hypervolume(points, [COST, TTFT])
    part = hypervolume(rest, [COST, TTFT], whole.reference_point)
    if gain is not None:
        assert gain == pytest.approx(max(0.0, whole.value / part.value - 1), rel=1e-6, abs=1e-9)
        assert interval[0] >= 0
    for i, by in arena.beaten(mask).items():
        assert not mask[i] and by.any() and not by[~mask].any()


@given(clouds)
@settings(max_examples=20, deadline=None)
def test_contenders_keep_every_point_that_is_ever_on_the_front(pairs):
    points = [made_point({"x": i}, 8, {COST: a, TTFT: b}) for i, (a, b) in enumerate(pairs)]
    arena = Arena(points, [COST, TTFT])
    everyone = np.ones(len(points), dtype=bool)
    from sweep.results.uncertainty import on_front

    often = on_front(arena.drawn).mean(axis=0) > 0.05
    assert (arena.contenders(everyone) | ~often).all()


# ---------------------------------------------------------------- interactions


def square(both: float, cv: float = 0.01):
    factors = {(False, False): 1.0, (True, False): 0.8, (False, True): 0.9, (True, True): both}

    def effect(args, concurrency):
        return factors["kv_cache_dtype" in args, "max_num_seqs" in args], 1.0, 0.001

    return made_grid({"kv_cache_dtype": [None, "fp8"], **SEQS}, effect, cv=cv)


def test_effects_that_multiply_do_not_interact():
    found, without = interactions(square(0.72), OBJECTIVES)
    assert (found, without) == ([], 0)


def test_two_that_help_each_other():
    (found,), _ = interactions(square(0.36), OBJECTIVES)
    assert found.metric == COST and found.factor == pytest.approx(0.5) and found.squares == 1
    assert found.interval[0] < 0.5 < found.interval[1] < 1 and "help each other" in found.text
    assert set(found.settings) == {"kv_cache_dtype=fp8", "max_num_seqs=8"}
    assert interactions(square(0.36), OBJECTIVES, only=["speculation"]) == ([], 0)


def test_an_interaction_within_noise_is_not_told():
    assert interactions(square(0.76, cv=0.2), OBJECTIVES)[0] == []


def test_a_square_with_a_corner_missing_says_nothing():
    points = [p for p in square(0.36) if len(p.engine["args"]) < 2]
    assert interactions(points, OBJECTIVES) == ([], 1)
    failed = [replace(p, state="failed", metrics={}, sd={}) if len(p.engine["args"]) == 2 else p for p in square(0.36)]
    assert interactions(failed, OBJECTIVES) == ([], 1)
