"""This node: one worker process per launch, packed onto its devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sweep.config import HardwareConfig
from sweep.engine.processes import kill_leftovers
from sweep.executor.device_pool import DevicePool, check_devices, device_env
from sweep.launch.spec import CONTROLLER_PID, EVENTS_FILE, WORKER_LOG, LaunchSpec

# What a worker may take to end beyond the time its server has to stop.
_CANCEL_MARGIN_S = 30.0


class LocalJob:
    """A worker process and the events it has written so far."""

    def __init__(self, spec: LaunchSpec, pool: DevicePool) -> None:
        self.spec = spec
        self._pool = pool
        self._events = spec.folder / EVENTS_FILE
        self._offset = 0
        self.released = False
        self._cancelled_at: float | None = None
        spec_path = spec.write()
        with (spec.folder / WORKER_LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sweep.launch.worker", str(spec_path)],
                env={**os.environ, CONTROLLER_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the controller alone, which then stops launches in order
            )

    def poll(self) -> list[dict[str, Any]]:
        events, self._offset = read_events(self._events, self._offset)
        return events

    @property
    def running(self) -> bool:
        if self._process.poll() is None:
            limit_s = self.spec.stop_timeout_s + _CANCEL_MARGIN_S
            if self._cancelled_at is not None and time.monotonic() - self._cancelled_at > limit_s:
                self._process.kill()
            return True
        if not self.released:
            kill_leftovers(self.spec.mark)  # nothing to do after an orderly end
            self._pool.release(self.spec.device_ids)
            self.released = True
        return False

    def cancel(self) -> None:
        if self._process.poll() is None and self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
            os.kill(self._process.pid, signal.SIGTERM)


class LocalExecutor:
    """Packs launches of different widths onto one node's devices. Raises ConfigError for devices that are not there."""

    def __init__(self, hardware: HardwareConfig, max_parallel: int | None) -> None:
        check_devices(hardware)
        self._hardware = hardware
        self._pool = DevicePool(hardware.devices)
        self.max_parallel = max_parallel
        self._jobs: list[LocalJob] = []

    def has_room(self, devices: int) -> bool:
        # Not asked whether they run: devices come free when the study notices, so that it learns before it launches.
        self._jobs = [job for job in self._jobs if not job.released]
        slots_left = self.max_parallel is None or len(self._jobs) < self.max_parallel
        return slots_left and devices <= self._pool.free

    def submit(self, spec: LaunchSpec) -> LocalJob:
        ids = self._pool.acquire(spec.devices)
        if ids is None:
            raise RuntimeError(f"{spec.devices} devices asked, {self._pool.free} free")
        job = LocalJob(spec.on_devices(ids, device_env(self._hardware, ids)), self._pool)
        self._jobs.append(job)
        return job


def read_events(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Whole lines after offset, and the new offset. A line still being written is left for the next call."""
    if not path.exists():
        return [], offset
    with path.open("rb") as f:
        f.seek(offset)
        data = f.read()
    end = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:end].splitlines() if line.strip()], offset + end
