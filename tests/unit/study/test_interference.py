"""The verdict on launches side by side: beyond noise or within it, from both sides; and where there is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.results.records import PointRecord
from sweep.study.interference import judge


def record(**metrics: float | None) -> PointRecord:
    return PointRecord(
        point_id="p", launch_id="1", config_hash="c", fingerprint="f", engine={"model": "m", "args": {}, "env": {}},
        load={"concurrency": 8}, load_label="c8", params=None, purpose="baseline", devices=1, state="measured",
        metrics=metrics,
    )  # fmt: skip


@given(st.floats(0.96, 1.04), st.integers(2, 8))
def test_a_few_per_cent_are_noise(factor: float, copies: int) -> None:
    found = judge(record(tpot_p50_ms=20.0), [record(tpot_p50_ms=20.0 * factor)] * copies, "c8")
    assert found.verdict == "none" and not found.distorts and found.copies == copies


@given(st.floats(1.25, 4.0), st.integers(2, 8), st.booleans())
def test_a_quarter_is_not_whichever_way_it_goes(factor: float, copies: int, slower: bool) -> None:
    beside = 20.0 * factor if slower else 20.0 / factor
    found = judge(record(tpot_p50_ms=20.0), [record(tpot_p50_ms=beside)] * copies, "c8")
    assert found.distorts and found.metrics is not None
    assert found.metrics["tpot_p50_ms"].change == pytest.approx(beside / 20.0 - 1)
    assert "tpot_p50_ms" in found.why and found.to_dict()["metrics"]["tpot_p50_ms"]["limit"] > 0


def test_copies_that_differ_among_themselves_excuse_more() -> None:
    alone = record(tpot_p50_ms=20.0)
    together = judge(alone, [record(tpot_p50_ms=v) for v in (26.0, 26.0, 26.0, 26.0)], "c8")
    apart = judge(alone, [record(tpot_p50_ms=v) for v in (17.0, 22.0, 29.0, 38.0)], "c8")
    assert together.distorts and not apart.distorts


def test_the_worst_of_the_metrics_decides() -> None:
    alone = record(tpot_p50_ms=20.0, ttft_p50_ms=100.0, output_throughput_tok_s=1000.0)
    beside = [record(tpot_p50_ms=20.1, ttft_p50_ms=300.0, output_throughput_tok_s=990.0)] * 3
    found = judge(alone, beside, "c8")
    assert found.distorts and "ttft_p50_ms +200.0%" in found.why


def test_without_a_common_metric_there_is_no_verdict() -> None:
    found = judge(record(tpot_p50_ms=None), [record(tpot_p50_ms=20.0)] * 2, "c8")
    assert found.verdict == "not checked" and not found.distorts
