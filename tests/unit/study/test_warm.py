"""Earlier studies as an order: configurations carried into another space by what they set, never as values."""

from __future__ import annotations

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
from sweep.study.warm import Hint, open_earlier, provenance, warm_prior


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "POLL_S", 0.0)


SEQS = {"max_num_seqs": ParamConfig(choices=[None, 2, 4, 8])}


def earlier(home: Path, params: dict[str, ParamConfig] | None = None) -> Path:
    """A study in which max_num_seqs=2 never starts."""

    def script(spec: LaunchSpec) -> Any:
        bad = "max_num_seqs=2" in engine_text(spec)
        return dies_at_startup(spec, FailureCause.died_at_startup) if bad else good(spec)

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


def test_bundles_and_joint_knobs_are_found_by_what_they_set(tmp_path: Path) -> None:
    study = sweep.open(earlier(tmp_path))
    bundled = {"batch": ParamConfig(bundles={"usual": {}, "small": {"max_num_seqs": 4}, "other": {"max_num_seqs": 8}})}
    params = [hint.params for hint in warm_prior([study], make_space(make_config(tmp_path, params=bundled)))]
    assert {"batch": "small"} in params and {"batch": "usual"} in params


def test_a_study_begins_with_the_hints_and_asks_the_doubted_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = sweep.open(earlier(tmp_path / "one"))
    launched: list[str] = []

    def script(spec: LaunchSpec) -> Any:
        launched.append(engine_text(spec))
        return good(spec)

    session = Session(make_config(tmp_path / "two", params=SEQS), script)
    failed = [hint for hint in warm_prior([study], session.space) if hint.cause is not None]
    hints = [Hint({"max_num_seqs": 8}, 1.0, "warm start: on the front of s"), *failed]
    plain = Proposals.baseline

    def baseline(self: Proposals) -> Work | None:
        self.begin_with(hints)
        return plain(self)

    monkeypatch.setattr(Proposals, "baseline", baseline)
    assert session.run() == "every configuration of the space is settled"
    assert launched == ["defaults", "max_num_seqs=8", "max_num_seqs=4", "max_num_seqs=2"]
    assert any("warm start: on the front of s" in m for m in session.messages)


def test_study_json_says_where_the_order_came_from(tmp_path: Path) -> None:
    folder = earlier(tmp_path)
    studies = open_earlier([str(folder)])
    hints = warm_prior(studies, make_space(make_config(tmp_path, params=SEQS)))
    (noted,) = provenance(studies, hints)
    assert noted["study"] == "s" and noted["failures"] == 1 and noted["hints"] == len(hints) - 1
    assert len(noted["records_sha256"]) == 64
