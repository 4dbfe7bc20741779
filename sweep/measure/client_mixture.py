"""A workload as the sum of its clients, as ServeGen describes production traffic (arXiv 2505.09999).

Each client sends at its own rate and burstiness and with its own lengths; few of them make most of the load, and the
burstiness of the sum is theirs. One JSON line per client: rate_rps; family (gamma or weibull) and shape of its gaps
(shape 1 is a Poisson process in both; for gamma, cv may be given instead); prompt_tokens and output_tokens, equally
spaced quantiles from minimum to maximum; client (a name) and class are optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gamma
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sweep.errors import ConfigError, did_you_mean
from sweep.measure.lengths import IntArray, sample_quantiles

FloatArray = npt.NDArray[np.float64]
Classes = tuple[str, ...] | None

_FIELDS = ("client", "class", "rate_rps", "family", "shape", "cv", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Client:
    """One client; see above. prompt_tokens, output_tokens: quantiles, drawn independently, as ServeGen has them."""

    rate_rps: float
    family: Literal["gamma", "weibull"]
    shape: float
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    class_name: str | None

    def arrivals_s(self, until_s: float, rng: np.random.Generator) -> FloatArray:
        """Arrival times from 0 to until_s; time 0 falls anywhere into its first gap."""
        times = np.empty(0)
        while len(times) == 0 or times[-1] < until_s:
            n = int((until_s * self.rate_rps + 10) * 1.5)
            if self.family == "gamma":
                gaps = rng.gamma(self.shape, 1 / (self.rate_rps * self.shape), n)
            else:
                gaps = rng.weibull(self.shape, n) / (self.rate_rps * gamma(1 + 1 / self.shape))
            if len(times) == 0:
                gaps[0] *= rng.random()
            times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(gaps)])
        return times[times < until_s]


@dataclass(frozen=True)
class ClientMixture:
    """All clients of a workload."""

    clients: tuple[Client, ...]

    @property
    def rate_rps(self) -> float:
        return sum(client.rate_rps for client in self.clients)

    def sample(self, n: int, seed: np.random.SeedSequence) -> tuple[FloatArray, IntArray, IntArray, Classes]:
        """The first n requests: arrival times in seconds, prompt tokens, output tokens, classes (None: none given)."""
        horizon_s = (n + 3 * n**0.5) / self.rate_rps
        while True:
            children = np.random.SeedSequence(seed.entropy, spawn_key=seed.spawn_key).spawn(len(self.clients) + 1)
            rngs = [np.random.default_rng(child) for child in children]
            times = [c.arrivals_s(horizon_s, rng) for c, rng in zip(self.clients, rngs, strict=False)]
            if sum(map(len, times)) >= n:
                break
            horizon_s *= 2  # a burst-prone mixture can be silent for long
        owner = np.repeat(np.arange(len(self.clients)), [len(t) for t in times])
        order = np.argsort(np.concatenate(times), kind="stable")[:n]
        owner, arrival = owner[order], np.concatenate(times)[order]
        prompts, outputs = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
        for i in np.unique(owner):
            mine = np.flatnonzero(owner == i)
            prompts[mine] = sample_quantiles(rngs[-1], len(mine), self.clients[i].prompt_tokens)
            outputs[mine] = sample_quantiles(rngs[-1], len(mine), self.clients[i].output_tokens)
        names = [self.clients[i].class_name for i in owner]
        classes = tuple(name or "" for name in names) if any(names) else None
        return arrival - arrival[0], prompts, outputs, classes


def read_client(where: str, row: Mapping[str, Any]) -> Client:
    """One line of a mixture. Raises ConfigError naming where, field and value."""
    for name in row:
        if name not in _FIELDS:
            raise ConfigError(f"{where}: {name} is unknown", did_you_mean(name, _FIELDS))
    family, cv = row.get("family", "gamma"), row.get("cv")
    if family not in ("gamma", "weibull"):
        raise ConfigError(f"{where}: family={family!r}", "give gamma or weibull")
    if cv is not None and family == "weibull":
        raise ConfigError(f"{where}: cv={cv} for family=weibull", "give the shape")
    shape = row.get("shape", 1.0 if cv is None else _above_zero(where, "cv", cv) ** -2)
    return Client(
        rate_rps=_above_zero(where, "rate_rps", row.get("rate_rps")),
        family=family,
        shape=_above_zero(where, "shape", shape),
        prompt_tokens=_quantiles(where, "prompt_tokens", row.get("prompt_tokens")),
        output_tokens=_quantiles(where, "output_tokens", row.get("output_tokens")),
        class_name=row.get("class"),
    )


def _above_zero(where: str, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < np.inf:
        raise ConfigError(f"{where}: {name}={value!r}", "give a number above 0")
    return float(value)


def _quantiles(where: str, name: str, values: Any) -> tuple[int, ...]:
    whole = isinstance(values, list) and len(values) >= 2 and all(type(v) is int and v >= 0 for v in values)
    if not whole or values != sorted(values):
        raise ConfigError(f"{where}: {name}={str(values)[:60]}", "give two or more token counts, smallest first")
    return tuple(values)
