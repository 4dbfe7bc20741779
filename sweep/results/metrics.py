"""Every metric sweep can report: its unit, its direction, and what it means. The one vocabulary of the project.

Column names in tables, SLA bounds and objectives are keys of METRICS. Units are part of the name. A metric of PER_CLASS
also exists for each request class of a workload that has classes, as "<metric>.<class>": goodput_rps.interactive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sweep.errors import ConfigError, did_you_mean

Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class Metric:
    """name: column name. unit: for people. direction: which way is better. label: axis title."""

    name: str
    unit: str
    direction: Direction
    label: str
    description: str

    @property
    def sign(self) -> float:
        """+1 where lower is better, -1 where higher is: multiply to minimize everything inside."""
        return 1.0 if self.direction == "minimize" else -1.0


_LATENCY = {
    "ttft": ("TTFT", "time from sending a request to its first output token"),
    "itl": ("ITL", "gap between consecutive output tokens, one sample per token (multi-token chunks are split)"),
    "tpot": ("TPOT", "per request: (last token - first token) / (tokens after the first chunk)"),
    "e2e": ("E2E", "time from sending a request to its last output token"),
}
_STATISTICS = {"mean": "mean", "p50": "median", **{f"p{p}": f"{p}th percentile" for p in (90, 95, 99)}}


def _latencies() -> list[Metric]:
    return [
        Metric(f"{key}_{stat}_ms", "ms", "minimize", f"{name} {stat} (ms)", f"{stat_text} of {text}")
        for key, (name, text) in _LATENCY.items()
        for stat, stat_text in _STATISTICS.items()
    ]


_OTHERS = [
    Metric(
        "request_throughput_rps",
        "req/s",
        "maximize",
        "Requests/s",
        "completed requests per second of the measured window",
    ),
    Metric(
        "output_throughput_tok_s",
        "tok/s",
        "maximize",
        "Output tok/s",
        "output tokens per second of the measured window",
    ),
    Metric(
        "output_throughput_per_device_tok_s",
        "tok/s/device",
        "maximize",
        "Output tok/s per device",
        "output throughput divided by the devices of the deployment",
    ),
    Metric("total_throughput_tok_s", "tok/s", "maximize", "Total tok/s", "prompt and output tokens per second"),
    Metric(
        "user_throughput_tok_s",
        "tok/s/user",
        "maximize",
        "Output tok/s per user",
        "1000 / tpot_p50_ms: the speed one user reads at",
    ),
    Metric(
        "goodput_rps",
        "req/s",
        "maximize",
        "Goodput (req/s)",
        "requests per second that met every SLO of the workload, or of their class where it has classes",
    ),
    Metric(
        "slo_attainment",
        "fraction",
        "maximize",
        "SLO attainment",
        "share of the measured requests that met every SLO of theirs; a failed request met none",
    ),
    Metric(
        "cost_usd_per_mtok",
        "USD/Mtok",
        "minimize",
        "Cost (USD per million output tokens)",
        "price per device-hour x devices / output throughput at this load",
    ),
    Metric(
        "cost_usd_per_mtok_total",
        "USD/Mtok",
        "minimize",
        "Cost (USD per million tokens, prompt and output)",
        "price per device-hour x devices / total throughput at this load",
    ),
    Metric(
        "quality_kl",
        "nats/token",
        "minimize",
        "KL to reference (nats/token)",
        "KL divergence of next-token distributions from the reference engine",
    ),
    Metric(
        "quality_top1_agreement",
        "fraction",
        "maximize",
        "Top-1 agreement",
        "share of positions where the most likely token equals the reference's",
    ),
    Metric(
        "quality_perplexity",
        "perplexity",
        "minimize",
        "Perplexity",
        "exp of the mean negative log-likelihood of the corpus text, over the positions that KL is measured on",
    ),
    Metric(
        "quality_task_accuracy",
        "fraction",
        "maximize",
        "Task accuracy",
        "share of all items of quality.tasks answered right (lm-eval); one task's as quality_task_accuracy.<task>",
    ),
    Metric(
        "startup_s", "s", "minimize", "Start-up (s)", "from starting the server process to its first real completion"
    ),
    Metric(
        "first_request_ms",
        "ms",
        "minimize",
        "First request (ms)",
        "the first completion of a launch, 2 tokens, before any warm-up: what the first user after a start waits",
    ),
    Metric(
        "requests_completed",
        "requests",
        "maximize",
        "Completed requests",
        "requests finished without error in the measured window",
    ),
    Metric(
        "requests_failed", "requests", "minimize", "Failed requests", "requests that ended in an error or a time-out"
    ),
    Metric(
        "preemptions",
        "count",
        "minimize",
        "Preemptions",
        "requests the scheduler preempted during this load (vllm:num_preemptions_total)",
    ),
    Metric(
        "prefix_cache_hit_rate",
        "fraction",
        "maximize",
        "Prefix-cache hit rate",
        "prefix-cache hits / queries in tokens during this load",
    ),
    Metric(
        "kv_cache_usage_max",
        "fraction",
        "minimize",
        "Peak KV-cache usage",
        "highest vllm:kv_cache_usage_perc sampled during this load",
    ),
    Metric(
        "spec_acceptance_rate",
        "fraction",
        "maximize",
        "Draft acceptance rate",
        "accepted / proposed draft tokens of speculative decoding during this load",
    ),
    Metric(
        "queue_time_mean_ms",
        "ms",
        "minimize",
        "Mean queue time (ms)",
        "engine-side wait before scheduling (vllm:request_queue_time_seconds)",
    ),
    Metric(
        "client_loop_lag_p99_ms",
        "ms",
        "minimize",
        "Client loop lag p99 (ms)",
        "event-loop delay of the load client: how honest its clock was",
    ),
    Metric(
        "client_send_lateness_p99_ms",
        "ms",
        "minimize",
        "Client send lateness p99 (ms)",
        "how late requests left the client against their schedule",
    ),
    Metric(
        "energy_j_per_token",
        "J/token",
        "minimize",
        "Energy (J per output token)",
        "device energy / output tokens, where NVML measures power",
    ),
]

# What can be told of the requests of one class alone.
PER_CLASS = (
    *(metric.name for metric in _latencies()),
    "request_throughput_rps",
    "output_throughput_tok_s",
    "goodput_rps",
    "slo_attainment",
    "requests_completed",
    "requests_failed",
)
# Exists for each task too, as "quality_task_accuracy.<task>".
PER_TASK = "quality_task_accuracy"


class _Vocabulary(Mapping[str, Metric]):
    """Metrics by name. Iteration gives those of whole workloads; those of one class or task are made when asked for."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}

    def __getitem__(self, name: str) -> Metric:
        whole, dot, class_name = name.partition(".")
        if not dot:
            return self._metrics[name]
        if whole not in (*PER_CLASS, PER_TASK) or not class_name.isidentifier():
            raise KeyError(name)
        metric = self._metrics[whole]
        only = f"items of {class_name} only" if whole == PER_TASK else f"{class_name} requests only"
        label, description = f"{metric.label}, {class_name}", f"{metric.description}; {only}"
        return replace(metric, name=name, label=label, description=description)

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


METRICS = _Vocabulary([*_latencies(), *_OTHERS])


def get_metric(name: str) -> Metric:
    """Look a metric up by name. Raises ConfigError naming the nearest known metric."""
    if name not in METRICS:
        raise ConfigError(f"unknown metric '{name}'", did_you_mean(name, METRICS))
    return METRICS[name]
