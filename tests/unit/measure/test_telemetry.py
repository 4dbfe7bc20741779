from __future__ import annotations

import time
from typing import Any

import pytest
from fake_nvml import FakeNvml

from sweep.engine.devices import DeviceProcess, DeviceSample
from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.telemetry import Telemetry, await_idle, device_report, parse_prometheus


def report(
    before: dict[str, list[float]] | None, after: dict[str, list[float]] | None, during: list[Any] | None = None
) -> Any:
    telemetry = Telemetry("http://unused")
    telemetry._before, telemetry._after, telemetry._during = before, after, during or []
    return telemetry.report()


def test_prometheus_text_with_labels_comments_and_odd_values() -> None:
    text = """# HELP vllm:x_total Things {that} count.
# TYPE vllm:x_total counter
vllm:x_total{engine="0",model_name="a \\"quoted\\" } brace"} 3.0
vllm:x_total{engine="1"} 4e2 1700000000
vllm:plain 7
vllm:inf_bucket{le="+Inf"} +Inf
"""
    assert parse_prometheus(text) == {
        "vllm:x_total": [3.0, 400.0],
        "vllm:plain": [7.0],
        "vllm:inf_bucket": [float("inf")],
    }


def test_kv_blocks_are_a_label_of_vllm() -> None:
    text = "\n".join(f'vllm:cache_config_info{{block_size="16",engine="{e}",num_gpu_blocks="{n}"}} 1.0'
                     for e, n in enumerate((100, 120)))  # fmt: skip
    samples = parse_prometheus(text)
    assert samples["vllm:num_gpu_blocks"] == [100.0, 120.0]
    assert report({}, samples).kv_blocks == 220.0
    assert report({}, {}).kv_blocks is None


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_counters_are_differences_under_either_name(suffix: str) -> None:
    before = {f"vllm:num_preemptions{suffix}": [1.0, 2.0], f"vllm:prefix_cache_hits{suffix}": [10.0],
              f"vllm:prefix_cache_queries{suffix}": [100.0]}  # fmt: skip
    after = {f"vllm:num_preemptions{suffix}": [1.0, 4.0], f"vllm:prefix_cache_hits{suffix}": [60.0],
             f"vllm:prefix_cache_queries{suffix}": [300.0]}  # fmt: skip
    metrics = report(before, after).metrics
    assert metrics["preemptions"] == 2.0
    assert metrics["prefix_cache_hit_rate"] == 0.25


def test_queue_time_is_a_mean_over_the_requests_of_this_load() -> None:
    sums = [{"vllm:request_queue_time_seconds_sum": [s], "vllm:request_queue_time_seconds_count": [n]}
            for s, n in ((1.0, 10.0), (3.0, 50.0))]  # fmt: skip
    assert report(*sums).metrics["queue_time_mean_ms"] == pytest.approx(50.0)
    assert report(sums[0], sums[0]).metrics["queue_time_mean_ms"] is None


def test_what_is_missing_or_went_backwards_is_none_not_zero() -> None:
    backwards = report({"vllm:num_preemptions_total": [5.0]}, {"vllm:num_preemptions_total": [0.0]})
    for made in (report({}, {}), report(None, {"vllm:num_preemptions_total": [5.0]}), report({}, None), backwards):
        assert set(made.metrics.values()) == {None}
        assert made.running_max is None


def test_gauges_take_the_worst_engine_and_sum_the_queues() -> None:
    during = [
        {"vllm:kv_cache_usage_perc": [0.2, 0.6], "vllm:num_requests_running": [3.0, 4.0]},
        {"vllm:kv_cache_usage_perc": [0.5, 0.1], "vllm:num_requests_running": [1.0, 1.0]},
    ]
    made = report({}, {}, during)
    assert made.metrics["kv_cache_usage_max"] == 0.6
    assert made.running_max == 7.0
    assert made.waiting_max is None
    assert report({}, {}, [{"vllm:gpu_cache_usage_perc": [0.3]}]).metrics["kv_cache_usage_max"] == 0.3


def test_a_server_that_does_not_answer_gives_none() -> None:
    with Telemetry("http://127.0.0.1:9") as telemetry:
        pass
    assert set(telemetry.report().metrics.values()) == {None}


# ---------------------------------------------------------------- idle before a load


def test_a_load_waits_for_the_requests_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [{"vllm:num_requests_running": [n], "vllm:num_requests_waiting": [0.0]} for n in (3.0, 1.0, 0.0)]
    monkeypatch.setattr("sweep.measure.telemetry.scrape", lambda _: left.pop(0))
    waited_s = await_idle("http://unused", 5.0)
    assert waited_s is not None and waited_s >= 0.1 and left == []


def test_a_server_that_stays_busy_is_a_cause_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"vllm:num_requests_running": [2.0, 1.0], "vllm:num_requests_waiting": [4.0]}
    monkeypatch.setattr("sweep.measure.telemetry.scrape", lambda _: busy)
    with pytest.raises(LaunchFailure, match=r"after 0\.1 s \(3 running and 4 waiting\)") as failure:
        await_idle("http://unused", 0.1)
    assert failure.value.cause is FailureCause.load_timeout


def test_nothing_is_waited_for_where_the_server_does_not_tell() -> None:
    assert await_idle("http://127.0.0.1:9", 5.0) is None


# ---------------------------------------------------------------- devices


def sample(power_w: float | None, energy_j: float | None, **changes: Any) -> DeviceSample:
    base: dict[str, Any] = {"memory_used_mib": 10.0, "sm_clock_mhz": 1700.0, "memory_clock_mhz": None,
                            "throttle": (), "processes": ()}  # fmt: skip
    return DeviceSample("0", power_w=power_w, energy_j=energy_j, **(base | changes))


def test_energy_is_the_growth_of_the_counter_within_the_window_alone() -> None:
    joules = [(t, sample(None, 1000 + 100 * t + (5000 if t > 8 else 0))) for t in range(11)]  # a burst after it
    found = device_report(joules, 2.5, 7.5)
    assert found.power_mean_w == pytest.approx(100) and found.energy_j == pytest.approx(500)


def test_power_is_the_mean_of_its_samples_where_energy_is_not_counted() -> None:
    watts = [(float(t), sample(w, None)) for t, w in enumerate((50, 300, 400, 500, 50))]
    found = device_report(watts, 1.0, 3.0)
    assert (found.power_mean_w, found.power_max_w, found.energy_j) == (400, 500, 800)


def test_without_power_there_is_no_energy_and_a_reset_counter_is_none() -> None:
    for energies in ((None, None), (100.0, 5.0)):
        found = device_report([(0.0, sample(None, energies[0])), (9.0, sample(None, energies[1]))], 1.0, 8.0)
        assert (found.power_mean_w, found.energy_j, found.power_max_w) == (None, None, None)


def test_clocks_throttling_memory_and_processes_of_a_device() -> None:
    other = DeviceProcess(7, "train.py", 4096.0)
    course = [
        (0.0, sample(1.0, None, memory_used_mib=5.0, processes=(other,))),
        (1.0, sample(1.0, None, sm_clock_mhz=1000.0, throttle=("sw_power_cap", "hw_slowdown"))),
        (2.0, sample(1.0, None, sm_clock_mhz=2000.0, throttle=("sw_power_cap",), memory_used_mib=8.0)),
    ]
    found = device_report(course, 0.5, 2.5)
    assert found.sm_clock_mhz == (1000.0, 1500.0, 2000.0) and found.memory_clock_mhz is None
    assert found.throttle == {"sw_power_cap": 1.0, "hw_slowdown": 0.5}
    assert (found.memory_before_mib, found.memory_after_mib) == (5.0, 8.0)
    assert found.processes == [{"pid": 7, "name": "train.py", "memory_mib": 4096.0}]


def test_the_thread_samples_devices_from_its_first_to_its_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time()
    nvml = FakeNvml({"power_w": 200.0, "energy_j": lambda: 300 * (time.time() - began)}).install(monkeypatch)
    with Telemetry("http://127.0.0.1:9", ["0"], period_s=0.05) as telemetry:
        begin = time.time()
        time.sleep(0.3)
        end = time.time()
    (found,) = telemetry.devices(begin, end - begin)
    assert found.power_mean_w == pytest.approx(300, rel=0.05) and found.power_max_w == 200
    assert found.energy_j == pytest.approx(300 * (end - begin), rel=0.05)
    assert nvml.open == 0


def test_without_a_driver_there_is_no_device() -> None:
    with Telemetry("http://127.0.0.1:9", ["no such device"]) as telemetry:
        pass
    assert telemetry.devices(time.time(), 1.0) == []
