"""How the client processes of one load agree on a moment without talking: a file of times that all of them map.

perf_counter is the machine's monotonic clock, so a time one process writes means the same to another. Each process has
one cell per event and writes it once; an event has happened when every process has written, at the latest of the times.
Since a time is written when it is now, whoever looks at t and finds an empty cell knows that the event is after t.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

Event = Literal["ready", "warm"]
_ROWS: dict[Event, int] = {"ready": 0, "warm": 1}


class Meeting:
    """One process's view. path: made by `create`; None where a single process meets itself."""

    def __init__(self, path: Path | None, processes: int, rank: int) -> None:
        shape = (len(_ROWS), processes)
        self._times = np.zeros(shape) if path is None else np.memmap(path, dtype=np.float64, mode="r+", shape=shape)
        self._rank = rank

    @staticmethod
    def create(path: Path, processes: int) -> None:
        np.zeros((len(_ROWS), processes)).tofile(path)

    def tell(self, event: Event, at: float) -> None:
        """This process has come to the event, now (at > 0)."""
        self._times[_ROWS[event], self._rank] = at

    def happened_at(self, event: Event) -> float | None:
        """When the last process came to it; None if one has not yet."""
        times = self._times[_ROWS[event]]
        return float(times.max()) if times.all() else None
