"""What the client leaves behind once its load is over: one row per request, and a summary of its own health."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from sweep.measure.arrivals import Load
from sweep.measure.latency import percentile
from sweep.measure.requests import RequestSet
from sweep.measure.stream import TokenStream, read_stream

Phase = Literal["warmup", "measured"]
Status = Literal["ok", "error", "timeout"]

COLUMNS = (
    "index", "phase", "class", "due_s", "sent_s", "first_token_s", "last_token_s", "end_s", "prompt_tokens",
    "output_tokens", "first_chunk_tokens", "chunk_times_s", "chunk_tokens", "status", "error",
)  # fmt: skip
# A request that left this much after it was due counts as late.
LATE_S = 0.01


@dataclass
class Exchange:
    """A request and its answer; times are perf_counter seconds. In a closed loop it is due when its slot came free.

    reads: (time, bytes) of each socket read; stream: what they say, once they are parsed.
    """

    index: int
    phase: Phase
    due_at: float
    sent_at: float
    ended_at: float | None = None
    status: Status = "ok"
    error: str | None = None
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    stream: TokenStream | None = None

    @property
    def late_s(self) -> float:
        return self.sent_at - self.due_at


@dataclass
class Client:
    """One client process. lags: (time, seconds) of its event loop's delay. stamped, reads: socket reads that carry the
    kernel's time, and all of them. cpu_s, wall_s: from the beginning of the load to the end of its last request.
    real_time: it ran ahead of every ordinary process.
    """

    lags: list[tuple[float, float]] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    stamped: int = 0
    reads: int = 0
    real_time: bool = False


@dataclass
class LoadRecord:
    """What happened in one load. Times are perf_counter seconds, which all processes of a machine share.

    exchanges: in order of sending. planned: measured requests. stopped_by: what ended the sending. steady_end: when a
    slot of a closed loop first found nothing to send. arrivals: of the first and last measured request of an open loop.
    """

    load: Load
    ignore_eos: bool
    planned: int
    began: float = 0.0
    began_unix_s: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    clients: list[Client] = field(default_factory=lambda: [Client()])
    stopped_by: Literal["requests", "max_load_s"] = "requests"
    steady_end: float | None = None
    arrivals: tuple[float, float] | None = None

    @property
    def measured(self) -> list[Exchange]:
        return [e for e in self.exchanges if e.phase == "measured"]

    @property
    def window(self) -> tuple[float, float, str] | None:
        """(start, end, rule) of the measured window; None if no measured request was sent."""
        measured = self.measured
        if not measured:
            return None
        ends = [e.ended_at for e in measured if e.ended_at is not None]
        if self.load.concurrency is not None:
            start, end, rule = measured[0].sent_at, self.steady_end or max(ends), "steady"
        else:
            assert self.arrivals is not None
            (start, end), rule = self.arrivals, "arrivals"
        if sum(ended_at <= end for ended_at in ends) < 2:
            end, rule = max(ends), "whole_run"
        return start, end, rule

    def parse(self, requests: RequestSet) -> None:
        """Turn what was read into tokens."""
        for exchange in self.exchanges:
            if exchange.stream is None:
                asked = int(requests.max_tokens[exchange.index])
                exchange.stream = read_stream(exchange.reads, asked, may_stop=not self.ignore_eos)
                exchange.reads = []
                if exchange.status == "ok" and exchange.stream.error is not None:
                    exchange.status, exchange.error = "error", exchange.stream.error


def merge(records: Sequence[LoadRecord]) -> LoadRecord:
    """The shares of several processes as one load: it is constant until the first slot of any of them is idle."""
    ends = [record.steady_end for record in records if record.steady_end is not None]
    arrivals = [record.arrivals for record in records if record.arrivals is not None]
    return replace(
        records[0],
        exchanges=sorted((e for record in records for e in record.exchanges), key=lambda e: e.sent_at),
        clients=[client for record in records for client in record.clients],
        stopped_by=next((r.stopped_by for r in records if r.stopped_by != "requests"), "requests"),
        steady_end=min(ends, default=None),
        arrivals=(min(a for a, _ in arrivals), max(b for _, b in arrivals)) if arrivals else None,
    )


def rows(record: LoadRecord, requests: RequestSet) -> list[dict[str, Any]]:
    """One row per request in order of sending; times in seconds since the window began (else since the load began)."""
    record.parse(requests)
    zero = record.window[0] if record.window else record.began
    result = []
    for exchange in record.exchanges:
        stream = exchange.stream
        assert stream is not None
        times = [t - zero for t in stream.chunk_times_s]
        result.append(
            {
                "index": exchange.index,
                "phase": exchange.phase,
                "class": requests.class_name(exchange.index) or None,
                "due_s": exchange.due_at - zero,
                "sent_s": exchange.sent_at - zero,
                "first_token_s": times[0] if times else None,
                "last_token_s": times[-1] if times else None,
                "end_s": None if exchange.ended_at is None else exchange.ended_at - zero,
                "prompt_tokens": stream.prompt_tokens,
                "output_tokens": stream.output_tokens,
                "first_chunk_tokens": stream.chunk_tokens[0] if times else None,
                "chunk_times_s": times,
                "chunk_tokens": stream.chunk_tokens,
                "status": exchange.status,
                "error": exchange.error,
            }
        )
    return result


def summary(record: LoadRecord, table: list[dict[str, Any]]) -> dict[str, Any]:
    """The client's health and counts; null where nothing was measured."""
    window = record.window
    start, end, rule = window or (record.began, record.began, None)
    measured = record.measured
    outcomes = [(row["phase"], row["status"]) for row in table]
    return {
        "schema": 1,
        "load": record.load.to_dict(),
        "window_s": end - start if window else None,
        "window_rule": rule,
        "window_began_unix_s": record.began_unix_s + start - record.began if window else None,
        "stopped_by": record.stopped_by,
        "counts": {
            "planned": record.planned,
            **{status: outcomes.count(("measured", status)) for status in get_args(Status)},
            "warmup": sum(phase == "warmup" for phase, _ in outcomes),
            "warmup_failed": sum(phase == "warmup" and status != "ok" for phase, status in outcomes),
            "ended_after_window": sum(e.ended_at is not None and e.ended_at > end for e in measured),
        },
        **_requested_and_delivered(record),
        "chunks_read_together_share": _read_together(table),
        **_health(record, start, max(end, measured[-1].sent_at) if measured else end),
    }


def _requested_and_delivered(record: LoadRecord) -> dict[str, float | None]:
    """What the client should have sent, and what it did.

    offered_rps, delivered_rps: of the measured requests, by the times they were due and were sent (n - 1 gaps over
    their span); offered_rps only in an open loop, where a load has due times. concurrency_mean: requests in flight,
    averaged over the window; concurrency_offered: the same with a request counted from when it was due, which in a
    closed loop is the concurrency asked (less where a turn of a conversation waits for the one before). An honest
    client delivers what is offered, whatever the server does.
    send_lateness_*_ms: sent after due; late_send_share: of the requests that left more than LATE_S too late.
    """
    measured = record.measured
    late_ms = np.array([e.late_s * 1e3 for e in measured])
    return {
        "offered_rps": None if record.load.concurrency is not None else _rate([e.due_at for e in measured]),
        "delivered_rps": _rate([e.sent_at for e in measured]),
        "concurrency_offered": _in_flight(record, lambda exchange: exchange.due_at),
        "concurrency_mean": _in_flight(record, lambda exchange: exchange.sent_at),
        "send_lateness_p99_ms": percentile(late_ms, 99),
        "send_lateness_max_ms": _max(late_ms),
        "late_send_share": float((late_ms > LATE_S * 1e3).mean()) if measured else None,
    }


def _health(record: LoadRecord, start: float, end: float) -> dict[str, float | int | None]:
    """Of the client processes: the worst of their event loops between two times, their CPU.

    client_cpu_share: of one core, by the busiest process; near 1 it could not have done more. kernel_stamped_share: of
    the socket reads whose time is the kernel's; of the rest it is when the process got to them.
    """
    # A delay belongs to the time it lasted: of a stalled loop it is only known after the end.
    lags = [np.array([lag * 1e3 for at, lag in c.lags if start <= at and at - lag <= end]) for c in record.clients]
    p99s = [p99 for of_client in lags if (p99 := percentile(of_client, 99)) is not None]
    reads = sum(client.reads for client in record.clients)
    return {
        "loop_lag_p99_ms": max(p99s, default=None),
        "loop_lag_max_ms": _max(np.concatenate(lags)),
        "processes": len(record.clients),
        "real_time": all(client.real_time for client in record.clients),
        "client_cpu_s": sum(client.cpu_s for client in record.clients),
        "client_cpu_share": max(
            (client.cpu_s / client.wall_s for client in record.clients if client.wall_s), default=None
        ),
        "wall_s": max(client.wall_s for client in record.clients),
        "kernel_stamped_share": sum(client.stamped for client in record.clients) / reads if reads else None,
    }


def _read_together(table: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the token chunks that came in one read with the one before: their times are the last one's.

    That is what the clock of a client that reads too late loses; a few may be written together by the server.
    """
    gaps = [np.diff(row["chunk_times_s"]) for row in table if len(row["chunk_times_s"]) > 1]
    return float((np.concatenate(gaps) == 0).mean()) if gaps else None


def _rate(times: Sequence[float]) -> float | None:
    span = max(times) - min(times) if times else 0.0
    return (len(times) - 1) / span if span > 0 else None


def _max(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return float(values.max()) if len(values) else None


def _in_flight(record: LoadRecord, begin: Callable[[Exchange], float]) -> float | None:
    """Exchanges under way, averaged over the window."""
    if record.window is None or record.window[1] <= record.window[0]:
        return None
    start, end, _ = record.window
    inside = (min(end if e.ended_at is None else e.ended_at, end) - max(begin(e), start) for e in record.exchanges)
    return sum(max(seconds, 0.0) for seconds in inside) / (end - start)


def write(path: Path, table: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Parquet first, then the summary, each whole or not at all: a summary means that both are there."""
    import pyarrow as pa  # not before the load: it starts threads
    import pyarrow.parquet as pq

    kinds = {
        **dict.fromkeys(("index", "prompt_tokens", "output_tokens", "first_chunk_tokens"), pa.int32()),
        **dict.fromkeys(("due_s", "sent_s", "first_token_s", "last_token_s", "end_s"), pa.float64()),
        **dict.fromkeys(("phase", "class", "status", "error"), pa.string()),
        "chunk_times_s": pa.list_(pa.float64()),
        "chunk_tokens": pa.list_(pa.int32()),
    }
    schema = pa.schema([(name, kinds[name]) for name in COLUMNS])
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(table, schema), part, compression="zstd")
    part.replace(path)
    part.write_text(json.dumps(summary, indent=1, allow_nan=False))
    part.replace(path.with_suffix(".json"))
