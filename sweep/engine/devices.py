"""The one seam to the GPU driver (NVML). Without NVML everything here answers "none" or None, never a number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """index: NVML's. memory_gib: total."""

    index: int
    name: str
    memory_gib: float


def detect_gpus() -> list[Gpu]:
    """The node's GPUs in NVML's order; empty without a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            total = nvml.nvmlDeviceGetMemoryInfo(handle).total
            found.append(Gpu(index, _text(nvml.nvmlDeviceGetName(handle)), total / 2**30))
        return found


def device_memory_used_mib(device_ids: Sequence[str]) -> list[float] | None:
    """Memory in use on devices named as in CUDA_VISIBLE_DEVICES (index or UUID), MiB; None where NVML does not tell."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            return [nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, d)).used / 2**20 for d in device_ids]
        except nvml.NVMLError:  # a lost GPU, an abbreviated UUID, a GPU that shares the host's memory
            return None


@contextmanager
def _nvml() -> Iterator[Any | None]:
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, device: str) -> Any:
    if device.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    return nvml.nvmlDeviceGetHandleByUUID(device.encode())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
