"""The one seam to the GPU driver (NVML). Without NVML everything here answers "none" or None, never a number.

What one query does not tell (a MIG slice has no clocks, old boards count no energy) is None, and the rest stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

_T = TypeVar("_T")

# Bits of nvmlDeviceGetCurrentClocksEventReasons, by the names of nvml.h (NVML API reference, "clocks event reasons").
THROTTLE_BITS: Mapping[str, int] = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
# /proc/self/ns/pid of the namespace whose numbers the driver uses (PROC_PID_INIT_INO in Linux's proc_ns.h).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Gpu:
    """index: NVML's. memory_gib: total."""

    index: int
    name: str
    memory_gib: float


@dataclass(frozen=True)
class DeviceProcess:
    """A process with a context on a device. pid: the driver's, which a container does not share. memory_mib: there."""

    pid: int
    name: str | None
    memory_mib: float | None


@dataclass(frozen=True)
class DeviceSample:
    """One device at one moment. energy_j: a counter since the driver was loaded. throttle: names of THROTTLE_BITS."""

    device: str
    memory_used_mib: float | None
    power_w: float | None
    energy_j: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    throttle: tuple[str, ...] | None
    processes: tuple[DeviceProcess, ...] | None


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
def watch_devices(device_ids: Sequence[str]) -> Iterator[Callable[[], list[DeviceSample]]]:
    """`with watch_devices(ids) as sample: sample()` gives one DeviceSample for each device the driver knows.

    The list is empty without a driver, without devices, and once a device is lost.
    """
    with _nvml() as nvml:
        if nvml is None or not device_ids:
            yield list
            return
        handles = {device: handle for device in device_ids if (handle := _ask(nvml, _handle, nvml, device)) is not None}
        yield lambda: [_sample(nvml, device, handle) for device, handle in handles.items()]


def pids_are_the_drivers() -> bool:
    """Whether the process numbers we see are those NVML reports. In a container of its own they are others."""
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    return False


def _sample(nvml: Any, device: str, handle: Any) -> DeviceSample:
    ask = partial(_ask, nvml)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    power_mw = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    energy_mj = ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return DeviceSample(
        device,
        memory_used_mib=None if memory is None else memory.used / 2**20,
        power_w=None if power_mw is None else power_mw / 1e3,
        energy_j=None if energy_mj is None else energy_mj / 1e3,
        sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        throttle=None if reasons is None else tuple(name for name, bit in THROTTLE_BITS.items() if reasons & bit),
        processes=None if processes is None else tuple(_process(nvml, process) for process in processes),
    )


def _process(nvml: Any, process: Any) -> DeviceProcess:
    name = _ask(nvml, nvml.nvmlSystemGetProcessName, process.pid)
    if name is None and pids_are_the_drivers():
        with suppress(psutil.Error):
            name = psutil.Process(process.pid).name()
    memory = process.usedGpuMemory
    return DeviceProcess(process.pid, None if name is None else _text(name), None if memory is None else memory / 2**20)


def _ask(nvml: Any, query: Callable[..., _T], *args: Any) -> _T | None:
    """The answer, or None where this board, driver or slice of a board does not give it."""
    try:
        return query(*args)
    except nvml.NVMLError:
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
