"""Several replicas together: whether the devices there are suffice, and how many more would do.

Rates add up over replicas (requests/s, tokens/s, goodput); latency, cost per token and quality do not. So a bound on a
rate that one engine misses is met by ceil(bound / rate) of them, and a traffic by capacity.capacity's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweep.decide.capacity import Traffic, capacity
from sweep.decide.certainty import Judge
from sweep.decide.sla import Bound
from sweep.decide.wording import plural
from sweep.results.metrics import Metric
from sweep.results.points import OperatingPoint

_ADD_UP = ("request_throughput_rps", "output_throughput_tok_s", "total_throughput_tok_s", "goodput_rps")


@dataclass(frozen=True)
class Fleet:
    """replicas of one point that together meet every bound (and carry the traffic, if one was stated).

    extra: devices beyond those there are, or beyond the nearest point's own where no limit was stated.
    """

    point: OperatingPoint
    replicas: int
    devices: int
    extra: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "point_id": self.point.point_id,
            "replicas": self.replicas,
            "devices": self.devices,
            "extra_devices": self.extra,
        }

    def text(self) -> str:
        more = f"{plural(self.extra, 'device')} more" if self.extra else "no device more"
        return f"{plural(self.replicas, 'replica')} on {plural(self.devices, 'device')} together would do: {more}"


def adds_up(bound: Bound) -> bool:
    """Whether replicas meet this bound together."""
    return bound.metric.partition(".")[0] in _ADD_UP


def devices_for(point: OperatingPoint, traffic: Traffic | None) -> int | None:
    """Devices that serve this traffic at this point (without one: of one engine); None where its rate is unknown."""
    return point.devices if traffic is None else capacity(point, traffic, None).devices


def smallest_fleet(
    points: Sequence[OperatingPoint],
    bounds: Sequence[Bound],
    judge: Judge,
    target: Metric,
    traffic: Traffic | None,
    available: int,
) -> Fleet | None:
    """The fewest devices whose replicas meet all bounds together; None where a bound that does not add up is missed."""
    alone = [b for b in bounds if not adds_up(b)]
    found = []
    for p in points:
        replicas = _replicas(p, [b for b in bounds if adds_up(b)], judge, traffic)
        if replicas is not None and judge.meets_all(p, alone):
            devices = replicas * p.devices
            found.append(Fleet(p, replicas, devices, max(0, devices - available)))
    return min(found, key=lambda f: (f.devices, target.sign * f.point.metrics[target.name]), default=None)


def _replicas(point: OperatingPoint, bounds: Sequence[Bound], judge: Judge, traffic: Traffic | None) -> int | None:
    supplies = [(b, judge.needed(point, b)) for b in bounds]
    if any(supply is None or supply <= 0 for _, supply in supplies):
        return None
    replicas = max((math.ceil(round(b.value / s, 9)) for b, s in supplies if s is not None), default=1)
    if traffic is not None:
        needed = capacity(point, traffic, None).replicas
        if needed is None:
            return None
        replicas = max(replicas, needed)
    return max(replicas, 1)
