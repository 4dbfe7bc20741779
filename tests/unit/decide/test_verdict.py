"""Pass or fail of a verification: per bound and stage, drift of a soak, other SLAs later, and what is unknown."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.decide.sla import parse_sla
from sweep.decide.verdict import drift_of, judge, kendall_p
from sweep.errors import StudyError
from sweep.results.verifications import StageResult, Verification, append_verification, read_verifications

TTFT, KL = "ttft_p99_ms", "quality_kl"


def stage(name: str, value: float | None, **changes: Any) -> StageResult:
    fields: dict[str, Any] = {
        "name": name, "asked": {}, "load": {"concurrency": 8}, "load_label": "c8", "state": "measured",
        "metrics": {TTFT: value, "requests_completed": 40.0},
    }  # fmt: skip
    return StageResult(**(fields | changes))


def verification(*stages: StageResult, **changes: Any) -> Verification:
    fields: dict[str, Any] = {
        "verification_id": "v001", "point_id": "p-c8", "config_hash": "p", "load_label": "c8",
        "provenance": "measured", "sla": "ttft_p99_ms<=500", "passed": True, "stages": stages,
        "started_at": "2026-05-04T10:00:00+00:00", "finished_at": "2026-05-04T10:09:00+00:00",
    }  # fmt: skip
    return Verification(**(fields | changes))


SLA = parse_sla("ttft_p99_ms<=500")


def test_every_bound_at_every_stage() -> None:
    found = judge(verification(stage("held_out", 400.0), stage("bursts", 700.0)), SLA, {})
    assert [(c.stage, c.passed) for c in found.checks] == [("held_out", True), ("bursts", False)]
    assert not found.passed
    text = "\n".join(found.text_lines())
    assert "NOT passed" in text and "pass 400 ms" in text and "FAIL 700 ms" in text
    assert judge(verification(stage("held_out", 400.0)), SLA, {}).passed


def test_an_interval_says_whether_it_is_sure() -> None:
    reached = stage("held_out", 480.0, intervals={TTFT: (450.0, 520.0)})
    (check,) = judge(verification(reached), SLA, {}).checks
    assert check.passed and check.sure is False
    assert "pass? 480 ms [450, 520]" in "\n".join(judge(verification(reached), SLA, {}).text_lines())


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (stage("longer", None), "40 requests completed (a p99 takes 100 requests"),
        (stage("longer", None, state="failed", cause="request_errors", detail="no"), "not measured: request_errors"),
        (stage("longer", 100.0, state="quarantined", cause="proof_failed"), "quarantined: proof_failed"),
    ],
)  # fmt: skip
def test_what_was_not_measured_well_is_not_passed(result: StageResult, why: str) -> None:
    found = judge(verification(result), SLA, {})
    assert not found.passed and not found.checks[0].passed
    assert why in str(found.checks[0].why)


def test_a_launch_that_failed_passes_nothing() -> None:
    found = judge(verification(stage("held_out", 1.0), cause="out_of_memory", detail="no room"), SLA, {})
    assert not found.passed
    assert "the launch failed: out_of_memory: no room" in found.text_lines()


def test_quality_is_the_studys() -> None:
    sla = parse_sla("quality_kl<=0.01")
    assert judge(verification(stage("held_out", 1.0)), sla, {KL: 0.005}).passed
    assert not judge(verification(stage("held_out", 1.0)), sla, {KL: 0.05}).passed
    assert not judge(verification(stage("held_out", 1.0)), sla, {}).passed
    broken = stage("bursts", None, state="failed", cause="engine_died")
    assert not judge(verification(broken), sla, {KL: 0.005}).passed, "an engine that died is verified for nothing"


# ---------------------------------------------------------------- drift


def soak(values: list[float | None], mean: float) -> StageResult:
    return stage("soak", mean, windows=tuple({TTFT: v} for v in values))


def test_a_soak_that_drifts_out_of_its_bound_fails() -> None:
    rising = soak([300.0, 360.0, 420.0, 480.0, 540.0], 420.0)
    (check,) = judge(verification(rising), SLA, {}).checks
    assert check.drift is not None and check.drift.is_drift and check.drift.at_end == pytest.approx(570.0)
    assert check.passed is False and "drifted to 570 ms" in str(check.why)
    assert judge(verification(rising), parse_sla("ttft_p99_ms<=600"), {}).passed, "it drifts, and still keeps this one"


def test_noise_and_improvement_are_no_drift() -> None:
    for values in ([400.0, 480.0, 390.0, 470.0, 410.0], [540.0, 480.0, 420.0, 360.0, 300.0], [400.0] * 5):
        drift = drift_of(values, TTFT)
        assert drift is not None and not drift.is_drift
    assert drift_of([300.0, None, 600.0, 900.0], TTFT) is None, "three windows show nothing at this level"
    worse = drift_of([10.0, 8.0, 6.0, 4.0, 2.0], "goodput_rps")
    assert worse is not None and worse.is_drift and worse.change > 0


@given(st.permutations(range(6)))
def test_kendalls_p_counts_the_orders_at_least_as_steep(order: list[int]) -> None:
    def score(values: Any) -> int:
        return sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])

    everything = [score(p) for p in permutations(range(6))]
    expected = sum(s >= score(order) for s in everything) / len(everything)
    assert kendall_p(score(order), 6) == pytest.approx(expected)


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    first = verification(soak([1.0, None], 2.0), stage("bursts", 3.0, asked={"cv": 2.0}, intervals={TTFT: [2.0, 4.0]}))
    append_verification(tmp_path, first)
    append_verification(tmp_path, verification(verification_id="v002", passed=False))
    one, two = read_verifications(tmp_path)
    assert one == first
    assert (two.verification_id, two.passed, two.stages) == ("v002", False, ())
    path = tmp_path / "verifications.jsonl"
    path.write_text(path.read_text() + '{"schema": 1, "verification_id": "v0')
    assert len(read_verifications(tmp_path)) == 2, "cut short by a kill"
    append_verification(tmp_path, verification(verification_id="v003"))
    assert [v.verification_id for v in read_verifications(tmp_path)] == ["v001", "v002", "v003"]


@pytest.mark.parametrize("line", ["{}", "[]", '{"schema": 9}', "nonsense"])
def test_a_corrupt_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "verifications.jsonl").write_text(f"{line}\n")
    with pytest.raises(StudyError):
        read_verifications(tmp_path)


def test_json_has_no_surprises() -> None:
    found = judge(verification(soak([1.0, 2.0, 3.0, 4.0], 2.5), stage("held_out", None)), SLA, {})
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [c["passed"] for c in data["checks"]] == [True, None] and data["passed"] is False
