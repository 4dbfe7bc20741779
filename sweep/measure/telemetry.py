"""What only the engine knows about a load, from its Prometheus page (/metrics) before, during and after it.

Counters are read twice and subtracted, gauges are sampled every second. A counter this vLLM version does not have, or
one that went backwards (another process answers), gives None. Warm-up is part of what is counted.
"""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

_PERIOD_S = 1.0
_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r'^([A-Za-z_:][\w:]*)(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s+(\S+)', re.MULTILINE)
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Samples = dict[str, list[float]]


def parse_prometheus(text: str) -> Samples:
    """Values by metric name, one for each label set (each engine of a deployment has its own). Text format 0.0.4."""
    samples: Samples = {}
    for name, value in _SAMPLE.findall(text):
        samples.setdefault(name, []).append(float(value))
    return samples


def scrape(base_url: str) -> Samples | None:
    """The server's current samples; None if it does not answer."""
    try:
        with _NO_PROXY.open(f"{base_url}/metrics", timeout=_TIMEOUT_S) as response:
            return parse_prometheus(response.read().decode())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class EngineReport:
    """Engine counters of one load. metrics: keys of results.metrics.METRICS.

    prompt_tokens, generation_tokens: processed during the load, which shows whether anyone else used the server.
    running_max, waiting_max: requests in and before the batch, sampled.
    """

    metrics: dict[str, float | None]
    prompt_tokens: float | None
    generation_tokens: float | None
    running_max: float | None
    waiting_max: float | None


class Telemetry:
    """`with Telemetry(base_url) as telemetry: …load…` and then telemetry.report()."""

    def __init__(self, base_url: str, period_s: float = _PERIOD_S) -> None:
        self._base_url = base_url
        self._period_s = period_s
        self._during: list[Samples] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self._before = scrape(self._base_url)
        self._thread.start()
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
        )

    def _sample(self) -> None:
        while not self._done.wait(self._period_s):
            samples = scrape(self._base_url)
            if samples is not None:
                self._during.append(samples)

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


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
