"""Executors run launches: spec in, records out. They know nothing of samplers, objectives or fronts."""

from __future__ import annotations

from typing import Any, Protocol

from sweep.launch.spec import LaunchSpec


class Job(Protocol):
    """A launch that was submitted."""

    @property
    def spec(self) -> LaunchSpec: ...

    def poll(self) -> list[dict[str, Any]]:
        """Events since the last poll, in order: {"event": "record", ...} or {"event": "phase", ...}."""
        ...

    @property
    def running(self) -> bool:
        """False once the launch's process is gone and its devices are free again."""
        ...

    def cancel(self) -> None:
        """Ask the launch to stop its server and end; `running` turns False when it has."""
        ...


class Executor(Protocol):
    """Runs launches side by side on disjoint devices. max_parallel: at most so many; None: as the devices allow."""

    max_parallel: int | None

    def has_room(self, devices: int) -> bool:
        """Whether a launch of that many devices could start now. A job's devices come free when `running` is read."""
        ...

    def submit(self, spec: LaunchSpec) -> Job:
        """Start a launch. Call only when has_room."""
        ...
