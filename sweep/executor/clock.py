"""What time it is: on the wall, or in a simulation where nobody waits."""

from __future__ import annotations

import heapq
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The one source of time for a study's loop, budget and executor."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...


class WallClock:
    """Real time."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """Time that jumps to the next appointment whenever somebody sleeps, however long they meant to.

    Between two appointments nothing happens, so a sleeper who looks again and again would see nothing new. Without an
    appointment a sleep takes as long as asked.
    """

    def __init__(self, began: datetime | None = None) -> None:
        self._began = began or datetime.now(UTC)
        self._now_s = 0.0
        self._appointments: list[float] = []

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        while self._appointments and self._appointments[0] <= self._now_s:
            heapq.heappop(self._appointments)
        self._now_s = heapq.heappop(self._appointments) if self._appointments else self._now_s + seconds

    def wake_at(self, moment_s: float) -> None:
        """Something happens then: no sleep passes over it."""
        heapq.heappush(self._appointments, moment_s)

    def iso(self, moment_s: float | None = None) -> str:
        """A moment (default: now) as it is written in records."""
        moment = self._began + timedelta(seconds=self._now_s if moment_s is None else moment_s)
        return moment.isoformat(timespec="milliseconds")


WALL = WallClock()
