"""What a search is told: the launches so far, as plain values. It keeps nothing else, so a restart loses nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sweep.results.metrics import get_metric
from sweep.space.search_space import Params

FloatArray = npt.NDArray[np.float64]
Values = tuple[float, ...]


@dataclass(frozen=True)
class Tried:
    """One launch. points: load label -> objective values in natural units, or None where that load did not run.

    cause: why it will never run (a lasting failure), or None. devices x (startup_s + load_s of each load) is what it
    cost; startup_s None, or a load absent: not known. Several launches of the same params are one configuration.
    """

    params: Params
    points: Mapping[str, Values | None] = field(default_factory=dict)
    cause: str | None = None
    devices: int = 1
    startup_s: float | None = None
    load_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """Natural units to the scale a model is fitted on, lower is better: the logarithm where every value is positive.

    logarithmic, sign: one per objective.
    """

    logarithmic: tuple[bool, ...]
    sign: tuple[float, ...]

    @classmethod
    def of(cls, objectives: Sequence[str], values: FloatArray) -> Scale:
        """values: (n, objectives), natural units, NaN where unknown."""
        positive = tuple(bool(np.nanmin(column) > 0) if np.isfinite(column).any() else True for column in values.T)
        return cls(positive, tuple(get_metric(name).sign for name in objectives))

    def forward(self, values: FloatArray) -> FloatArray:
        """(..., objectives) in natural units -> the same shape, lower is better."""
        result = np.array(values, dtype=float)
        for j, log in enumerate(self.logarithmic):
            result[..., j] = self.sign[j] * (np.log(np.maximum(result[..., j], 1e-300)) if log else result[..., j])
        return result
