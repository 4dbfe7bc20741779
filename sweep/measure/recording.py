"""What the client leaves behind once its load is over: one row per request, and a summary of its own health."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from sweep.measure.latency import percentile
from sweep.measure.requests import RequestSet
from sweep.measure.stream import read_stream

if TYPE_CHECKING:
    from sweep.measure.client import LoadRun

Phase = Literal["warmup", "measured"]
Status = Literal["ok", "error", "timeout"]

COLUMNS = (
    "index", "phase", "class", "due_s", "sent_s", "first_token_s", "last_token_s", "end_s", "prompt_tokens",
    "output_tokens", "first_chunk_tokens", "chunk_times_s", "chunk_tokens", "status", "error",
)  # fmt: skip


def rows(run: LoadRun, requests: RequestSet) -> list[dict[str, Any]]:
    """One row per request in order of sending; times in seconds since the window began (else since the load began)."""
    zero = run.window[0] if run.window else run.began
    result = []
    for exchange in run.exchanges:
        asked = int(requests.max_tokens[exchange.index])
        stream = read_stream(exchange.reads, asked, may_stop=not run.job.ignore_eos)
        status, error = exchange.status, exchange.error
        if status == "ok" and stream.error is not None:
            status, error = "error", stream.error
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
                "status": status,
                "error": error,
            }
        )
    return result


def summary(run: LoadRun, table: list[dict[str, Any]]) -> dict[str, Any]:
    """The client's health and counts; null where nothing was measured."""
    start, end, rule = run.window or (run.began, run.began, None)
    measured = run.measured
    sending_ended = max(end, measured[-1].sent_at) if measured else end
    lags = np.array([lag * 1e3 for at, lag in run.lags if start <= at <= sending_ended])
    outcomes = [(row["phase"], row["status"]) for row in table]
    return {
        "schema": 1,
        "load": run.load.to_dict(),
        "window_s": end - start if run.window else None,
        "window_rule": rule,
        "window_began_unix_s": run.began_unix_s + start - run.began if run.window else None,
        "stopped_by": run.stopped_by,
        "counts": {
            "planned": run.planned,
            **{status: outcomes.count(("measured", status)) for status in get_args(Status)},
            "warmup": sum(phase == "warmup" for phase, _ in outcomes),
            "warmup_failed": sum(phase == "warmup" and status != "ok" for phase, status in outcomes),
            "ended_after_window": sum(e.ended_at is not None and e.ended_at > end for e in measured),
        },
        "loop_lag_p99_ms": percentile(lags, 99),
        "loop_lag_max_ms": float(lags.max()) if len(lags) else None,
        "send_lateness_p99_ms": percentile(np.array([(e.sent_at - e.due_at) * 1e3 for e in measured]), 99),
        "cpu_s": run.cpu_s,
        "wall_s": run.wall_s,
        "event_loop": run.event_loop,
    }


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
