"""One long load cut into equal windows of time, each summed up as a load of its own: what drift is seen in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sweep.measure.cost import per_device_metrics
from sweep.measure.latency import Run, summarize

if TYPE_CHECKING:
    import pyarrow as pa

    from sweep.measure.workload import WorkloadSpec

MOST = 10
_TIMES = ("due_s", "sent_s", "first_token_s", "last_token_s", "end_s")


def windows(
    table: pa.Table,
    summary: Mapping[str, Any],
    spec: WorkloadSpec,
    *,
    least_requests: int,
    price_usd_per_device_hour: float,
    devices: int,
) -> list[dict[str, float | None]]:
    """Metrics of each window in order of time, as latency.summarize has them, and the cost.

    There are as many windows as leave each `least_requests` measured requests on average, at most 10. A request belongs
    to the window it was sent in; tokens and completions count in the window they fall in, whoever sent them.
    """
    window_s = summary["window_s"]
    measured = int((table["phase"].to_numpy() == "measured").sum())
    if not window_s or not measured:
        return []
    count = max(1, min(MOST, measured // least_requests))
    length_s = window_s / count
    found = []
    for i in range(count):
        last = i == count - 1
        part = _shifted(table, i * length_s, np.inf if last else length_s)
        own = {**summary, "window_s": length_s}
        metrics = summarize(Run(part, own), own, spec)
        rate = metrics["output_throughput_tok_s"]
        found.append({**metrics, **per_device_metrics(price_usd_per_device_hour, devices, rate)})
    return found


def _shifted(table: pa.Table, start_s: float, length_s: float) -> pa.Table:
    """The table as if the window had begun at start_s; requests sent outside it are no measured ones."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sent = table["sent_s"].to_numpy()
    # The first request is sent a moment before the window's own beginning is noted.
    inside = (sent >= start_s if start_s else sent > -np.inf) & (sent < start_s + length_s)
    phase = np.where((table["phase"].to_numpy() == "measured") & inside, "measured", "warmup")
    columns = {name: table[name] for name in table.column_names}
    columns |= {name: pc.subtract(table[name], start_s) for name in _TIMES}
    times = table["chunk_times_s"].combine_chunks()
    lengths = pc.list_value_length(times).to_numpy(zero_copy_only=False)
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    columns["chunk_times_s"] = pa.ListArray.from_arrays(offsets, pc.subtract(times.flatten(), start_s))
    return pa.table({**columns, "phase": phase})
