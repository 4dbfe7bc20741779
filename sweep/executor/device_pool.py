"""Which devices of the node are free, and how a launch is told to use its own and no others."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sweep.config import HardwareConfig
from sweep.errors import ConfigError


class DevicePool:
    """Leases device ids 0..n-1. A lease is a contiguous, aligned block where one is free.

    Neighbours share NVLink bridges and a CPU socket, whose devices are numbered together. Of several blocks, the one
    whose surroundings are busiest is taken, so that wide blocks stay whole for wide launches.
    """

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
        whole = [block for block in blocks if self._free.issuperset(block)]
        ids = tuple(sorted(whole, key=self._surroundings)[0]) if whole else self._closest(count)
        self._free.difference_update(ids)
        return ids

    def _surroundings(self, block: range) -> tuple[int, ...]:
        """How many devices are free in the aligned blocks of twice, four times, … the size around this one."""
        found, width = [], 2 * len(block)
        while width < 2 * self.size:
            start = block.start // width * width
            found.append(len(self._free.intersection(range(start, start + width))))
            width *= 2
        return tuple(found)

    def _closest(self, count: int) -> tuple[int, ...]:
        """The free devices that lie closest together."""
        free = sorted(self._free)
        runs = [tuple(free[i : i + count]) for i in range(len(free) - count + 1)]
        return min(runs, key=lambda run: run[-1] - run[0])

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
