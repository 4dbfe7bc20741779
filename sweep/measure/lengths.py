"""How many tokens a prompt or an answer has: the distributions a workload draws from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sweep.errors import ConfigError, did_you_mean, require

IntArray = npt.NDArray[np.int64]

_NEEDS: dict[str, tuple[str, ...]] = {
    "fixed": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma", "high"),
    "empirical": ("values",),
    "quantiles": ("values",),
    "trace": (),
}


@dataclass(frozen=True)
class LengthDistribution:
    """Token counts. fixed: value. uniform: low..high inclusive. lognormal: median, sigma of the logarithm, rounded.

    empirical: drawn with replacement from values. quantiles: values are equally spaced quantiles from the minimum to
    the maximum, with straight lines between them. trace: each request has the length of its row of the workload's
    trace, so that prompt and answer stay the pair they were; values are then the whole trace's lengths, filled in.

    low and high clip every kind (low is 1 if not given); lognormal needs high, because nothing else keeps a request
    within the model's context. Parameters of other kinds are ignored, so that one override (`kind=fixed value=128`)
    changes a configured distribution.
    """

    kind: str = "fixed"
    value: int | None = None
    median: float | None = None
    sigma: float | None = None
    low: int | None = None
    high: int | None = None
    values: tuple[int, ...] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], field: str) -> LengthDistribution:
        """Raises ConfigError naming field.parameter, its value and what to give."""
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise ConfigError(f"{field}.{name} is unknown", did_you_mean(name, known))
        values = data.get("values")
        return cls(**{**data, "values": None if values is None else tuple(values)})

    def validate(self, field: str) -> None:
        """Raises ConfigError naming field.parameter, its value and what to give."""
        if self.kind not in _NEEDS:
            raise ConfigError(f"{field}.kind={self.kind!r}", did_you_mean(str(self.kind), _NEEDS))
        for name in _NEEDS[self.kind]:
            if getattr(self, name) in (None, ()):
                raise ConfigError(f"{field}.{name} is not set", f"a {self.kind} length needs {field}.{name}=…")
        low = 1 if self.low is None else self.low
        require(low >= 1, f"{field}.low", self.low, "give at least 1 token")
        if self.high is not None:
            require(self.high >= low, f"{field}.high", self.high, f"give at least low, which is {low}")
        if self.kind == "fixed":
            assert self.value is not None
            inside = low <= self.value <= (self.value if self.high is None else self.high)
            require(inside, f"{field}.value", self.value, f"give {low} to {self.high or 'any number of'} tokens")
        if self.kind == "lognormal":
            assert self.median is not None and self.sigma is not None
            require(self.median > 0, f"{field}.median", self.median, "give a number above 0")
            require(self.sigma >= 0, f"{field}.sigma", self.sigma, "give 0 or more")
        if self.kind in ("empirical", "quantiles"):
            values = self.values or ()
            require(min(values) >= 1, f"{field}.values", self.values, "give lengths of 1 token or more")
            if self.kind == "quantiles":
                ascending = len(values) >= 2 and list(values) == sorted(values)
                require(ascending, f"{field}.values", self.values, "give two or more quantiles, smallest first")

    @property
    def longest(self) -> int | None:
        """The most tokens a draw can have; None if nothing bounds it."""
        if self.kind == "fixed":
            return self.value
        if self.values and self.kind in ("empirical", "quantiles", "trace"):
            return int(self.clip(max(self.values)))
        return self.high

    def of_trace(self, lengths: npt.ArrayLike) -> LengthDistribution:
        """The same with a trace's lengths as its values, if it takes its lengths from the trace."""
        return replace(self, values=tuple(np.asarray(lengths).tolist())) if self.kind == "trace" else self

    def clip(self, lengths: npt.ArrayLike) -> IntArray:
        """Lengths cut to low..high."""
        return np.clip(lengths, self.low or 1, self.high).astype(np.int64)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """n independent lengths, (n,). Of a trace's lengths: drawn with replacement, without their partners."""
        if self.kind == "fixed":
            return self.clip(np.full(n, self.value))
        if self.kind == "uniform":
            assert self.low is not None and self.high is not None
            return self.clip(rng.integers(self.low, self.high + 1, n))
        if self.kind == "lognormal":
            assert self.median is not None and self.sigma is not None
            return self.clip(np.rint(self.median * np.exp(self.sigma * rng.standard_normal(n))))
        if self.kind == "quantiles":
            return self.clip(sample_quantiles(rng, n, self.values or ()))
        return self.clip(rng.choice(np.asarray(self.values), n))


def sample_quantiles(rng: np.random.Generator, n: int, quantiles: npt.ArrayLike) -> IntArray:
    """n values, (n,), of the distribution with these equally spaced quantiles, rounded."""
    values = np.asarray(quantiles, dtype=float)
    drawn = np.interp(rng.random(n), np.linspace(0.0, 1.0, len(values)), values)
    rounded: IntArray = np.rint(drawn).astype(np.int64)
    return rounded
