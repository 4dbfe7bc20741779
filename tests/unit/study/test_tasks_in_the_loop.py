"""Task accuracy and non-inferiority in the study loop: asked once, told to the sampler, never asked again in vain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_launches import Event, Script, Session, engine_text, good, make_config, point
from optuna.trial import TrialState

from sweep.config import ParamConfig, QualityConfig
from sweep.launch.spec import REPEAT, TASKS, LaunchSpec, answers_path
from sweep.measure.quality.tasks import save_answers, save_failure
from sweep.results.records import QualityRecord, to_dict
from sweep.study import loop as loop_module

PARAMS = {"quantization": ParamConfig(choices=[None, "int8"]), "max_num_seqs": ParamConfig(choices=[None, 4])}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)


def session(tmp_path: Path, script: Script, **quality: object) -> Session:
    config = make_config(tmp_path, params=PARAMS, quality=True, loads=(2, 1), sampler="grid")
    config.quality = QualityConfig(tasks=["facts"], **quality)  # type: ignore[arg-type]
    return Session(config, script, limit=16)


def answers(spec: LaunchSpec) -> None:
    """int8 loses one item in five."""
    wrong = 5 if "quantization" in spec.engine["args"] else 50
    path = answers_path(Path(spec.study_dir), spec.engine_config.fingerprint)
    save_answers(path, {"facts": {str(i): (i + 1) % wrong != 0 for i in range(100)}})


def asked(spec: LaunchSpec) -> Iterator[list[Event]]:
    if TASKS in spec.quality_runs:
        answers(spec)
    yield from good(replace(spec, quality_runs=tuple(run for run in spec.quality_runs if run != TASKS)))


def records(of: Session) -> dict[str, QualityRecord]:
    names = {s.engine_config.fingerprint: str(s.engine["args"].get("quantization")) for s in of.specs}
    found = [r for r in of.loop.ledger.records if isinstance(r, QualityRecord)]
    return {names[r.fingerprint]: r for r in found}


def test_tasks_are_asked_once_for_a_fingerprint_before_its_text(tmp_path: Path) -> None:
    done = session(tmp_path, asked)
    done.run()
    runs = [(engine_text(s), s.quality_runs) for s in done.specs if TASKS in s.quality_runs]
    assert runs[0] == ("defaults", (TASKS, "", REPEAT))
    assert [r for _, r in runs[1:]] == [(TASKS, "")]
    found = records(done)
    assert found["None"].metrics["quality_task_accuracy"] == 0.98
    assert found["int8"].metrics["quality_task_accuracy"] == 0.80
    assert found["int8"].tasks["facts"]["worse"] == 20 - 2


def test_what_the_tasks_failed_of_is_kept_and_not_asked_again(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        if TASKS not in spec.quality_runs or "quantization" not in spec.engine["args"]:
            yield from asked(spec)
            return
        save_failure(answers_path(Path(spec.study_dir), spec.engine_config.fingerprint), "lm-eval exited with 1")
        yield [{"event": "quality_failed", "run": TASKS, "cause": "request_errors", "detail": "lm-eval exited with 1"}]
        yield from good(replace(spec, quality_runs=("",)))

    done = session(tmp_path, script)
    done.run()
    assert sum(TASKS in s.quality_runs for s in done.specs) == 2
    lost = records(done)["int8"]
    assert (lost.state, lost.task_failure) == ("measured", "lm-eval exited with 1")
    assert lost.metrics["quality_kl"] is not None and "quality_task_accuracy" not in lost.metrics


def test_what_is_not_shown_non_inferior_is_infeasible_to_the_sampler(tmp_path: Path) -> None:
    done = session(tmp_path, asked, non_inferiority={"quality_task_accuracy": 0.05, "quality_kl": 100.0})
    done.run()
    for trial in done.study.trials:
        losses = {name: value for name, value in trial.constraints.items() if name.startswith("loss of")}
        lossy = trial.params["quantization"] == "int8"
        assert trial.state is TrialState.COMPLETE
        assert list(losses) == ["loss of quality_task_accuracy", "loss of quality_kl"]
        assert (losses["loss of quality_task_accuracy"] > 0) == lossy
        assert losses["loss of quality_kl"] <= 0


def test_what_cannot_be_shown_is_infeasible_too(tmp_path: Path) -> None:
    """Speculation that was caught changing tokens has numerics of its own, and a failed record for them."""

    def script(spec: LaunchSpec) -> Iterator[list[Event]]:
        if "quantization" not in spec.engine["args"]:
            yield from asked(spec)
            return
        caught = replace(spec, distinct_numerics=True)
        failed = QualityRecord(
            fingerprint=caught.fingerprint, reference_fingerprint=spec.engine_config.fingerprint, state="failed",
            metrics={}, noise_floor_kl=None, positions=0, launch_id=spec.launch_id, finished_at="",
            cause="speculation_not_lossless",
        )  # fmt: skip
        yield [{"event": "record", "record": to_dict(failed)}]
        for events in asked(spec):
            yield [
                {**e, "record": {**e["record"], "fingerprint": caught.fingerprint}}
                if e["event"] == "record" and e["record"]["kind"] == "point"
                else e
                for e in events
            ]

    done = session(tmp_path, script, non_inferiority={"quality_kl": 100.0})
    assert done.run() == "every configuration of the space is settled"
    assert point(done.specs[0], "c2")["record"]["fingerprint"] == done.specs[0].engine_config.fingerprint
    states = {
        (t.params["quantization"], t.state, t.constraints.get("loss of quality_kl", 0) > 0) for t in done.study.trials
    }
    assert states == {(None, TrialState.COMPLETE, False), ("int8", TrialState.PRUNED, True)}
