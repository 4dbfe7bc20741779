"""Which devices of the node are free, and how a launch is told to use its own and no others."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sweep.config import HardwareConfig
from sweep.errors import ConfigError


class DevicePool:
    """Leases device ids 0..n-1. A lease is a contiguous, aligned block where one is free (NVLink neighbours)."""

    def __init__(self, devices: int) -> None:
        self.size = devices
        self._free = set(range(devices))

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, count: int) -> tuple[int, ...] | None:
        """Lease count devices, or None when fewer are free."""
        if count > len(self._free):
            return None
        blocks = [range(start, start + count) for start in range(0, self.size - count + 1, count)]
        aligned = next((b for b in blocks if self._free.issuperset(b)), None)
        ids = tuple(aligned) if aligned is not None else tuple(sorted(self._free)[:count])
        self._free.difference_update(ids)
        return ids

    def release(self, ids: Sequence[int]) -> None:
        self._free.update(ids)


def check_devices(hardware: HardwareConfig) -> None:
    """Raises ConfigError when the process may use fewer devices than hardware.devices promises."""
    if hardware.device == "cpu":
        available, what = len(os.sched_getaffinity(0)), "cores are available"
    else:
        outer = _outer_devices()
        available, what = (len(outer) if outer else hardware.devices), "are selected by CUDA_VISIBLE_DEVICES"
    if available < hardware.devices:
        raise ConfigError(
            f"hardware.devices={hardware.devices}, but only {available} {what}",
            f"set hardware.devices={available}, or make more visible",
        )


def _outer_devices() -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [name.strip() for name in names if name.strip()]


def device_env(hardware: HardwareConfig, ids: Sequence[int]) -> dict[str, str]:
    """Environment that confines a launch to its devices.

    GPU: CUDA_VISIBLE_DEVICES, within whatever the user's own CUDA_VISIBLE_DEVICES already selects. CPU: nothing when
    the whole machine is one slot, else an equal share of this process's cores per slot.
    """
    if hardware.device == "gpu":
        outer = _outer_devices()
        return {"CUDA_VISIBLE_DEVICES": ",".join(outer[i] if outer else str(i) for i in ids)}
    if hardware.devices == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // hardware.devices
    mine = [core for i in ids for core in cores[i * share : (i + 1) * share]]
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in mine)}
