from __future__ import annotations

from dataclasses import replace

import pytest
from made_points import COST, KL, OBJECTIVES, TTFT, made_grid, made_point

from sweep.decide.explain.cliffs import FACTOR, cliffs
from sweep.decide.explain.overrides import override_worth

SEQS = {"max_num_seqs": [8, 16, 32, 64]}


def step(args, concurrency):
    """Beyond 16 sequences the TTFT at high load triples."""
    return 1.0, 3.0 if args["max_num_seqs"] > 16 and concurrency == 32 else 1.0, 0.001


def test_a_jump_is_found_where_it_is():
    (found,) = cliffs(made_grid(SEQS, step), OBJECTIVES)
    assert (found.knob, found.before, found.after) == ("max_num_seqs", "max_num_seqs: 16", "32")
    assert (found.load_label, found.metric, found.kind) == ("c32", TTFT, "jump")
    assert found.factor == pytest.approx(3) and found.interval[0] > FACTOR
    assert found.text == "max_num_seqs: 16 -> 32 at c32: ttft_p50_ms 3x worse"


def test_a_jump_within_noise_is_none():
    assert cliffs(made_grid(SEQS, step, cv=0.8), OBJECTIVES) == []
    assert cliffs(made_grid(SEQS, step, cv=None), OBJECTIVES) == []


def test_a_gain_is_a_cliff_too_and_more_of_a_maximized_metric_is_one():
    points = [made_point({"max_num_seqs": n}, 8, {"output_throughput_tok_s": v}) for n, v in ((8, 100.0), (16, 250.0))]
    (found,) = cliffs(points, ["output_throughput_tok_s"])
    assert found.factor == pytest.approx(0.4) and found.text.endswith("2.5x better")


def test_the_largest_comes_first_and_only_neighbours_count():
    def steps(args, concurrency):
        return {8: 1.0, 16: 1.5, 32: 6.0, 64: 6.0}[args["max_num_seqs"]], 1.0, 0.001

    found = cliffs(made_grid(SEQS, steps), [COST])
    assert [round(c.factor, 1) for c in found] == [4.0] * 3 + [1.5] * 3  # not 8 -> 32, not 8 -> 64


def failing(cause):
    """The same knob, with 64 sequences failing at every load."""
    points = made_grid(SEQS, lambda args, c: (1, 1, 0.001))
    lost = {"state": "failed", "cause": cause, "metrics": {}, "sd": {}}
    return [replace(p, **lost) if p.engine["args"]["max_num_seqs"] == 64 else p for p in points]


def test_a_neighbour_that_fails_is_a_cliff_told_once():
    (found,) = cliffs(failing("out_of_memory"), OBJECTIVES)
    assert found.text == "max_num_seqs: 32 -> 64 at c2, c8, c32: out_of_memory"
    assert found.kind == "failure" and found.other_id.endswith("c2") and found.factor is None


def test_an_interruption_is_no_cliff():
    assert cliffs(failing("interrupted"), OBJECTIVES) == []


def test_words_of_several_arguments_are_told_in_full():
    points = [
        made_point({"pipeline_parallel_size": 2}, 8, {COST: 1.0}),
        made_point({"data_parallel_size": 2}, 8, {COST: 3.0}),
    ]
    (found,) = cliffs(points, [COST])
    assert {found.before, found.after} == {"pipeline_parallel_size=2", "data_parallel_size=2"}


# ---------------------------------------------------------------- overrides

KNOBS = {"quantization": [None, "fp8"], "max_num_seqs": [None, 64], "enable_prefix_caching": [None, False]}


def effect(args, concurrency):
    cost = (0.7 if "quantization" in args else 1.0) * (0.9 if "max_num_seqs" in args else 1.0)
    return cost, 1.0, 0.02 if "quantization" in args else 0.001


def full_point(points):
    return next(p for p in points if len(p.engine["args"]) == 3 and p.load_label == "c8")


def test_what_each_override_is_worth():
    points = made_grid(KNOBS, effect)
    report = override_worth(points, full_point(points), OBJECTIVES)
    worth = {w.setting: w for w in report.worths}
    assert set(worth) == {"quantization=fp8", "max_num_seqs=64", "enable_prefix_caching=false"}
    assert worth["quantization=fp8"].effects[COST].value == pytest.approx(0.7)
    assert worth["max_num_seqs=64"].effects[COST].value == pytest.approx(0.9)
    assert "gains cost_usd_per_mtok -30 %" in worth["quantization=fp8"].text
    assert "costs quality_kl +0.019" in worth["quantization=fp8"].text
    assert "nothing beyond noise" in worth["enable_prefix_caching=false"].text
    for w in worth.values():
        assert w.without.load_label == "c8" and len(w.without.engine["args"]) == 2


def test_the_minimal_version_drops_what_is_worth_nothing():
    points = made_grid(KNOBS, effect)
    report = override_worth(points, full_point(points), [COST, TTFT])
    assert report.dropped == ("enable_prefix_caching=false",) and report.sure
    assert set(report.minimal.engine["args"]) == {"quantization", "max_num_seqs"}


def test_noise_is_no_proof_that_an_override_is_worth_nothing():
    points = made_grid(KNOBS, lambda args, c: (1, 1, 0.001), cv=0.2)
    report = override_worth(points, full_point(points), [COST, TTFT])
    assert not report.sure and "minimal: cannot tell: as good without" in "\n".join(report.text_lines())


def test_without_a_measured_neighbour_nothing_is_said():
    points = made_grid(KNOBS, effect)
    chosen = full_point(points)
    points = [p for p in points if p is chosen or len(p.engine["args"]) < 2]
    report = override_worth(points, chosen, OBJECTIVES)
    assert all(w.without is None and not w.effects for w in report.worths)
    assert report.minimal is chosen and not report.dropped
    assert any(line.strip().startswith("cannot tell: not measured without") for line in report.text_lines())


def test_an_override_that_is_needed_to_run():
    points = made_grid({"max_num_seqs": [None, 64], "gpu_memory_utilization": [None, 0.8]}, lambda a, c: (1, 1, 0.001))
    points = [
        p
        if "max_num_seqs" in p.engine["args"]
        else replace(p, state="failed", cause="out_of_memory", metrics={}, sd={})
        for p in points
    ]
    chosen = next(p for p in points if len(p.engine["args"]) == 2)
    report = override_worth(points, chosen, [COST])
    assert {w.knob: w.text for w in report.worths}[
        "max_num_seqs"
    ] == "max_num_seqs=64: needed, without it: out_of_memory"
    assert "max_num_seqs" in report.minimal.engine["args"]


def test_the_defaults_have_no_overrides():
    points = made_grid(KNOBS, effect)
    report = override_worth(points, next(p for p in points if p.purpose == "baseline"), [COST, KL])
    assert report.worths == () and "no overrides: these are vLLM's defaults" in "\n".join(report.text_lines())
