"""When requests arrive: the loads of a workload, and the arrival times each of them asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sweep.errors import ConfigError, require

FloatArray = npt.NDArray[np.float64]

_FIELD = "workload.loads"


@dataclass(frozen=True)
class Load:
    """How hard the client pushes: a closed loop of `concurrency` requests in flight, or an open loop.

    In the open loop requests arrive whether or not the server keeps up, at request_rate_rps on average:

    * with gamma-distributed gaps of shape `burstiness`: 1 is a Poisson process, less is burstier (the gaps'
      coefficient of variation is burstiness^-1/2, see `cv`);
    * with ramp_from_rps, at a rate that goes in a straight line from there to request_rate_rps over the measured
      requests (gaps as above, in units of the momentary mean);
    * with rate_scale, at the times of the workload's trace, replayed that many times as fast. request_rate_rps is then
      the trace's own mean rate times rate_scale, for those who read the load; burstiness is the trace's own.
    """

    concurrency: int | None
    request_rate_rps: float | None = None
    burstiness: float = 1.0
    ramp_from_rps: float | None = None
    rate_scale: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate_rps is None):
            raise ConfigError(
                f"a load has concurrency={self.concurrency} and request_rate_rps={self.request_rate_rps}",
                "set exactly one: concurrency for a closed loop, request_rate_rps for an open loop",
            )
        if self.concurrency is not None:
            require(self.concurrency >= 1, f"{_FIELD}.concurrency", self.concurrency, "give at least 1")
        for name in ("request_rate_rps", "ramp_from_rps", "rate_scale"):
            value, unit = getattr(self, name), "" if name == "rate_scale" else "requests per second "
            require(value is None or value > 0, f"{_FIELD}.{name}", value, f"give {unit or 'a number '}above 0")
        require(self.burstiness > 0, f"{_FIELD}.burstiness", self.burstiness, "give 1 for Poisson arrivals")

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps between arrivals (of an open loop without a trace)."""
        return float(f"{self.burstiness**-0.5:.12g}")

    @property
    def label(self) -> str:
        """Short and unique within a ladder: "c8", "r2", "r2cv3" (bursts), "r1to8" (ramp), "x0.5" (trace)."""
        if self.concurrency is not None:
            return f"c{self.concurrency}"
        if self.rate_scale is not None:
            return f"x{self.rate_scale:.12g}"
        ramp = "" if self.ramp_from_rps is None else f"{self.ramp_from_rps:.12g}to"
        return f"r{ramp}{self.request_rate_rps:.12g}{'' if self.burstiness == 1 else f'cv{self.cv:g}'}"

    def to_dict(self) -> dict[str, Any]:
        """{"concurrency": int}, or {"request_rate_rps": float} with what else describes its arrivals."""
        if self.concurrency is not None:
            return {"concurrency": self.concurrency}
        if self.rate_scale is not None:
            return {"request_rate_rps": self.request_rate_rps, "rate_scale": self.rate_scale}
        ramp = {} if self.ramp_from_rps is None else {"ramp_from_rps": self.ramp_from_rps}
        return {"request_rate_rps": self.request_rate_rps, "burstiness": self.burstiness, **ramp}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Load:
        return cls(
            data.get("concurrency"),
            data.get("request_rate_rps"),
            data.get("burstiness", 1.0),
            data.get("ramp_from_rps"),
            data.get("rate_scale"),
        )


def build_ladder(loads: Mapping[str, Any], trace_rate_rps: float | None) -> tuple[Load, ...]:
    """The loads group of a config as a ladder: closed loops, rates, then scalings of the trace, each busiest first.

    What fails under load then fails early. trace_rate_rps: the mean rate of the workload's trace, if it has arrival
    times. Raises ConfigError.
    """
    known = ("concurrency", "request_rate_rps", "burstiness", "cv", "ramp_from_rps", "rate_scale")
    for name in loads:
        require(name in known, f"{_FIELD}.{name}", loads[name], f"known: {', '.join(known)}")
    burstiness, cv = loads.get("burstiness", 1.0), loads.get("cv")
    if cv is not None:
        require(cv > 0, f"{_FIELD}.cv", cv, "give 1 for Poisson arrivals, more for bursts")
        require(
            burstiness == 1.0, f"{_FIELD}.cv", cv, f"give this or burstiness={burstiness}, not both: cv = 1/√burstiness"
        )
        burstiness = cv**-2
    ramp, scales = loads.get("ramp_from_rps"), loads.get("rate_scale") or ()
    if scales and trace_rate_rps is None:
        raise ConfigError(
            f"{_FIELD}.rate_scale={list(scales)} needs a trace with arrival times",
            "set workload.trace.file=azure_conv_2023 (or your own) with sampling=window, or use loads.request_rate_rps",
        )
    rates = sorted(set(loads.get("request_rate_rps") or ()), reverse=True)
    return (
        *(Load(c) for c in sorted(set(loads.get("concurrency") or ()), reverse=True)),
        *(Load(None, rate, burstiness, ramp) for rate in rates),
        *(Load(None, scale * (trace_rate_rps or 0.0) if scale > 0 else 1.0, rate_scale=scale)
          for scale in sorted(set(scales), reverse=True)),
    )  # fmt: skip


def arrivals_s(load: Load, n: int, rng: np.random.Generator) -> FloatArray:
    """n arrival times in seconds after the process began, (n,), of a load with a rate of its own."""
    rate = load.request_rate_rps
    assert rate is not None and load.rate_scale is None
    if load.ramp_from_rps is None:
        return np.cumsum(rng.gamma(load.burstiness, 1 / (rate * load.burstiness), n))
    # Arrivals of rate 1 in a time that runs as fast as the momentary rate does: its integral, inverted.
    unit = np.cumsum(rng.gamma(load.burstiness, 1 / load.burstiness, n))
    first, duration_s = load.ramp_from_rps, 2 * n / (load.ramp_from_rps + rate)
    slope = (rate - first) / duration_s
    if slope == 0:
        return unit / rate
    inside = (np.sqrt(np.maximum(first**2 + 2 * slope * np.minimum(unit, n), 0.0)) - first) / slope
    return np.where(unit <= n, inside, duration_s + (unit - n) / rate)


def warmup_arrivals_s(load: Load, n: int, rng: np.random.Generator) -> FloatArray:
    """n arrival times before the measured ones, (n,), at the rate these begin with."""
    rate = load.ramp_from_rps or load.request_rate_rps
    assert rate is not None
    return np.cumsum(rng.gamma(load.burstiness, 1 / (rate * load.burstiness), n))
