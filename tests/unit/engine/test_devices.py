"""Without a GPU driver there is no number: nothing detected, no figure. With one, what it tells and no more."""

from __future__ import annotations

import os

import pytest
from fake_nvml import FakeNvml

from sweep.engine import devices as devices_module
from sweep.engine.devices import THROTTLE_BITS, detect_gpus, device_memory_used_mib, watch_devices

BUSY = {
    "name": "NVIDIA H100", "uuid": "GPU-1", "memory_mib": 1000, "power_w": 350.5, "energy_j": 1e6, "sm_mhz": 1755,
    "mem_mhz": 2619, "reasons": 0x4 | 0x40, "processes": {os.getpid(): 900, 999_999_999: None},
}  # fmt: skip


@pytest.fixture
def no_driver() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    pynvml.nvmlShutdown()
    pytest.skip("this machine has an NVIDIA driver")


@pytest.mark.usefixtures("no_driver")
def test_no_gpu_is_detected() -> None:
    assert detect_gpus() == []


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("devices", [[], ["0"], ["0", "7"], ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"]])
def test_memory_in_use_is_unknown_and_not_zero(devices: list[str]) -> None:
    assert device_memory_used_mib(devices) is None
    with watch_devices(devices) as sample:
        assert sample() == []


def test_a_board_that_tells_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(BUSY).install(monkeypatch)
    with watch_devices(["0"]) as sample:
        (one,) = sample()
        assert nvml.open == 1
    assert nvml.open == 0
    assert (one.device, one.memory_used_mib, one.power_w, one.energy_j) == ("0", 1000, 350.5, 1e6)
    assert (one.sm_clock_mhz, one.memory_clock_mhz) == (1755, 2619)
    assert one.throttle == ("sw_power_cap", "hw_thermal_slowdown")
    assert one.processes is not None
    ours, gone = one.processes
    assert (ours.pid, ours.memory_mib) == (os.getpid(), 900)
    assert ours.name is not None or not devices_module.pids_are_the_drivers()
    assert (gone.name, gone.memory_mib) == (None, None)


def test_what_a_slice_of_a_board_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml({"memory_mib": 5, "uuid": "MIG-7"}).install(monkeypatch)
    with watch_devices(["MIG-7", "GPU-unknown", "3"]) as sample:
        (one,) = sample()
    assert (one.device, one.memory_used_mib) == ("MIG-7", 5)
    told = {name for name, value in vars(one).items() if value is not None}
    assert told == {"device", "memory_used_mib"}


def test_reasons_are_those_of_the_real_binding() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name, bit in THROTTLE_BITS.items():
        camel = "".join(word.capitalize() for word in name.split("_"))
        assert getattr(pynvml, f"nvmlClocksEventReason{camel}") == bit
