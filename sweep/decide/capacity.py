"""How many replicas a stated traffic needs, and what they cost.

The formulas, all of them (rps: requests per second):

    peak_rps            = mean_rps x peak_to_mean x growth
    serving replicas    = ceil(peak_rps / request throughput of one replica at the chosen point)
    replicas            = serving replicas + spare                                    (spare 1 is "N+1")
    devices             = replicas x devices of one replica
    cost per month      = price per device-hour x devices x 730 h                     (365 x 24 / 12)
    utilization         = mean_rps / (replicas x request throughput)                  (1 is the measured load)
    cost per Mtok       = price x devices / (3600 x mean_rps x output tokens per request) x 10^6
    tokens per request  = output throughput / request throughput at the chosen point

A replica is one deployment at the load where the point was measured, which is where the SLA was found to hold:
running hotter is not extrapolated. The cost per token is at today's mean traffic, not at the peak: what is idle
between peaks is paid too. All of it holds for requests like the workload's, spread evenly over the replicas.
What was not measured or has no price is None, and `missing` says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sweep.decide.wording import number_text, plural
from sweep.errors import SlaError
from sweep.measure.cost import cost_usd_per_mtok
from sweep.results.points import OperatingPoint

HOURS_PER_MONTH = 730


@dataclass(frozen=True)
class Traffic:
    """What shall be served. mean_rps: today's mean requests per second; peak_to_mean, growth: factors on it.

    spare: replicas beyond those that carry the peak, so that as many may fail. Raises SlaError for what cannot be.
    """

    mean_rps: float
    peak_to_mean: float = 2.0
    growth: float = 1.2
    spare: int = 1

    def __post_init__(self) -> None:
        for name, value, low in (
            ("traffic-rps", self.mean_rps, 0.0),
            ("growth", self.growth, 0.0),
            ("peak-to-mean", self.peak_to_mean, 1.0),
            ("spare", self.spare, 0.0),
        ):
            allowed = math.isfinite(value) and value >= low and (value > 0 or name == "spare")
            if not allowed:
                least = f"at least {low:g}" if name in ("peak-to-mean", "spare") else "above 0"
                raise SlaError(f"{name}={value:g} is not {least}", "for example --traffic-rps 30 --peak-to-mean 2")

    @property
    def peak_rps(self) -> float:
        """Requests per second to be ready for."""
        return self.mean_rps * self.peak_to_mean * self.growth


@dataclass(frozen=True)
class Capacity:
    """What a traffic needs at one operating point. None: not known, see missing. USD and devices of all replicas."""

    traffic: Traffic
    request_throughput_rps: float | None
    replicas: int | None
    devices: int | None
    price_usd_per_device_hour: float | None
    cost_usd_per_month: float | None
    utilization: float | None
    cost_usd_per_mtok_at_mean: float | None
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {**asdict(self), "peak_rps": self.traffic.peak_rps, "missing": list(self.missing)}

    def text_lines(self) -> list[str]:
        """For a terminal, with the numbers the formulas were fed."""
        t = self.traffic
        lines = [
            f"traffic   {number_text(t.mean_rps)} requests/s on average, x {t.peak_to_mean:g} at peak, "
            f"x {t.growth:g} growth: {number_text(t.peak_rps)} requests/s"
        ]
        if self.replicas is not None and self.devices is not None and self.request_throughput_rps is not None:
            lines += [
                f"replicas  {self.replicas}: {self.replicas - t.spare} at {number_text(self.request_throughput_rps)} "
                f"requests/s each, and {t.spare} spare; {plural(self.devices, 'device')}",
                f"busy      {100 * (self.utilization or 0):.0f} % of that at mean traffic",
            ]
        if self.cost_usd_per_month is not None:
            lines.append(
                f"cost      {number_text(self.cost_usd_per_month)} USD a month ({self.price_usd_per_device_hour:g} USD "
                f"per device-hour x {self.devices} x {HOURS_PER_MONTH} h)"
            )
        if self.cost_usd_per_mtok_at_mean is not None:
            lines.append(
                f"          {number_text(self.cost_usd_per_mtok_at_mean)} USD per million output tokens at mean traffic"
            )
        return [*lines, *(f"unknown   {text}" for text in self.missing)]


def capacity(point: OperatingPoint, traffic: Traffic, price_usd_per_device_hour: float | None) -> Capacity:
    """Size a deployment of this point for a traffic. A price of 0 or None is no price."""
    price = price_usd_per_device_hour or None
    throughput = point.metrics.get("request_throughput_rps") or None
    tokens_per_s = point.metrics.get("output_throughput_tok_s") or None
    missing = []
    replicas = devices = utilization = cost_per_month = cost_per_mtok = None
    if throughput is None:
        missing.append("replicas, devices and cost: the request throughput of this point was not measured")
    else:
        # Rounded first, so that 72 / 0.9 is 80 replicas and not 81.
        replicas = math.ceil(round(traffic.peak_rps / throughput, 9)) + traffic.spare
        devices = replicas * point.devices
        utilization = traffic.mean_rps / (replicas * throughput)
        if tokens_per_s is None:
            missing.append("cost per million output tokens: the output throughput of this point was not measured")
    if price is None:
        missing.append("cost: the study has no hardware.price_usd_per_device_hour")
    elif devices is not None and throughput is not None:
        cost_per_month = price * devices * HOURS_PER_MONTH
        if tokens_per_s is not None:
            cost_per_mtok = cost_usd_per_mtok(price, devices, traffic.mean_rps * tokens_per_s / throughput)
    return Capacity(
        traffic=traffic,
        request_throughput_rps=throughput,
        replicas=replicas,
        devices=devices,
        price_usd_per_device_hour=price,
        cost_usd_per_month=cost_per_month,
        utilization=utilization,
        cost_usd_per_mtok_at_mean=cost_per_mtok,
        missing=tuple(missing),
    )


def price_of(config: Mapping[str, Any]) -> float | None:
    """hardware.price_usd_per_device_hour of a study's resolved config; None if it states none, or 0."""
    price = config.get("hardware", {}).get("price_usd_per_device_hour")
    return float(price) if price else None
