"""A GPU driver for machines without one: the calls of pynvml that sweep.engine.devices makes, with chosen answers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """As pynvml raises for what a board, a slice of it or an old driver does not tell."""


class FakeNvml:
    """boards: index -> what it answers. Keys: memory_mib, power_w, energy_j, sm_mhz, mem_mhz, reasons, processes."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVMLError = NVMLError

    def __init__(self, *boards: dict[str, Any]) -> None:
        self.boards = list(boards)
        self.open = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", self)  # type: ignore[arg-type]
        return self

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if index >= len(self.boards):
            raise NVMLError("invalid argument")
        return self.boards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> dict[str, Any]:
        return next((b for b in self.boards if b.get("uuid") == uuid.decode()), None) or self._lacks("uuid")

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> str:
        return str(self._of(handle, "name"))

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> Any:
        used = self._of(handle, "memory_mib") * 2**20
        return SimpleNamespace(used=used, total=80 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: dict[str, Any]) -> int:
        return int(self._of(handle, "power_w") * 1e3)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: dict[str, Any]) -> int:
        return int(self._of(handle, "energy_j") * 1e3)

    def nvmlDeviceGetClockInfo(self, handle: dict[str, Any], clock: int) -> int:
        return int(self._of(handle, "sm_mhz" if clock == self.NVML_CLOCK_SM else "mem_mhz"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: dict[str, Any]) -> int:
        return int(self._of(handle, "reasons"))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> list[Any]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * 2**20)
            for pid, mib in self._of(handle, "processes").items()
        ]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        names: dict[int, str] = {k: v for board in self.boards for k, v in board.get("names", {}).items()}
        return names[pid].encode() if pid in names else self._lacks("name")

    def _of(self, handle: dict[str, Any], key: str) -> Any:
        value = handle.get(key)
        if callable(value):
            return value()
        return self._lacks(key) if value is None else value

    def _lacks(self, what: str) -> Any:
        raise NVMLError(f"not supported: {what}")
