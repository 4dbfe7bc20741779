"""Leases of devices, and what confines a launch to its own."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sweep.config import HardwareConfig
from sweep.errors import ConfigError
from sweep.executor.device_pool import DevicePool, check_devices, device_env


class Leasing(RuleBasedStateMachine):
    """Any order of leasing and returning: leases are disjoint, exist, and everything returned can be leased again."""

    size = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = DevicePool(self.size)
        self.leases: list[tuple[int, ...]] = []

    @rule(count=st.integers(1, 9))
    def acquire(self, count: int) -> None:
        free = self.pool.free
        ids = self.pool.acquire(count)
        assert (ids is None) == (count > free)
        if ids is not None:
            assert len(ids) == len(set(ids)) == count
            self.leases.append(ids)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @invariant()
    def disjoint_and_counted(self) -> None:
        leased = [device for ids in self.leases for device in ids]
        assert len(leased) == len(set(leased)) and set(leased) <= set(range(self.size))
        assert self.pool.free == self.size - len(leased)


TestLeasing = Leasing.TestCase


@given(st.integers(1, 16), st.sampled_from([1, 2, 4, 8]))
def test_a_lease_is_an_aligned_block_while_the_pool_is_not_fragmented(size: int, width: int) -> None:
    pool = DevicePool(size)
    while (ids := pool.acquire(width)) is not None and size % width == 0:
        assert ids == tuple(range(ids[0], ids[0] + width)) and ids[0] % width == 0


def test_a_fragmented_pool_still_leases_what_is_free() -> None:
    pool = DevicePool(4)
    leases = [pool.acquire(1) for _ in range(4)]
    for ids in (leases[1], leases[3]):
        assert ids is not None
        pool.release(ids)
    assert pool.acquire(2) == (1, 3)


def gpu(devices: int) -> HardwareConfig:
    return HardwareConfig(name="node", device="gpu", devices=devices)


def cpu(devices: int) -> HardwareConfig:
    return HardwareConfig(name="cpu", device="cpu", devices=devices)


@pytest.mark.parametrize(
    ("outer", "ids", "expected"),
    [
        (None, (0, 1), "0,1"),
        ("", (3,), "3"),
        ("4,5,6,7", (0, 1), "4,5"),
        ("4, 5 ,6", (2,), "6"),
        ("GPU-aa,GPU-bb", (1,), "GPU-bb"),
    ],
)
def test_gpu_launches_see_their_devices_within_the_users_own_selection(
    monkeypatch: pytest.MonkeyPatch, outer: str | None, ids: tuple[int, ...], expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    assert device_env(gpu(8), ids) == {"CUDA_VISIBLE_DEVICES": expected}


def test_one_cpu_slot_is_left_alone_and_several_share_the_cores_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 8, 9, 10})
    assert device_env(cpu(1), (0,)) == {}
    shares = [device_env(cpu(3), (i,))["VLLM_CPU_OMP_THREADS_BIND"] for i in range(3)]
    assert shares == ["2,3", "4,5", "8,9"]


def test_devices_that_are_not_there_are_named_before_anything_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match=r"hardware.devices=8, but only 2 are selected by CUDA_VISIBLE_DEVICES") as e:
        check_devices(gpu(8))
    assert "hardware.devices=2" in (e.value.hint or "")
    check_devices(gpu(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    check_devices(gpu(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ConfigError, match=r"hardware\.devices=3, but only 2 cores are available"):
        check_devices(cpu(3))
