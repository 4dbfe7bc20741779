"""Earlier studies as an order: configurations carried into another space by what they set, never as values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_launches import Session, dies_at_startup, engine_text, good, make_config, make_space

import sweep
from sweep.config import ParamConfig
from sweep.engine.failures import FailureCause
from sweep.launch.spec import LaunchSpec
from sweep.results.front import front
from sweep.study import loop as loop_module
from sweep.study.proposals import Proposals, Work
from sweep.study.warm import Here, Hint, open_earlier, provenance, summary, warm_prior


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)


SEQS = {"max_num_seqs": ParamConfig(choices=[None, 2, 4, 8])}


def earlier(
    home: Path, params: dict[str, ParamConfig] | None = None, cause: FailureCause = FailureCause.died_at_startup
) -> Path:
    """A study in which max_num_seqs=2 never starts."""

    def script(spec: LaunchSpec) -> Any:
        bad = "max_num_seqs=2" in engine_text(spec)
        return dies_at_startup(spec, cause) if bad else good(spec)

    session = Session(make_config(home, params=params or SEQS), script)
    session.run()
    return session.folder


def test_the_front_comes_first_and_failures_last(tmp_path: Path) -> None:
    study = sweep.open(earlier(tmp_path))
    space = make_space(make_config(tmp_path, params=SEQS))
    hints = warm_prior([study], space)
    best = {p.config_hash for p in front(study.operating_points, list(study.objectives))}
    assert sum(hint.weight == 1.0 for hint in hints) == len(best)
    assert hints[-1].params == {"max_num_seqs": 2} and (hints[-1].weight, hints[-1].cause) == (0.0, "died_at_startup")
    assert [h.weight for h in hints] == sorted((h.weight for h in hints), reverse=True)
    assert all("of s" in hint.why for hint in hints)


def test_a_knob_that_the_earlier_study_did_not_have_stays_at_its_default(tmp_path: Path) -> None:
    study = sweep.open(earlier(tmp_path))
    wider = {**SEQS, "kv_cache_dtype": ParamConfig(choices=["fp8", None])}
    hints = warm_prior([study], make_space(make_config(tmp_path, params=wider)))
    assert hints and all(hint.params["kv_cache_dtype"] is None for hint in hints)


def test_what_this_space_does_not_contain_is_left_out(tmp_path: Path) -> None:
    study = sweep.open(earlier(tmp_path))
    narrower = {"max_num_seqs": ParamConfig(choices=[None, 16])}
    hints = warm_prior([study], make_space(make_config(tmp_path, params=narrower)))
    assert [hint.params for hint in hints] == [{"max_num_seqs": None}]
    other = {"block_size": ParamConfig(choices=[None, 32])}
    assert [h.params for h in warm_prior([study], make_space(make_config(tmp_path, params=other)))] == [
        {"block_size": None}
    ]


def begin_with(hints: Sequence[Hint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next session begin with these hints, as `sweep run` does with those of warm_start."""
    plain = Proposals.baseline

    def baseline(self: Proposals) -> Work | None:
        self.begin_with(hints)
        return plain(self)

    monkeypatch.setattr(Proposals, "baseline", baseline)


def test_bundles_and_joint_knobs_are_found_by_what_they_set(tmp_path: Path) -> None:
    study = sweep.open(earlier(tmp_path))
    bundled = {"batch": ParamConfig(bundles={"usual": {}, "small": {"max_num_seqs": 4}, "other": {"max_num_seqs": 8}})}
    params = [hint.params for hint in warm_prior([study], make_space(make_config(tmp_path, params=bundled)))]
    assert {"batch": "small"} in params and {"batch": "usual"} in params


def test_a_study_begins_with_the_hints_and_asks_the_doubted_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = sweep.open(earlier(tmp_path / "one"))
    session = Session(make_config(tmp_path / "two", params=SEQS), good)
    failed = [hint for hint in warm_prior([study], session.space) if hint.cause is not None]
    hints = [Hint({"max_num_seqs": 8}, 1.0, "warm start: on the front of s"), *failed]
    begin_with(hints, monkeypatch)
    assert session.run() == "every configuration of the space is settled"
    assert [text for text, _ in session.launched()] == [
        "defaults",
        "max_num_seqs=8",
        "max_num_seqs=4",
        "max_num_seqs=2",
    ]
    assert any("warm start: on the front of s" in m for m in session.messages)


def test_a_failure_is_strong_evidence_only_for_the_same_engine_on_the_same_device(tmp_path: Path) -> None:
    study = sweep.open(earlier(tmp_path))
    config = make_config(tmp_path, params=SEQS)
    space = make_space(config)

    def same(here: Here | None) -> bool:
        (failed,) = (h for h in warm_prior([study], space, (), here) if h.cause is not None)
        return failed.same

    assert same(Here(config, "0")) and not same(Here(config, "1")) and not same(Here(config)) and not same(None)
    other = make_config(tmp_path, params=SEQS)
    other.hardware.name = "another"
    assert not same(Here(other, "0"))
    other = make_config(tmp_path, params=SEQS)
    other.model.path = "org/another"
    assert not same(Here(other, "0"))
    said = summary(warm_prior([study], space, (), Here(config, "0")))
    assert said.endswith("1 that failed there last (1 with this model, device and vLLM, 0 with another)")


def test_memory_that_ran_out_tells_of_the_same_model_and_device_only(tmp_path: Path) -> None:
    study = sweep.open(earlier(tmp_path, cause=FailureCause.out_of_memory))
    config = make_config(tmp_path, params=SEQS)
    space = make_space(config)

    def causes(here: Here | None) -> list[str]:
        return [h.cause for h in warm_prior([study], space, (), here) if h.cause is not None]

    assert causes(Here(config, "1")) == ["out_of_memory"]
    config.hardware.memory_gib = 999.0
    assert causes(Here(config, "0")) == causes(None) == []


@pytest.mark.parametrize("sampler", ["grid", "sweep"])
def test_a_grid_and_our_own_search_launch_what_failed_last(
    sampler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = sweep.open(earlier(tmp_path / "one"))
    session = Session(make_config(tmp_path / "two", params=SEQS, sampler=sampler), good)
    hints = [h for h in warm_prior([study], session.space, (), Here(session.config, "0")) if h.weight != 1.0]
    begin_with(hints, monkeypatch)
    session.run()
    launched = [text for text, _ in session.launched()]
    assert launched[0] == "defaults" and launched.index("max_num_seqs=2") == len(launched) - 1 == 3


def test_study_json_says_where_the_order_came_from(tmp_path: Path) -> None:
    folder = earlier(tmp_path)
    studies = open_earlier([str(folder)])
    hints = warm_prior(studies, make_space(make_config(tmp_path, params=SEQS)))
    (noted,) = provenance(studies, hints)
    assert noted["vllm_version"] == "0" and noted["study"] == "s"
    assert noted["failures"] == 1 and noted["hints"] == len(hints) - 1
    assert len(noted["records_sha256"]) == 64
