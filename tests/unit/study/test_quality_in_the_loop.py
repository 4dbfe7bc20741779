"""Quality once per fingerprint: who measures it, in whatever order launches end, fail and crash; and that it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_launches import (
    Event,
    Script,
    Session,
    dies_at_startup,
    ended,
    engine_text,
    good,
    logprobs,
    make_config,
    point,
    press_ctrl_c,
    quality_fails,
    vanishes,
)
from optuna.trial import TrialState

from sweep.config import ExecutorConfig, ParamConfig
from sweep.engine.failures import FailureCause
from sweep.launch.spec import CONTROL, QUALITY_DIR, REPEAT, LaunchSpec, logprobs_path
from sweep.measure.quality import save_logprobs
from sweep.results.records import QualityRecord
from sweep.study import loop as loop_module
from sweep.study import proposals as proposals_module

SETTLED = "every configuration of the space is settled"
# Two fingerprints, two engine configs of each.
PARAMS = {
    "quantization": ParamConfig(choices=[None, "int8"]),
    "max_num_seqs": ParamConfig(choices=[None, 4]),
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)
    monkeypatch.setattr(proposals_module, "GRID_BLOCK", 1)  # scripts count on a grid's declared order


def session(tmp_path: Path, script: Script, *, devices: int = 1, retries: int = 1) -> Session:
    config = make_config(
        tmp_path, params=PARAMS, devices=devices, retries=retries, quality=True, loads=(2, 1), sampler="grid"
    )
    return Session(config, script, limit=16)


def quality(of: Session) -> dict[str, QualityRecord]:
    """The newest record of each fingerprint, by its quantization."""
    names = {s.engine_config.fingerprint: str(s.engine["args"].get("quantization")) for s in of.specs}
    records = [r for r in of.loop.ledger.records if isinstance(r, QualityRecord)]
    return {names[r.fingerprint]: r for r in records}


def runs(of: Session) -> list[tuple[str, tuple[str, ...]]]:
    return [(engine_text(s), s.quality_runs) for s in of.specs if s.quality_runs]


def told_states(of: Session) -> Counter[TrialState]:
    return Counter(t.state for t in of.study.trials)


def is_quantized(spec: LaunchSpec) -> bool:
    return "quantization" in spec.engine["args"]


# ---------------------------------------------------------------- the ordinary course


@pytest.mark.parametrize("devices", [1, 4])
def test_each_fingerprint_is_measured_once_and_the_reference_has_its_controls(tmp_path: Path, devices: int) -> None:
    done = session(tmp_path, lambda spec: good(spec, ticks=3), devices=devices)
    assert done.run() == SETTLED
    made = Counter((is_quantized(s), run) for s in done.specs for run in s.quality_runs)
    assert made == {(False, ""): 1, (False, REPEAT): 1, (False, CONTROL): 1, (True, ""): 1}
    assert runs(done)[0] == ("defaults", ("", REPEAT))
    found = quality(done)
    assert found["None"].metrics["quality_kl"] == 0.0 and (found["int8"].metrics["quality_kl"] or 0) > 0.01
    assert (found["None"].noise_floor_kl or 0) > 0 and found["None"].noise_floor_kl == found["int8"].noise_floor_kl
    assert told_states(done) == {TrialState.COMPLETE: 8}


def test_points_wait_for_their_quality_before_they_are_told(tmp_path: Path) -> None:
    told_early = 0

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        nonlocal told_early
        runs_of_reference = spec.quality_runs if not is_quantized(spec) else ()
        if runs_of_reference:  # the reference's own measurement comes late: its launch is slow
            yield from good(spec, ticks=50)
            return
        yield from good(spec)
        told_early += sum(t.state is TrialState.COMPLETE for t in done.study.trials)

    done = session(tmp_path, script, devices=4)
    assert done.run() == SETTLED
    assert told_early == 0
    assert told_states(done) == {TrialState.COMPLETE: 8}


# ---------------------------------------------------------------- failures


def test_a_lost_reference_measurement_is_made_again_at_the_end(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return quality_fails(spec) if spec.purpose == "baseline" else good(spec)

    params = {"quantization": PARAMS["quantization"]}
    done = Session(make_config(tmp_path, params=params, quality=True, loads=(2, 1), sampler="grid"), script, limit=16)
    assert done.run() == SETTLED
    assert [(s.purpose, engine_text(s), s.loads) for s in done.specs][-1] == ("reference", "defaults", ())
    assert {r.state for r in quality(done).values()} == {"measured"}
    assert told_states(done) == {TrialState.COMPLETE: 4}


def test_a_fingerprint_whose_first_config_failed_is_measured_by_the_next(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        bad = engine_text(spec) == "quantization=int8"
        return dies_at_startup(spec, FailureCause.out_of_memory) if bad else good(spec)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    assert ("max_num_seqs=4 quantization=int8", ("",)) in runs(done)
    assert {r.state for r in quality(done).values()} == {"measured"}


def test_a_measurement_that_keeps_failing_is_given_up_with_its_cause(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return quality_fails(spec) if is_quantized(spec) else good(spec)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    lost = quality(done)["int8"]
    assert (lost.state, lost.cause, lost.metrics) == ("failed", "request_errors", {})
    assert quality(done)["None"].state == "measured"
    assert sum(("" in s.quality_runs) and is_quantized(s) for s in done.specs) == 2  # once, and one retry
    assert told_states(done) == {TrialState.COMPLETE: 4, TrialState.FAIL: 4}


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_without_a_reference_every_fingerprint_fails_and_the_sweep_ends(tmp_path: Path, retries: int) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return good(spec) if is_quantized(spec) else quality_fails(spec)

    done = session(tmp_path, script, retries=retries)
    assert done.run() == SETTLED
    assert {name: (r.state, r.cause) for name, r in quality(done).items()} == {
        "None": ("failed", "request_errors"),
        "int8": ("failed", "request_errors"),
    }
    assert "the reference could not be measured" in (quality(done)["int8"].detail or "")
    assert len(done.points("measured")) == 8
    assert told_states(done) == {TrialState.FAIL: 8}


def test_a_reference_that_cannot_start_is_not_launched_for_ever(tmp_path: Path) -> None:
    """As when only quantized weights fit the devices."""

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return good(spec) if is_quantized(spec) else dies_at_startup(spec, FailureCause.out_of_memory)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    assert [s.purpose for s in done.specs].count("reference") == 2
    assert quality(done)["int8"].cause == "out_of_memory"
    assert len(done.points("measured")) == 4


def test_the_reference_is_measured_by_a_config_of_it_that_runs(tmp_path: Path) -> None:
    """vLLM's defaults do not fit, but another config of the same numerics does and was measured without quality."""

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        if engine_text(spec) == "defaults":
            return dies_at_startup(spec, FailureCause.out_of_memory)
        failing = spec.purpose == "trial" and not is_quantized(spec)
        return quality_fails(spec) if failing else good(spec)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    assert [engine_text(s) for s in done.specs if s.purpose == "reference"] == ["max_num_seqs=4"]
    assert {r.state for r in quality(done).values()} == {"measured"}


def test_an_engine_that_dies_in_the_quality_measurement_still_has_its_loads_measured(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        if is_quantized(spec) and spec.quality_runs:
            failed = {"event": "quality_failed", "run": "", "cause": "engine_died", "detail": "scripted"}
            return iter([[failed], [ended(spec, FailureCause.engine_died)]])
        return good(spec)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    assert len(done.points("measured")) == 8 and not done.points("failed")
    assert quality(done)["int8"].cause == "engine_died"


def test_a_worker_that_vanishes_in_the_quality_measurement_ends_too(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return vanishes(spec) if spec.quality_runs else good(spec)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    assert {p.cause for p in done.points("failed")} == {"unknown"}


def test_a_control_whose_launch_never_came_to_it_is_left_to_the_next_config(tmp_path: Path) -> None:
    params = {"max_num_seqs": ParamConfig(choices=[None, 4, 8])}

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        bad = engine_text(spec) == "max_num_seqs=4"
        return dies_at_startup(spec, FailureCause.out_of_memory) if bad else good(spec)

    done = Session(make_config(tmp_path, params=params, quality=True, sampler="grid"), script, limit=16)
    assert done.run() == SETTLED
    assert runs(done)[1:] == [("max_num_seqs=4", (CONTROL,)), ("max_num_seqs=8", (CONTROL,))]


def test_an_unclaimed_launch_that_ends_first_does_not_free_the_claim(tmp_path: Path) -> None:
    """Three configs of one fingerprint side by side; the measuring one is the slowest."""
    params = {"max_num_seqs": ParamConfig(choices=[None, *range(2, 12)])}

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        return good(spec, ticks=60 if "" in spec.quality_runs else 2)

    done = Session(make_config(tmp_path, params=params, devices=3, quality=True, sampler="grid"), script)
    assert done.run() == SETTLED
    assert sum("" in s.quality_runs for s in done.specs) == 1


# ---------------------------------------------------------------- resume


def test_points_whose_quality_came_after_a_restart_are_told(tmp_path: Path) -> None:
    def interrupted(spec: LaunchSpec) -> Iterator[list[Event]]:
        if spec.purpose == "baseline":
            yield from quality_fails(spec)
        else:
            press_ctrl_c()
            yield [point(spec, "c2")]

    first = session(tmp_path, interrupted, retries=3)
    assert first.run().startswith("interrupted")
    second = session(tmp_path, good, retries=3)
    assert second.run() == SETTLED
    assert told_states(second)[TrialState.COMPLETE] == 8
    points = Counter(
        (t.params["quantization"], t.params["max_num_seqs"], t.params["load"]) for t in second.study.trials
    )
    assert set(points.values()) == {1}


def test_a_damaged_measurement_is_made_again(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        if spec.purpose == "baseline":
            path = logprobs_path(Path(spec.study_dir), spec.engine_config.fingerprint)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"PK\x03\x04 half of it")
        yield from good(spec) if spec.purpose != "baseline" else quality_fails(spec)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    assert {r.state for r in quality(done).values()} == {"measured"}


def test_a_half_written_file_of_a_running_launch_is_no_fingerprint(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        folder = Path(spec.study_dir) / QUALITY_DIR
        folder.mkdir(exist_ok=True)
        target = logprobs_path(Path(spec.study_dir), spec.engine_config.fingerprint)
        save_logprobs(folder / "whole.npz", logprobs(0.0))
        (folder / "whole.npz").rename(target.with_suffix(f".{spec.launch_id}.tmp"))
        yield from good(spec)

    done = session(tmp_path, script)
    assert done.run() == SETTLED
    names = {r.fingerprint for r in done.loop.ledger.records if isinstance(r, QualityRecord)}
    assert names == {s.engine_config.fingerprint for s in done.specs}


def test_the_reference_is_launched_although_the_budget_has_ended(tmp_path: Path) -> None:
    """What was measured within the budget is worth nothing without it."""
    config = make_config(
        tmp_path, params={"quantization": PARAMS["quantization"]}, quality=True, loads=(2, 1), trials=4
    )

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        if is_quantized(spec):
            return good(spec)
        return good(spec) if spec.purpose == "reference" else quality_fails(spec)

    done = Session(replace(config, executor=ExecutorConfig(retries=2)), script, limit=8)
    assert done.run() == "budget.trials=4 reached"
    assert [s.purpose for s in done.specs] == ["baseline", "trial", "reference"]
    assert {r.state for r in quality(done).values()} == {"measured"}
