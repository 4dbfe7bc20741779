"""What tokens cost. The formulas, all of them.

    C     cost_usd_per_mtok          = P n / (3600 T_out) 10^6
    C_all cost_usd_per_mtok_total    = P n / (3600 (T_in + T_out)) 10^6
    C_use effective_cost_usd_per_mtok = C x (peak_to_mean / utilization) x (1 + k s / 86400)
    p_out output price               = (1 + margin) R / (T_out + a T_new + b T_hit) 10^6 / 3600
    p_in, p_hit                      = a p_out, b p_out
    E     energy_j_per_token         = W / T_out

P price of a device-hour (USD), n devices, T tokens per second of the measured window, R = P n dollars per hour.

The devices are paid whether busy or not, so C belongs to the load it was measured at: half the throughput, twice the
cost. Its honest load is the highest that still meets the SLA: `highest_load`.

C_use is what arrives on the invoice. A fleet is sized for its peak, and is kept below the measured load there:
`utilization` is the share of it that is used at the peak (1: none left free). On average only 1 / peak_to_mean of the
peak is served, and all of it is paid. A replica that is started k times a day (scale-out, deployment, failure) is paid
for s seconds of each start (startup_s) before it serves. decide/capacity.py rounds the same thing up to whole replicas.

Prices: an API charges input, cached input and output tokens apart. Given the ratios a = input / output and b = cached /
output of the prices one would ask, or wants to compare with, there is one output price at which these tokens just earn
what the devices cost, and a margin. T_in splits by the measured prefix-cache hit rate h: T_hit = h T_in, T_new is the
rest.

W is the mean power of all devices of the deployment in the window (measure.telemetry): the boards' own, not the node's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from sweep.results.points import OperatingPoint

_SECONDS_PER_DAY = 86400.0
_P = TypeVar("_P", bound=OperatingPoint)


def cost_usd_per_mtok(price_usd_per_device_hour: float, devices: int, tokens_per_s: float | None) -> float | None:
    """C for output tokens per second, C_all for all tokens per second.

    None when no throughput was measured, or none happened.
    """
    if not tokens_per_s:
        return None
    return price_usd_per_device_hour * devices / (3600 * tokens_per_s) * 1e6


def per_device_metrics(
    price_usd_per_device_hour: float, devices: int, output_tokens_per_s: float | None
) -> dict[str, float | None]:
    """What a rate of output tokens means on these devices: the metrics that a client alone cannot know."""
    return {
        "output_throughput_per_device_tok_s": None if output_tokens_per_s is None else output_tokens_per_s / devices,
        "cost_usd_per_mtok": cost_usd_per_mtok(price_usd_per_device_hour, devices, output_tokens_per_s),
    }


def energy_j_per_token(power_w: float | None, output_tokens_per_s: float | None) -> float | None:
    """E; None where power or throughput was not measured."""
    return power_w / output_tokens_per_s if power_w is not None and output_tokens_per_s else None


@dataclass(frozen=True)
class Usage:
    """How a deployment will be used, for C_use. starts_per_day: of one replica (k above)."""

    utilization: float = 1.0
    peak_to_mean: float = 1.0
    starts_per_day: float = 0.0

    def factor(self, startup_s: float | None) -> float | None:
        """C_use / C; None where starts count and how long one takes is not known."""
        if self.starts_per_day and startup_s is None:
            return None
        overhead = self.starts_per_day * (startup_s or 0.0) / _SECONDS_PER_DAY
        return self.peak_to_mean / self.utilization * (1 + overhead)


def effective_cost_usd_per_mtok(cost_usd_per_mtok: float | None, usage: Usage, startup_s: float | None) -> float | None:
    """C_use; None where its parts are not known."""
    factor = usage.factor(startup_s)
    return None if cost_usd_per_mtok is None or factor is None else cost_usd_per_mtok * factor


@dataclass(frozen=True)
class TokenPrices:
    """USD per million tokens of each kind."""

    input_usd_per_mtok: float
    cached_input_usd_per_mtok: float
    output_usd_per_mtok: float


def token_prices(
    cost_usd_per_hour: float,
    input_tokens_per_s: float,
    output_tokens_per_s: float,
    hit_rate: float,
    *,
    input_ratio: float,
    cached_ratio: float,
    margin: float = 0.0,
) -> TokenPrices | None:
    """p_in, p_hit and p_out for traffic of this kind; None where no token is charged for."""
    cached = hit_rate * input_tokens_per_s
    charged = output_tokens_per_s + input_ratio * (input_tokens_per_s - cached) + cached_ratio * cached
    if not charged:
        return None
    output = (1 + margin) * cost_usd_per_hour / (3600 * charged) * 1e6
    return TokenPrices(input_ratio * output, cached_ratio * output, output)


def highest_load(points: Iterable[_P], meets: Callable[[_P], bool]) -> _P | None:
    """Of one config's operating points the one that serves most requests per second and still meets the SLA.

    Never a load between two that were measured, and never one above the highest that met it. None if none does.
    """
    good = [p for p in points if p.state == "measured" and "request_throughput_rps" in p.metrics and meets(p)]
    return max(good, key=lambda p: p.metrics["request_throughput_rps"], default=None)
