"""From means at steady state to the requests of one load: the tails that a study ranks by.

Every request of the workload's draw gets its own times around the estimated means:

    TTFT = own x (its new prompt tokens / the mean's) + waiting,   waiting ~ Exponential(mean waiting)
    TPOT = (decode x (n - m) + mixed x m) / n,                     m ~ Binomial(n, share of mixed steps)

for n = its output tokens - 1. Waiting times of busy queues are close to exponential (Kingman 1961), and grow with the
spread of the arrivals by (cv^2 + 1) / 2. Percentiles and rates are then taken exactly as from measured requests. The
draws follow from the requests, not from the configuration: all configurations see the same luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sweep.estimate.steady import Estimate
from sweep.measure.cost import cost_usd_per_mtok
from sweep.measure.draws import seed_sequence
from sweep.measure.latency import PERCENTILES, percentile
from sweep.measure.outline import make_outline
from sweep.measure.workload import Load, WorkloadSpec

FloatArray = npt.NDArray[np.float64]
# The least that ever separates a load from the next one: counters are read and the engine drains.
_DRAIN_S = 1.0


@dataclass(frozen=True)
class Slowdown:
    """How a launch differs from the estimate: factors on every step, and once more on all before the first token."""

    steps: float = 1.0
    first_token: float = 1.0


@dataclass(frozen=True)
class Requests:
    """The measured requests of one draw, and the luck of each.

    prompt_tokens, output_tokens: (n,). luck: (n,), exponential with mean 1. normal: (n,), standard normal.
    warmup: requests before them.
    """

    prompt_tokens: FloatArray
    output_tokens: FloatArray
    luck: FloatArray
    normal: FloatArray
    warmup: int

    @classmethod
    def of(cls, workload: WorkloadSpec, draw: int) -> Requests:
        outline = make_outline(workload, draw).measured_first()
        n = len(outline.max_tokens) - outline.warmup
        rng = np.random.default_rng(seed_sequence(workload.seed, draw))
        prefixes = np.array([c.shared_prefix_tokens for c in workload.request_classes])
        shared = np.where(outline.prefix_ids < 0, 0, prefixes[outline.class_ids])
        return cls(
            np.maximum((shared + outline.own_tokens)[:n], 1).astype(float),
            np.maximum(outline.max_tokens[:n], 1).astype(float),
            rng.exponential(size=n),
            rng.standard_normal(n),
            workload.warmup_requests,
        )


@dataclass(frozen=True)
class SampledLoad:
    """metrics: keys of results.metrics.METRICS; None where this load says nothing. duration_s: warm-up included."""

    metrics: dict[str, float | None]
    duration_s: float


def sample_load(
    estimate: Estimate,
    workload: WorkloadSpec,
    load: Load,
    requests: Requests,
    *,
    devices: int,
    price_usd_per_device_hour: float,
    slowdown: Slowdown | None = None,
) -> SampledLoad | None:
    """The metrics of one load; None where not one request would finish within max_load_s.

    estimate: with times, of this load.
    """
    slow = slowdown or Slowdown()
    assert estimate.tpot_ms is not None and estimate.output_throughput_tok_s is not None
    tpot_ms = _tpot_ms(estimate, requests) * slow.steps
    ttft_ms = None if estimate.ttft_ms is None else _ttft_ms(estimate, load, requests) * slow.steps * slow.first_token
    rate_rps = _rate_rps(estimate, load, requests, slow)
    n = min(len(requests.luck), int(rate_rps * workload.max_load_s) - requests.warmup)
    if n < 1:
        return None
    later = np.maximum(requests.output_tokens - 1, 0.0)
    e2e_ms = None if ttft_ms is None else ttft_ms + tpot_ms * later
    metrics: dict[str, float | None] = {
        **_statistics("ttft", ttft_ms, n),
        **_statistics("tpot", tpot_ms, n),
        **_statistics("e2e", e2e_ms, n),
        **_itl(estimate, slow, n),
        "requests_completed": float(n),
        "requests_failed": 0.0,
    }
    output_tok_s = rate_rps * float(requests.output_tokens[:n].mean())
    total_tok_s = output_tok_s + rate_rps * float(requests.prompt_tokens[:n].mean())
    price = price_usd_per_device_hour
    metrics |= {
        "request_throughput_rps": rate_rps,
        "output_throughput_tok_s": output_tok_s,
        "output_throughput_per_device_tok_s": output_tok_s / devices,
        "total_throughput_tok_s": total_tok_s,
        "user_throughput_tok_s": None if not metrics["tpot_p50_ms"] else 1e3 / metrics["tpot_p50_ms"],
        "cost_usd_per_mtok": cost_usd_per_mtok(price, devices, output_tok_s),
        "cost_usd_per_mtok_total": cost_usd_per_mtok(price, devices, total_tok_s),
        **_goodput(workload, rate_rps, ttft_ms, tpot_ms, e2e_ms, n),
    }
    return SampledLoad(metrics, min((n + requests.warmup) / rate_rps, workload.max_load_s) + _DRAIN_S)


def _ttft_ms(estimate: Estimate, load: Load, requests: Requests) -> FloatArray:
    assert estimate.ttft_ms is not None
    arrivals_cv_squared = 1.0 if load.concurrency is not None else 1.0 / load.burstiness
    own_ms = max(estimate.ttft_ms - estimate.waiting_ms, 0.0)
    waiting_ms = estimate.waiting_ms * (arrivals_cv_squared + 1.0) / 2.0
    result: FloatArray = own_ms * requests.prompt_tokens / requests.prompt_tokens.mean() + waiting_ms * requests.luck
    return result


def _tpot_ms(estimate: Estimate, requests: Requests) -> FloatArray:
    """The binomial by its normal limit, kept within what is possible."""
    steps = np.maximum((requests.output_tokens - 1) / estimate.outputs_per_step, 1.0)
    share = estimate.mixed_share
    mixed = np.clip(share + requests.normal * np.sqrt(share * (1.0 - share) / steps), 0.0, 1.0)
    step_ms = estimate.decode_step_ms * (1.0 - mixed) + estimate.mixed_step_ms * mixed
    result: FloatArray = step_ms / estimate.outputs_per_step
    return result


def _itl(estimate: Estimate, slow: Slowdown, n: int) -> dict[str, float | None]:
    """Of tokens: a gap is a step of one of two kinds, shared by the tokens that it brings."""

    def at(p: int) -> float:
        step_ms = estimate.mixed_step_ms if p > 100 * (1.0 - estimate.mixed_share) else estimate.decode_step_ms
        return step_ms / estimate.outputs_per_step * slow.steps

    assert estimate.tpot_ms is not None
    percentiles = {f"itl_p{p}_ms": at(p) if n * (100 - p) >= 100 else None for p in PERCENTILES}
    return {"itl_mean_ms": estimate.tpot_ms * slow.steps, **percentiles}


def _rate_rps(estimate: Estimate, load: Load, requests: Requests, slow: Slowdown) -> float:
    """Requests per second. Slower steps lower what a closed loop or an overloaded engine gets done, in proportion."""
    assert estimate.output_throughput_tok_s is not None and estimate.tpot_ms is not None
    rate = estimate.output_throughput_tok_s / float(requests.output_tokens.mean())
    if load.concurrency is None and estimate.ttft_ms is not None:
        return rate
    first, rest = estimate.ttft_ms or 0.0, estimate.tpot_ms * (float(requests.output_tokens.mean()) - 1.0)
    return rate * (first + rest) / (slow.steps * (first * slow.first_token + rest)) if first + rest else rate


def _statistics(name: str, samples_ms: FloatArray | None, n: int) -> dict[str, float | None]:
    kept = None if samples_ms is None else samples_ms[:n]
    return {
        f"{name}_mean_ms": None if kept is None else float(kept.mean()),
        **{f"{name}_p{p}_ms": None if kept is None else percentile(kept, p) for p in PERCENTILES},
    }


def _goodput(
    workload: WorkloadSpec,
    rate_rps: float,
    ttft_ms: FloatArray | None,
    tpot_ms: FloatArray,
    e2e_ms: FloatArray | None,
    n: int,
) -> dict[str, float | None]:
    """Of workloads without classes: who met which class's bounds is not sampled."""
    bounds = ((workload.slo_ttft_ms, ttft_ms), (workload.slo_tpot_ms, tpot_ms), (workload.slo_e2e_ms, e2e_ms))
    if workload.classes or all(bound is None for bound, _ in bounds):
        return {"goodput_rps": None, "slo_attainment": None}
    met = np.ones(n, dtype=bool)
    for bound, samples in bounds:
        if bound is not None:
            met &= np.zeros(n, dtype=bool) if samples is None else samples[:n] <= bound
    return {"goodput_rps": rate_rps * float(met.mean()), "slo_attainment": float(met.mean())}
