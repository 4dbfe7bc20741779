from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_points import COST, KL, TTFT, made_grid, made_point

import sweep
from sweep.decide.explain.importance import importance
from sweep.decide.explain.progress import LEAST_CONFIGS, progress, what_is_left
from sweep.results.front import hypervolume
from sweep.results.records import LaunchRecord, PointRecord, RecordStore


def write_study(folder, launches):
    """launches: (start minute, minutes, devices, [(minute of a point, cost, TTFT)])."""
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({"study": "made", "objectives": [COST, TTFT]}))
    store = RecordStore(folder)
    for number, (start, minutes, devices, found) in enumerate(launches):
        engine = {"model": "m", "args": {"max_num_seqs": number}, "env": {}}
        shared = {"config_hash": f"h{number}", "fingerprint": "f", "engine": engine, "params": None, "devices": devices}
        for at, cost, ttft in found:
            store.append(
                PointRecord(
                    point_id=f"{number}-{at}", launch_id=f"l{number}", load={"concurrency": at}, load_label=f"c{at}",
                    purpose="trial", state="measured", metrics={COST: cost, TTFT: ttft},
                    started_at=f"2026-05-04T10:{start:02d}:00+00:00", finished_at=f"2026-05-04T10:{at:02d}:00+00:00",
                    **shared,
                )
            )  # fmt: skip
        store.append(
            LaunchRecord(
                launch_id=f"l{number}", purpose="trial", device_ids=tuple(range(devices)), state="ok", cause=None,
                detail=None, transient=False, startup_s=1.0, duration_s=60.0 * minutes,
                started_at=f"2026-05-04T10:{start:02d}:00+00:00",
                finished_at=f"2026-05-04T10:{start + minutes:02d}:00+00:00", **shared,
            )
        )  # fmt: skip
    return sweep.open(folder)


def test_device_seconds_and_wall_seconds(tmp_path):
    study = write_study(tmp_path / "s", [(0, 10, 2, [(4, 2.0, 100.0), (8, 1.0, 200.0)]), (5, 5, 1, [(9, 3.0, 300.0)])])
    found = progress(study)
    assert list(found.frame["wall_s"]) == [240, 480, 540]
    # At minute 8: 8 minutes on two devices and 3 on one.
    assert list(found.frame["device_s"]) == [2 * 240, 2 * 480 + 180, 2 * 540 + 240]
    assert list(found.frame["gain"]) == pytest.approx([found.frame["share"][0], 1 - found.frame["share"][0], 0.0])
    assert found.frame["hypervolume"].iloc[-1] == pytest.approx(hypervolume(study.operating_points, [COST, TTFT]).value)
    assert found.reached(1.0) == (2 * 480 + 180, 480)
    assert found.left is None and "2 configs tried, 10 are needed" in found.cause
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_example_study_tells_its_course(study_dir):
    found = progress(sweep.open(study_dir))
    share = found.frame["share"].to_numpy()
    assert (
        (np.diff(share) >= 0).all() and share[-1] == pytest.approx(1) and found.frame["gain"].sum() == pytest.approx(1)
    )
    assert "left: at least" in found.text


def test_nothing_measured_has_no_course(empty_study_dir, study_dir, tmp_path):
    assert progress(sweep.open(empty_study_dir)) is None
    without_launches = tmp_path / "points-only"
    shutil.copytree(study_dir, without_launches)
    records = (without_launches / "records.jsonl").read_text().splitlines(keepends=True)
    (without_launches / "records.jsonl").write_text("".join(line for line in records if '"kind": "launch"' not in line))
    assert progress(sweep.open(without_launches)) is None


def test_an_objective_that_is_zero_everywhere_is_no_dimension(tmp_path):
    found = progress(write_study(tmp_path / "s", [(0, 10, 2, [(4, 0.0, 100.0), (8, 0.0, 50.0)])]))
    assert found.objectives == (TTFT,) and list(found.frame["share"]) == pytest.approx([1 / 6, 1]) and found.text


def drawn(n, seed, objectives=2):
    """n random configs of one point each."""
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(0, 0.5, (n, objectives)))
    return [made_point({"x": i}, 8, {COST: row[0], TTFT: 100 * row[1]}) for i, row in enumerate(values)]


@given(st.integers(LEAST_CONFIGS, 40), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_what_is_left_is_a_share(n, seed):
    left, cause = what_is_left(drawn(n, seed), [COST, TTFT], n)
    assert cause is None and left.share >= 0 and left.next_config >= 0 and left.configs == n


def test_what_is_left_shrinks_with_what_was_tried_and_is_about_right():
    """Against the truth: more configs of the same distribution, within the range seen; on average over 15 studies."""
    errors, few, many = [], [], []
    for seed in range(15):
        points = drawn(200, seed)
        begun, names = points[:15], [COST, TTFT]
        reference = hypervolume(begun, names)
        best = {name: min(p.metrics[name] for p in begun) for name in names}
        later = [p for p in points if all(p.metrics[name] >= best[name] for name in names)]
        truth = hypervolume(later, names, reference.reference_point).value / reference.value - 1
        left, _ = what_is_left(begun, names, 15)
        errors.append(left.share - truth)
        few.append(left.share)
        many.append(what_is_left(points[:60], names, 60)[0].share)
    assert np.mean(many) < np.mean(few)
    assert abs(np.mean(errors)) < 0.1, np.mean(errors)


def test_failed_configs_count_as_tried():
    points = drawn(12, 3)
    alone, _ = what_is_left(points, [COST, TTFT], 12)
    with_failures, _ = what_is_left(points, [COST, TTFT], 24)
    assert with_failures.next_config == pytest.approx(alone.next_config / 2)


def test_an_objective_without_any_variation_tells_nothing():
    points = [made_point({"x": i}, 8, {"requests_failed": 0.0, TTFT: 100.0 + i}) for i in range(12)]
    assert what_is_left(points, ["requests_failed", TTFT], 12) == (None, "an objective has the same value everywhere")


# ---------------------------------------------------------------- importance

KNOBS = {"max_num_seqs": [None, 8, 64], "kv_cache_dtype": [None, "fp8"], "enable_prefix_caching": [None, False]}


def test_shares_of_known_effects():
    """In a full grid of additive effects on the log scale: the variances of the knobs' own effects."""
    effects = {None: 0.0, 8: 0.3, 64: -0.3}

    def effect(args, concurrency):
        logarithm = effects[args.get("max_num_seqs")] + (0.2 if "kv_cache_dtype" in args else 0.0)
        return np.exp(logarithm), 1.0 + 0.0001 * len(args), 0.02 if "kv_cache_dtype" in args else 0.001

    frame = importance(made_grid(KNOBS, effect), [COST, KL]).set_index(["objective", "knob"])
    variance = {"max_num_seqs": 0.3**2 * 2 / 3, "kv_cache": 0.1**2}
    for knob, own in variance.items():
        assert frame.loc[(COST, knob), "share"] == pytest.approx(own / sum(variance.values()), abs=0.01)
        assert frame.loc[(COST, knob), "p_value"] <= 0.05
    assert frame.loc[(COST, "enable_prefix_caching"), "share"] == 0
    assert frame.loc[(COST, "enable_prefix_caching"), "p_value"] > 0.05
    assert frame.loc[(COST, "load"), "share"] > 0.8
    assert frame.loc[(KL, "kv_cache"), "share"] == pytest.approx(1)


def test_a_knob_without_effect_is_rarely_significant():
    found = []
    for seed in range(20):
        points = made_grid(KNOBS, lambda a, c: (1.0, 1.0, 0.001), noise=0.1, seed=seed)
        frame = importance(points, [TTFT])
        found += [p <= 0.05 for p in frame.loc[frame["knob"] != "load", "p_value"]]
    assert np.mean(found) < 0.12


def test_knobs_that_always_go_together_are_one_row():
    points = [
        made_point({"max_num_seqs": i % 2 + 1, "kv_cache_dtype": "fp8" if i % 2 else "auto", "block_size": i // 2},
                   8, {COST: 1.0 + i})
        for i in range(12)
    ]  # fmt: skip
    frame = importance(points, [COST])
    assert set(frame["knob"]) == {"kv_cache + max_num_seqs", "block_size"}


def test_thin_data_is_said():
    frame = importance(made_grid({"kv_cache_dtype": [None, "fp8"]}, lambda a, c: (1, 1, 0.001)), [COST, TTFT])
    assert frame.empty and frame.attrs["cause"][COST] == "2 configs with a value, 8 are needed"
    once = [made_point({"max_num_seqs": i}, 8, {COST: 1.0 + i}) for i in range(9)]
    frame = importance(once, [COST])
    assert frame["share"].isna().all()  # no two values have two configs
    same = [made_point({"max_num_seqs": i % 2}, 8 + i, {COST: 1.0}) for i in range(20)]
    assert importance([*same, *[made_point({"x": i}, 8, {COST: 1.0}) for i in range(9)]], [COST]).attrs["cause"] == {
        COST: "it has the same value everywhere"
    }
