"""Non-inferiority: what an interval shows, does not show, and refutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.errors import ConfigError
from sweep.results.quality import check_margins, judge, newest_quality, not_shown
from sweep.results.records import QualityRecord, from_json, to_json


def record(fingerprint: str = "f", state: str = "measured", **losses: tuple[float, float, float]) -> QualityRecord:
    named = {name: dict(zip(("loss", "low", "high"), values, strict=True)) for name, values in losses.items()}
    return QualityRecord(
        fingerprint=fingerprint, reference_fingerprint="r", state=state, metrics={}, noise_floor_kl=None, positions=1,
        launch_id=None, finished_at="", losses=named,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.01, 0.019, "non-inferior"), (0.001, 0.02, "non-inferior"), (-0.01, 0.03, "not shown"),
     (0.021, 0.04, "inferior")],
)  # fmt: skip
def test_an_interval_against_a_margin_of_two_points(low: float, high: float, verdict: str) -> None:
    (found,) = judge(record(quality_task_accuracy=((low + high) / 2, low, high)), {"quality_task_accuracy": 0.02})
    assert found.verdict == verdict
    assert found.relative_miss is not None
    assert (found.relative_miss <= 1e-12) == (verdict == "non-inferior")
    assert verdict in str(found)


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0.001, 1))
def test_a_verdict_is_kept_by_every_larger_margin(loss: float, reach: float, margin: float) -> None:
    known = record(quality_kl=(loss, loss - reach, loss + reach))
    order = ["inferior", "not shown", "non-inferior"]
    verdicts = [order.index(judge(known, {"quality_kl": m})[0].verdict) for m in (margin, 2 * margin, 4 * margin)]
    assert verdicts == sorted(verdicts)


def test_what_was_not_measured_is_not_shown() -> None:
    margins = {"quality_kl": 0.05}
    assert judge(None, margins)[0].verdict == "not measured"
    assert judge(record(state="failed"), margins)[0].relative_miss is None
    good, bad = record("good", quality_kl=(0.01, 0.0, 0.02)), record("bad", quality_kl=(0.2, 0.1, 0.3))
    found = not_shown(["good", "bad", "unknown", "bad"], [good, bad], margins)
    assert list(found) == ["bad", "unknown"]
    assert found["bad"] == "quality_kl inferior: loss 0.2 (0.1 to 0.3), margin 0.05"
    assert not_shown(["good", "bad", "unknown"], [good, bad], {}) == {}


def test_the_newest_measured_record_counts() -> None:
    first, second = record(quality_kl=(0.2, 0.1, 0.3)), record(quality_kl=(0.01, 0.0, 0.02))
    assert newest_quality([first, second, record(state="failed")])["f"] is second
    assert newest_quality([record(state="failed"), first])["f"] is first


def test_a_record_survives_its_line() -> None:
    whole = record(quality_kl=(0.2, 0.1, 0.3))
    again = from_json(to_json(whole))
    assert isinstance(again, QualityRecord) and again.losses == whole.losses and not again.identical


@pytest.mark.parametrize(
    ("margins", "message"),
    [
        ({"quality_kl": 0.0}, "quality.non_inferiority.quality_kl=0 is no loss"),
        ({"quality_kl": -0.02}, "is no loss"),
        ({"ttft_p99_ms": 1.0}, "ttft_p99_ms is not compared with a reference"),
        ({"quality_kI": 0.1}, "quality_kI is not compared"),
    ],
)
def test_margins_that_mean_nothing_are_refused(margins: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_margins(margins)
    check_margins({"quality_kl": 0.05, "quality_task_accuracy.everyday": 0.02, "quality_perplexity": 0.3})
