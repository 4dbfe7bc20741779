"""Without a GPU driver there is no number: nothing detected, no memory figure."""

from __future__ import annotations

import pytest

from sweep.engine.devices import detect_gpus, device_memory_used_mib


@pytest.fixture(autouse=True)
def no_driver() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    pynvml.nvmlShutdown()
    pytest.skip("this machine has an NVIDIA driver")


def test_no_gpu_is_detected() -> None:
    assert detect_gpus() == []


@pytest.mark.parametrize("devices", [[], ["0"], ["0", "7"], ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"]])
def test_memory_in_use_is_unknown_and_not_zero(devices: list[str]) -> None:
    assert device_memory_used_mib(devices) is None
