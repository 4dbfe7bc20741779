"""What a load's summary says, on times made up by hand."""

from __future__ import annotations

import pytest

from sweep.measure.arrivals import Load
from sweep.measure.recording import Client, Exchange, LoadRecord, Phase, merge, summary


def exchange(index: int, due: float, sent: float, ended: float, phase: Phase = "measured") -> Exchange:
    return Exchange(index, phase, due, sent, ended)


def row(*chunk_times_s: float) -> dict[str, object]:
    return {"phase": "measured", "status": "ok", "chunk_times_s": list(chunk_times_s)}


def test_a_closed_loop_is_as_full_as_its_client_keeps_it() -> None:
    """One slot: each request lasts 3 s and the next one leaves 1 s after it ended, so three quarters are delivered."""
    turns = [exchange(i, 4.0 * i - 1, 4.0 * i, 4.0 * i + 3) for i in range(4)]
    record = LoadRecord(Load(1), True, 4, exchanges=turns, steady_end=16.0)
    made = summary(record, [row()] * 4)
    assert (made["window_s"], made["window_rule"]) == (16.0, "steady")
    assert made["concurrency_mean"] == pytest.approx(12 / 16)
    assert made["concurrency_offered"] == pytest.approx(15 / 16)  # the last slot's request is not due before its end
    assert made["offered_rps"] is None and made["delivered_rps"] == pytest.approx(1 / 4)
    assert made["send_lateness_max_ms"] == 1000.0 and made["late_send_share"] == 1.0
    assert made["send_lateness_p99_ms"] is None  # four requests have no 99th percentile


def test_an_open_loop_compares_when_requests_left_with_when_they_were_due() -> None:
    sent = [0.0, 0.105, 0.4]
    arrivals = [exchange(i, 0.1 * i, at, 1.0) for i, at in enumerate(sent)]
    record = LoadRecord(Load(None, 10.0), True, 3, exchanges=arrivals, arrivals=(0.0, 0.2))
    made = summary(record, [row()] * 3)
    assert made["offered_rps"] == pytest.approx(10.0) and made["delivered_rps"] == pytest.approx(5.0)
    assert made["late_send_share"] == pytest.approx(1 / 3)  # 5 ms is not late, 200 ms is
    assert made["concurrency_offered"] == pytest.approx((1.0 + 0.9 + 0.8) / 1.0)  # widened to the whole run


def test_requests_that_all_come_at_once_have_no_rate() -> None:
    burst = [exchange(i, 0.0, 0.0, 1.0) for i in range(3)]
    made = summary(LoadRecord(Load(None, 9.0), True, 3, exchanges=burst, arrivals=(0.0, 0.0)), [row()] * 3)
    assert made["offered_rps"] is None and made["delivered_rps"] is None


def test_chunks_read_together_are_counted() -> None:
    record = LoadRecord(Load(1), True, 2, exchanges=[exchange(0, 0, 0, 1), exchange(1, 1, 1, 2)], steady_end=2.0)
    assert summary(record, [row(0.1, 0.2, 0.2), row(0.3, 0.3, 0.4)])["chunks_read_together_share"] == 0.5
    assert summary(record, [row(0.1), row()])["chunks_read_together_share"] is None


def test_several_processes_are_judged_by_the_worst_of_them() -> None:
    lags = [[(t / 100, 0.001) for t in range(150)], [(t / 100, 0.004) for t in range(150)]]
    records = [
        LoadRecord(
            Load(2), True, 2, exchanges=[exchange(k, 0.0, 0.1 * (1 - k), 1.0 + k)], steady_end=1.5 - k / 4,
            clients=[Client(lags[k], cpu_s=1.0 + k, wall_s=2.0, stamped=9, reads=10, real_time=k == 0)],
            stopped_by="requests" if k == 0 else "max_load_s",
        )
        for k in range(2)
    ]  # fmt: skip
    record = merge(records)
    assert [e.index for e in record.exchanges] == [1, 0]  # in order of sending
    made = summary(record, [row()] * 2)
    assert (made["processes"], made["real_time"], made["stopped_by"]) == (2, False, "max_load_s")
    assert (made["loop_lag_p99_ms"], made["loop_lag_max_ms"]) == (4.0, 4.0)
    assert (made["client_cpu_s"], made["client_cpu_share"], made["kernel_stamped_share"]) == (3.0, 1.0, 0.9)
    assert record.steady_end == 1.25
