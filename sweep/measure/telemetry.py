"""What only the engine and its devices know of a load: Prometheus page (/metrics) and NVML, before, during and after.

Counters are read twice and subtracted, gauges are sampled every second. A counter this vLLM version does not have, or
one that went backwards (another process answers), gives None. Warm-up is part of what is counted.

Power is meant for the measured window alone: the growth of the device's energy counter between the window's ends, read
off the samples around them by straight lines, divided by the window's length; where a device has no such counter, the
mean of the power samples inside the window. Nothing of it exists without NVML.
"""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import numpy as np

from sweep.engine.devices import DeviceSample, watch_devices
from sweep.engine.failures import FailureCause, LaunchFailure

_PERIOD_S = 1.0
_TIMEOUT_S = 5.0
_IDLE_POLL_S = 0.05
_SAMPLE = re.compile(r'^([A-Za-z_:][\w:]*)(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s+(\S+)', re.MULTILINE)
_KV_BLOCKS = re.compile(r'^vllm:cache_config_info\{.*?\bnum_gpu_blocks="(\d+)"', re.MULTILINE)
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Samples = dict[str, list[float]]


def parse_prometheus(text: str) -> Samples:
    """Values by metric name, one for each label set (each engine of a deployment has its own). Text format 0.0.4.

    The KV-cache blocks of each engine, which vLLM tells as a label, come as "vllm:num_gpu_blocks".
    """
    samples: Samples = {}
    for name, value in _SAMPLE.findall(text):
        samples.setdefault(name, []).append(float(value))
    if blocks := _KV_BLOCKS.findall(text):
        samples["vllm:num_gpu_blocks"] = [float(n) for n in blocks]
    return samples


def scrape(base_url: str) -> Samples | None:
    """The server's current samples; None if it does not answer."""
    try:
        with _NO_PROXY.open(f"{base_url}/metrics", timeout=_TIMEOUT_S) as response:
            return parse_prometheus(response.read().decode())
    except (OSError, ValueError):
        return None


def await_idle(base_url: str, timeout_s: float) -> float | None:
    """Wait until no request runs or waits in the engine; returns the seconds that took.

    None where the server does not tell its requests. Raises LaunchFailure (load_timeout) when it is still busy then.
    """
    began = time.monotonic()
    while True:
        samples = scrape(base_url) or {}
        names = [n for n in ("vllm:num_requests_running", "vllm:num_requests_waiting") if n in samples]
        busy = {name.rpartition("_")[2]: sum(samples[name]) for name in names}
        waited_s = time.monotonic() - began
        if not names:
            return None
        if not any(busy.values()):
            return waited_s
        if waited_s >= timeout_s:
            left = " and ".join(f"{n:g} {state}" for state, n in busy.items())
            raise LaunchFailure(
                FailureCause.load_timeout,
                f"requests of before are still in the engine after {timeout_s:g} s ({left}): the load was not begun",
            )
        time.sleep(_IDLE_POLL_S)


@dataclass(frozen=True)
class DeviceReport:
    """One device over a load. Clocks: lowest, mean and highest sample in MHz, inside the measured window.

    power_mean_w: see the module. energy_j: power_mean_w x the window. throttle: share of the samples in the window that
    had each reason. processes: whatever had a context there at any time, ours included.
    """

    device: str
    memory_before_mib: float | None
    memory_after_mib: float | None
    power_mean_w: float | None
    power_max_w: float | None
    energy_j: float | None
    sm_clock_mhz: tuple[float, float, float] | None
    memory_clock_mhz: tuple[float, float, float] | None
    throttle: dict[str, float] | None
    processes: list[dict[str, Any]] | None


@dataclass(frozen=True)
class EngineReport:
    """Engine counters of one load. metrics: keys of results.metrics.METRICS.

    prompt_tokens, generation_tokens: processed during the load, which shows whether anyone else used the server.
    running_max, waiting_max: requests in and before the batch, sampled. kv_blocks: of all engines together.
    """

    metrics: dict[str, float | None]
    prompt_tokens: float | None
    generation_tokens: float | None
    running_max: float | None
    waiting_max: float | None
    kv_blocks: float | None = None


class Telemetry:
    """`with Telemetry(base_url) as telemetry: …load…` and then telemetry.report().

    device_ids: as in CUDA_VISIBLE_DEVICES, for `devices`.
    """

    def __init__(self, base_url: str, device_ids: Sequence[str] = (), period_s: float = _PERIOD_S) -> None:
        self._base_url = base_url
        self._device_ids = device_ids
        self._period_s = period_s
        self._before: Samples | None = None
        self._after: Samples | None = None
        self._during: list[Samples] = []
        self._of_devices: list[tuple[float, list[DeviceSample]]] = []
        self._begun = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self._before = scrape(self._base_url)
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._after = scrape(self._base_url) if kind is None else None

    def report(self) -> EngineReport:
        queue_s = _ratio(
            self._counted("request_queue_time_seconds_sum"), self._counted("request_queue_time_seconds_count")
        )
        return EngineReport(
            metrics={
                "preemptions": self._counted("num_preemptions"),
                "prefix_cache_hit_rate": _ratio(
                    self._counted("prefix_cache_hits"), self._counted("prefix_cache_queries")
                ),
                "kv_cache_usage_max": self._highest(("kv_cache_usage_perc", "gpu_cache_usage_perc"), max),
                "queue_time_mean_ms": None if queue_s is None else queue_s * 1e3,
                "spec_acceptance_rate": _ratio(
                    self._counted("spec_decode_num_accepted_tokens"), self._counted("spec_decode_num_draft_tokens")
                ),
            },
            prompt_tokens=self._counted("prompt_tokens"),
            generation_tokens=self._counted("generation_tokens"),
            running_max=self._highest(("num_requests_running",), sum),
            waiting_max=self._highest(("num_requests_waiting",), sum),
            kv_blocks=None if (blocks := (self._after or {}).get("vllm:num_gpu_blocks")) is None else sum(blocks),
        )

    def devices(self, window_began_unix_s: float | None, window_s: float | None) -> list[DeviceReport]:
        """One report for each device of this load; empty without a driver. The window: None if nothing was measured."""
        begin = window_began_unix_s or 0.0
        names = [sample.device for sample in self._of_devices[0][1]] if self._of_devices else []
        found = []
        for name in names:
            mine = [(at, s) for at, samples in self._of_devices for s in samples if s.device == name]
            found.append(device_report(mine, begin, begin + (window_s or 0.0)))
        return found

    def _sample(self) -> None:
        try:
            with watch_devices(self._device_ids) as devices:
                self._of_devices.append((time.time(), devices()))
                self._begun.set()
                while not self._done.wait(self._period_s):
                    self._of_devices.append((time.time(), devices()))
                    samples = scrape(self._base_url)
                    if samples is not None:
                        self._during.append(samples)
                self._of_devices.append((time.time(), devices()))
        finally:
            self._begun.set()  # a driver that fails in a new way must not hold the load up

    def _counted(self, name: str) -> float | None:
        """Growth of a counter over the load, summed over engines. Newer clients of Prometheus append _total."""
        if self._before is None or self._after is None:
            return None
        for full in (f"vllm:{name}_total", f"vllm:{name}"):
            if full in self._after:
                grown = sum(self._after[full]) - sum(self._before.get(full, []))
                return grown if grown >= 0 else None
        return None

    def _highest(self, names: tuple[str, ...], over_engines: Callable[[list[float]], float]) -> float | None:
        """The highest sampled value of a gauge under the first of its names that exists."""
        for name in names:
            values = [over_engines(s[f"vllm:{name}"]) for s in self._during if f"vllm:{name}" in s]
            if values:
                return max(values)
        return None


def device_report(samples: Sequence[tuple[float, DeviceSample]], begin: float, end: float) -> DeviceReport:
    """What (unix time, sample) pairs of one device, in order of time, say about the window from begin to end."""
    inside = [sample for at, sample in samples if begin <= at <= end]
    first, last = samples[0][1], samples[-1][1]
    powers = [s.power_w for s in inside if s.power_w is not None]
    power_w = _mean_power_w(samples, begin, end)
    reasons = [s.throttle for s in inside if s.throttle is not None]
    counted = Counter(name for names in reasons for name in names)
    seen = {p.pid: p for _, s in samples for p in s.processes or ()}
    return DeviceReport(
        device=first.device,
        memory_before_mib=first.memory_used_mib,
        memory_after_mib=last.memory_used_mib,
        power_mean_w=power_w,
        power_max_w=max(powers, default=None),
        energy_j=None if power_w is None else power_w * (end - begin),
        sm_clock_mhz=_spread([s.sm_clock_mhz for s in inside]),
        memory_clock_mhz=_spread([s.memory_clock_mhz for s in inside]),
        throttle={name: n / len(reasons) for name, n in counted.items()} if reasons else None,
        processes=None if all(s.processes is None for _, s in samples) else [asdict(p) for p in seen.values()],
    )


def _mean_power_w(samples: Sequence[tuple[float, DeviceSample]], begin: float, end: float) -> float | None:
    counter = [(at, s.energy_j) for at, s in samples if s.energy_j is not None]
    if end > begin and len(counter) > 1 and counter[0][0] <= begin and end <= counter[-1][0]:
        times, joules = zip(*counter, strict=True)
        grown = np.interp([begin, end], times, joules)
        if grown[1] >= grown[0]:
            return float(grown[1] - grown[0]) / (end - begin)
    powers = [s.power_w for at, s in samples if s.power_w is not None and begin <= at <= end]
    return float(np.mean(powers)) if powers else None


def _spread(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), float(np.mean(known)), max(known)) if known else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
