"""What is settled, spent and may be told, from records alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sweep.config import BudgetConfig, HardwareConfig
from sweep.results.records import LaunchRecord, PointRecord, QualityRecord
from sweep.study.budget import Budget
from sweep.study.ledger import Ledger

OBJECTIVES = ["ttft_p99_ms", "quality_kl"]
MEASURED = PointRecord(
    "p", "1", "a", "f", {"model": "m", "args": {}, "env": {}}, {"concurrency": 8}, "c8", {}, "trial", 1, "measured",
    metrics={"ttft_p99_ms": 10.0},
)  # fmt: skip
TRANSIENT = replace(MEASURED, state="failed", cause="startup_timeout", transient=True, metrics={})
LASTING = replace(TRANSIENT, cause="out_of_memory", transient=False)
QUARANTINED = replace(MEASURED, state="quarantined", cause="proof_failed")
GOOD_QUALITY = QualityRecord("f", "f", "measured", {"quality_kl": 0.0}, 0.001, 10, None, "")
BAD_QUALITY = replace(GOOD_QUALITY, state="failed", metrics={}, noise_floor_kl=None, cause="request_errors")


def launch(start: str, end: str, state: str = "ok") -> LaunchRecord:
    day = "2026-01-01T"
    return LaunchRecord(
        "1", "a", "f", MEASURED.engine, {}, "trial", 1, (0,), state, None, None, False, 1.0, 60.0,  # type: ignore[arg-type]
        f"{day}{start}+00:00", f"{day}{end}+00:00",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "retries", "settled"),
    [
        ([], 1, False),
        ([MEASURED], 1, True),
        ([QUARANTINED], 1, True),
        ([LASTING], 1, True),
        ([TRANSIENT], 0, True),
        ([TRANSIENT], 1, False),
        ([TRANSIENT, TRANSIENT], 1, True),
        ([TRANSIENT, TRANSIENT], 2, False),
        ([TRANSIENT, MEASURED], 1, True),
    ],
)
def test_a_point_is_settled_once_nothing_more_will_come(
    records: list[PointRecord], retries: int, settled: bool
) -> None:
    ledger = Ledger(records, OBJECTIVES, retries, True)
    assert ledger.settled("a", "c8") is settled
    assert ledger.settled_points == int(settled)
    assert not ledger.settled("a", "c1") and ledger.settled_points == int(settled)


def test_outcomes_wait_for_quality_and_for_nothing_that_will_not_come() -> None:
    waiting = Ledger([MEASURED], OBJECTIVES, 1, True)
    assert waiting.outcome("a", "c8") is None
    waiting.add(GOOD_QUALITY)
    measured = waiting.outcome("a", "c8")
    assert measured is not None and measured.values == (10.0, 0.001)  # differences below the floor are ties
    for lost in (Ledger([MEASURED, BAD_QUALITY], OBJECTIVES, 1, True), Ledger([MEASURED], OBJECTIVES, 1, False)):
        outcome = lost.outcome("a", "c8")
        assert outcome is not None and outcome.values is None and not outcome.infeasible


@pytest.mark.parametrize(
    ("records", "infeasible"), [([LASTING], True), ([TRANSIENT, TRANSIENT], False), ([QUARANTINED], False)]
)
def test_only_what_deterministically_does_not_run_is_infeasible(records: list[PointRecord], infeasible: bool) -> None:
    outcome = Ledger(records, OBJECTIVES, 1, True).outcome("a", "c8")
    assert outcome is not None and outcome.values is None and outcome.infeasible is infeasible


def test_a_good_quality_record_replaces_a_bad_one_and_not_the_other_way_round() -> None:
    ledger = Ledger([BAD_QUALITY, GOOD_QUALITY, BAD_QUALITY], OBJECTIVES, 1, True)
    assert ledger.quality("f") == GOOD_QUALITY


def test_hours_are_those_with_at_least_one_launch_alive() -> None:
    overlapping = [launch("10:00:00", "11:00:00"), launch("10:30:00", "11:30:00"), launch("10:45:00", "11:00:00")]
    apart = launch("20:00:00", "20:30:00", "failed")
    ledger = Ledger([apart, *overlapping], OBJECTIVES, 1, True)
    assert ledger.active_hours() == pytest.approx(2.0)
    assert ledger.mean_launch_s() == 60.0
    assert Ledger([apart], OBJECTIVES, 1, True).mean_launch_s() is None
    assert Ledger([], OBJECTIVES, 1, True).active_hours() == 0.0


NODE = HardwareConfig("h100x8", "gpu", 8, price_usd_per_device_hour=3.0)


def test_money_counts_every_device_of_the_node() -> None:
    budget = Budget(BudgetConfig(usd=48.0), NODE)
    assert budget.usd_per_hour() == 24.0 and budget.hours_allowed() == 2.0


@pytest.mark.parametrize(
    ("config", "hours_before", "reason"),
    [
        (BudgetConfig(), 1e6, None),
        (BudgetConfig(trials=2), 0.0, None),
        (BudgetConfig(trials=1), 0.0, "budget.trials=1 reached"),
        (BudgetConfig(hours=8), 7.9, None),
        (BudgetConfig(hours=8), 7.99, "budget.hours=8 reached: no time for another launch of 1.0 min"),
        (BudgetConfig(hours=8, usd=48), 1.99, "budget.usd=48 reached: no time for another launch of 1.0 min"),
        (BudgetConfig(hours=1, usd=48), 0.99, "budget.hours=1 reached: no time for another launch of 1.0 min"),
    ],
)
def test_the_tightest_bound_ends_a_sweep_and_says_so(
    config: BudgetConfig, hours_before: float, reason: str | None
) -> None:
    ledger = Ledger([LASTING, launch("10:00:00", "10:01:00")], OBJECTIVES, 1, True)
    assert Budget(config, NODE, hours_before).ended(ledger) == reason


def test_points_left_counts_what_is_in_flight() -> None:
    ledger = Ledger([LASTING], OBJECTIVES, 1, True)
    assert Budget(BudgetConfig(trials=10), NODE).points_left(ledger, 4) == 5
    assert Budget(BudgetConfig(trials=2), NODE).points_left(ledger, 4) == 0
    assert Budget(BudgetConfig(hours=2), NODE).points_left(ledger, 4) is None
    assert Budget(BudgetConfig(hours=2), NODE, 1.5).hours_left() == pytest.approx(0.5, abs=1e-3)
    assert Budget(BudgetConfig(trials=2), NODE).hours_left() is None
