"""The quality station of a launch: tasks, speculation that is caught, and what the failures of each do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_launches import logprobs, make_config

from sweep.config import QualityConfig
from sweep.engine.engine_args import EngineConfig
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.launch import quality as quality_module
from sweep.launch.quality import check_under_load, measure_quality, verified_speculation
from sweep.launch.spec import EVENTS_FILE, TASKS, LaunchSpec, answers_path, logprobs_path, make_spec
from sweep.launch.worker import Events
from sweep.measure.quality.completions import judge
from sweep.measure.quality.tasks import load_answers
from sweep.measure.workload import Load
from sweep.results.records import QualityRecord, record_from_dict

CORPUS = np.arange(60_000)
NGRAM = {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 4}


class Server:
    base_url, served_model, vllm_version = "http://127.0.0.1:9", "m", "9.9"
    death: LaunchFailure | None = None

    def reset_prefix_cache(self) -> None:
        pass

    def died(self) -> LaunchFailure | None:
        return self.death


class Station:
    """A launch in a study of its own, with scripted answers of the engine."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server: Any = Server()
        self.answers: Any = {"facts": {"0": True}}
        self.gaps: Any = [np.zeros(4)]
        self.asked: list[str] = []
        self._folder = tmp_path
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(quality_module, "bos_token_id", lambda url, model: 1)
        monkeypatch.setattr(quality_module, "measure_logprobs", lambda *_: self._answer("text", logprobs(0.0)))
        monkeypatch.setattr(quality_module, "ask_tasks", lambda *_: self._answer("tasks", self.answers))
        monkeypatch.setattr(quality_module, "check_greedy", lambda *_, **__: judge(self._answer("greedy", self.gaps)))

    def _answer(self, what: str, answer: Any) -> Any:
        self.asked.append(what)
        if isinstance(answer, LaunchFailure):
            raise answer
        return answer

    def spec(self, name: str, args: dict[str, Any] | None = None, **quality: Any) -> LaunchSpec:
        config = make_config(self._folder, quality=True)
        config.quality = QualityConfig(tasks=["facts"], **quality)
        return make_spec(
            config, self._folder / name, launch_id="0001-x", engine=EngineConfig("org/m", args or {}, {}), params={},
            purpose="baseline", attempt=0, loads=(Load(4),), repeat=0, quality_runs=(TASKS, ""),
        )  # fmt: skip

    def events(self, spec: LaunchSpec) -> Events:
        spec.write()
        return Events(spec.folder / EVENTS_FILE)

    def said(self, spec: LaunchSpec) -> list[dict[str, Any]]:
        lines = (spec.folder / EVENTS_FILE).read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] != "phase"]


@pytest.fixture
def station(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Station:
    return Station(tmp_path, monkeypatch)


def test_item_results_are_left_in_the_study_and_kept_for_all_studies(station: Station) -> None:
    for name in ("one", "two"):
        spec = station.spec(name)
        assert measure_quality(spec, station.server, CORPUS, station.events(spec)) is None
        assert load_answers(answers_path(Path(spec.study_dir), spec.engine_config.fingerprint)) == station.answers
    assert station.asked == ["tasks", "text"]


def test_tasks_that_fail_leave_their_cause_and_the_text_is_still_scored(station: Station) -> None:
    station.answers = LaunchFailure(FailureCause.load_timeout, "lm-eval took too long")
    spec = station.spec("one")
    assert measure_quality(spec, station.server, CORPUS, station.events(spec)) is None
    folder, fingerprint = Path(spec.study_dir), spec.engine_config.fingerprint
    assert load_answers(answers_path(folder, fingerprint)) == str(station.answers)
    assert logprobs_path(folder, fingerprint).exists()
    assert [e["event"] for e in station.said(spec)] == ["quality_failed", "quality"]
    station.answers = {"facts": {"0": True}}
    other = station.spec("two")
    measure_quality(other, station.server, CORPUS, station.events(other))
    assert station.asked == ["tasks", "text", "tasks"]  # a failure is not kept for other studies


def test_an_engine_that_dies_of_the_tasks_ends_the_launch_and_is_not_asked_again(station: Station) -> None:
    station.answers = LaunchFailure(FailureCause.request_errors, "lm-eval exited with 1")
    station.server.death = LaunchFailure(FailureCause.engine_died, "scripted")
    spec = station.spec("one")
    assert measure_quality(spec, station.server, CORPUS, station.events(spec)) is station.server.death
    assert isinstance(load_answers(answers_path(Path(spec.study_dir), spec.engine_config.fingerprint)), str)


def test_speculation_that_is_lossless_shares_its_targets_fingerprint(station: Station) -> None:
    spec = station.spec("one", NGRAM)
    events = station.events(spec)
    assert verified_speculation(spec, station.server, CORPUS, events) is spec
    assert verified_speculation(spec, station.server, CORPUS, events) is spec
    assert station.asked == ["greedy"]  # once for a configuration
    (fact, again) = station.said(spec)
    assert fact == again and fact["facts"][f"speculation.{spec.engine_config.hash}"]["lossless"] is True
    assert spec.fingerprint == station.spec("one").fingerprint


@pytest.mark.parametrize(
    ("gaps", "verify", "cause"),
    [
        ([np.array([0.0, 3.0])], True, "speculation_not_lossless"),
        (LaunchFailure(FailureCause.request_errors, "no token_ids"), True, "speculation_not_verified"),
        ([np.zeros(2)], False, "speculation_not_verified"),
    ],
)
def test_speculation_that_is_not_shown_lossless_has_numerics_of_its_own(
    station: Station, gaps: Any, verify: bool, cause: str
) -> None:
    station.gaps = gaps
    spec = station.spec("one", NGRAM, verify_speculation=verify)
    found = verified_speculation(spec, station.server, CORPUS, station.events(spec))
    assert found.fingerprint != spec.fingerprint and found.fingerprint.startswith(spec.engine_config.fingerprint)
    assert found.point_identity(Load(4))["fingerprint"] == found.fingerprint
    (record,) = [record_from_dict(e["record"]) for e in station.said(spec) if e["event"] == "record"]
    assert isinstance(record, QualityRecord)
    assert (record.fingerprint, record.state, record.cause) == (found.fingerprint, "failed", cause)


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        ({}, {}),
        ({**NGRAM, "speculative_config.rejection_sample_method": "synthetic"}, {}),  # has its own fingerprint already
        (NGRAM, {"provenance": "simulated"}),
        (NGRAM, {"quality": {"enabled": False}}),
    ],
)
def test_nothing_is_verified_where_there_is_nothing_to_verify(
    station: Station, args: dict[str, Any], changes: dict[str, Any]
) -> None:
    spec = station.spec("one", args)
    spec = replace(spec, **{**changes, "quality": {**spec.quality, **changes.get("quality", {})}})
    assert verified_speculation(spec, station.server, CORPUS, station.events(spec)) is spec
    assert station.asked == []


def test_only_a_closed_loop_can_be_held_while_asking(station: Station) -> None:
    spec, nothing = station.spec("one"), Any
    with pytest.raises(ValueError, match="no closed loop"):
        check_under_load(
            spec, station.server, CORPUS, nothing, Load(None, request_rate_rps=2.0), station.events(spec)  # type: ignore[arg-type]
        )  # fmt: skip
