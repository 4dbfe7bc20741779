"""The same measurements at another price or utilization: arithmetic on what was measured, no GPU.

    cost(price', u) = cost(price) x price' / price / u

u is the share of the measured load that is paid work on average: a node that is kept for a peak twice the mean runs at
u = 0.5 and each token costs double. A study without a price has no cost to scale: it follows from the measured
throughput (measure.cost), with that throughput's relative spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sweep.errors import SlaError
from sweep.measure.cost import cost_usd_per_mtok
from sweep.results.points import OperatingPoint

COST, THROUGHPUT = "cost_usd_per_mtok", "output_throughput_tok_s"


def repriced(
    points: Sequence[OperatingPoint], measured_price: float | None, price: float | None, utilization: float | None
) -> list[OperatingPoint]:
    """The points at that price (USD per device-hour; None: as measured) and utilization (0 to 1; None: 1).

    Raises SlaError for a price that is not above 0 or a utilization outside (0, 1].
    """
    if price is not None and not price > 0:
        raise SlaError(f"price={price:g} is not above 0", "give USD per device-hour")
    if utilization is not None and not 0 < utilization <= 1:
        raise SlaError(f"utilization={utilization:g} is not above 0 and at most 1", "for example 0.6")
    if price is None and utilization is None:
        return list(points)
    share = utilization or 1.0
    return [_repriced(p, measured_price, price if price is not None else measured_price, share) for p in points]


def _repriced(point: OperatingPoint, measured: float | None, price: float | None, share: float) -> OperatingPoint:
    if not price or THROUGHPUT not in point.metrics:
        return point
    if measured and COST in point.metrics:
        cost = point.metrics[COST] * price / measured / share
        scale, like = cost / point.metrics[COST], COST
    else:
        found = cost_usd_per_mtok(price, point.devices, point.metrics[THROUGHPUT])
        if found is None:
            return point
        cost = found / share
        scale, like = cost / point.metrics[THROUGHPUT], THROUGHPUT
    intervals = dict(point.intervals)
    if like in intervals:
        low, high = (end / point.metrics[like] for end in intervals[like])
        intervals[COST] = (cost * low, cost * high) if like == COST else (cost / high, cost / low)
    return replace(
        point,
        metrics={**point.metrics, COST: cost},
        sd=_scaled(point.sd, like, scale),
        run_se=_scaled(point.run_se, like, scale),
        intervals=intervals,
    )


def _scaled(values: Mapping[str, float], like: str, scale: float) -> dict[str, float]:
    return {**values, COST: values[like] * scale} if like in values else dict(values)
