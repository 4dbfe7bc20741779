"""What a search is told: the launches so far, as plain values. It keeps nothing else, so a restart loses nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sweep.space.search_space import Params

FloatArray = npt.NDArray[np.float64]
Values = tuple[float, ...]


@dataclass(frozen=True)
class Tried:
    """One launch. points: load label -> values in natural units, or None where that load did not run or has not all.

    Values: one per objective, then one per constraint on something else (Search.metrics).
    cause: why it will never run (a lasting failure), or None. devices x (startup_s + load_s of each load) is what it
    cost; startup_s None, or a load absent: not known. Several launches of the same params are one configuration.
    lacking: labels that were measured and have no value all the same (too few requests for a percentile, a failed
    proof): what is lacking at a load once will be lacking there again.
    """

    params: Params
    points: Mapping[str, Values | None] = field(default_factory=dict)
    cause: str | None = None
    devices: int = 1
    startup_s: float | None = None
    load_s: Mapping[str, float] = field(default_factory=dict)
    lacking: Collection[str] = ()


@dataclass(frozen=True)
class Constraint:
    """What a point must keep to count: sign * value <= sign * bound, natural units. sign 1: lower is better.

    name: a metric, an objective among them, or whatever else its owner measures.
    """

    name: str
    bound: float
    sign: float = 1.0


@dataclass(frozen=True)
class Evidence:
    """What became of a configuration in an earlier study. cause: of its lasting failure, or None where it ran.

    same: whether model, hardware and vLLM were those of this study; if not, it only makes something more likely.
    """

    params: Params
    cause: str | None
    same: bool = False


@dataclass(frozen=True)
class Scale:
    """Natural units to the scale a model is fitted on, lower is better: the logarithm where every value is positive.

    logarithmic, sign: one per column.
    """

    logarithmic: tuple[bool, ...]
    sign: tuple[float, ...]

    @classmethod
    def of(cls, signs: Sequence[float], values: FloatArray) -> Scale:
        """signs: 1 where lower is better, else -1. values: (n, columns), natural units, NaN where unknown."""
        positive = tuple(bool(np.nanmin(column) > 0) if np.isfinite(column).any() else True for column in values.T)
        return cls(positive, tuple(signs))

    def forward(self, values: FloatArray) -> FloatArray:
        """(..., columns) in natural units -> the same shape, lower is better."""
        result = np.array(values, dtype=float)
        for j, log in enumerate(self.logarithmic):
            result[..., j] = self.sign[j] * (np.log(np.maximum(result[..., j], 1e-300)) if log else result[..., j])
        return result
