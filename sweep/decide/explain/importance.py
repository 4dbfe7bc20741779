"""Which knobs matter for which objective: shares of variance, told only where the data bear it.

At each load an additive model of the knobs (one mean for each value of each) is fitted to the logarithm of the metric
(to quality and fractions as they are). What the fit loses without a knob, summed over loads, is the knob's: type II
sums of squares, so that knobs which a search tried together get no credit twice. Corrected for chance (Kelley 1935),

    share = (SS_knob - df_knob * MS_residual) / SS_total at equal load,  not below 0

In a full grid this is the variance of the knob's main effect, the first-order Sobol index that fANOVA reports, without
a model of what was not measured in between. The shares do not add up to 1: the rest is interactions, noise and what
knobs explain only together. p_value: by permutation of what the other knobs leave over, config by config with all its
loads (Freedman & Lane 1983). Knobs whose values always go together cannot be told apart: they are one row ("a + b").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sweep.decide.explain.change import is_relative
from sweep.decide.explain.knobs import Knobs, configs
from sweep.decide.wording import plural
from sweep.results.front import eligible
from sweep.results.points import OperatingPoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float64]

LEAST_CONFIGS = 8
LEAST_PER_VALUE = 2
LEAST_RESIDUAL = 3  # configs more than the model has parameters, at an average load
SIGNIFICANT = 0.05
_PERMUTATIONS = 199
_COLUMNS = ("objective", "knob", "share", "p_value", "levels", "configs")


def importance(points: Sequence[OperatingPoint], objectives: Sequence[str], *, seed: int = 0) -> pd.DataFrame:
    """One row for each objective and knob, largest share first.

    Columns objective, knob, share, p_value, levels (values it has), configs. "load" is a row too: the share of all
    variance that the load explains; the others are shares of what is left at equal load. share is NaN for a knob of
    which fewer than two values have two configs. attrs["cause"]: objective -> why nothing is said of it.
    """
    import pandas as pd

    rows: list[tuple[Any, ...]] = []
    causes: dict[str, str] = {}
    for number, name in enumerate(objectives):
        found, cause = _of_objective(eligible(points, [name]), name, seed)
        rows += [(name, *row, number, row[0] != "load") for row in found]
        if cause is not None:
            causes[name] = cause
    frame = pd.DataFrame(rows, columns=pd.Index([*_COLUMNS, "_objective", "_knob"]))
    frame = frame.sort_values(["_objective", "_knob", "share"], ascending=[True, True, False], ignore_index=True)
    frame = frame[list(_COLUMNS)]
    frame.attrs["cause"] = causes
    return frame


def _of_objective(
    points: Sequence[OperatingPoint], objective: str, seed: int
) -> tuple[list[tuple[Any, ...]], str | None]:
    """Rows of the frame without the objective, and why there are none."""
    import numpy as np

    n = configs(points)
    if n < LEAST_CONFIGS:
        return [], f"{plural(n, 'config')} with a value, {LEAST_CONFIGS} are needed"
    values = _matrix(points, objective)
    if np.nanmax(values) == np.nanmin(values):
        return [], "it has the same value everywhere"
    load = 1 - np.nansum((values - np.nanmean(values, axis=0)) ** 2) / np.nansum((values - np.nanmean(values)) ** 2)
    rows: list[tuple[Any, ...]] = [("load", float(load), None, values.shape[1], n)] if values.shape[1] > 1 else []
    knobs = _knobs(points)
    told = [(name, codes) for name, codes in knobs if (np.bincount(codes) >= LEAST_PER_VALUE).sum() > 1]
    rows += [(name, float("nan"), None, int(codes.max()) + 1, n) for name, codes in knobs if len(set(codes)) > 1
             and not any(name == other for other, _ in told)]  # fmt: skip
    model = _Model(values, [codes for _, codes in told])
    if told and model.residual_df < LEAST_RESIDUAL * values.shape[1]:
        parameters = 1 + sum(int(codes.max()) for _, codes in told)
        return [], f"{plural(n, 'config')} for {plural(parameters, 'parameter')} of the knobs"
    rng = np.random.default_rng(seed)
    for k, (name, codes) in enumerate(told):
        rows.append((name, *model.knob(k, rng), int(codes.max()) + 1, n))
    return rows, None


def _matrix(points: Sequence[OperatingPoint], objective: str) -> FloatArray:
    """(configs, loads) on the scale of the model; NaN where a config has no value at a load."""
    import numpy as np

    rows = _order([p.config_hash for p in points])
    columns = _order([p.load_label for p in points])
    values = np.full((len(rows), len(columns)), np.nan)
    for p in points:
        values[rows[p.config_hash], columns[p.load_label]] = p.metrics[objective]
    return np.log(values) if is_relative(objective) and np.nanmin(values) > 0 else values


def _knobs(points: Sequence[OperatingPoint]) -> list[tuple[str, IntArray]]:
    """Names of knobs that go together, and the code of their value in each config, (configs,)."""
    import numpy as np

    one_each = list({p.config_hash: p for p in points}.values())
    knobs = Knobs(one_each)
    groups: dict[tuple[int, ...], list[str]] = {}
    for knob in knobs.varying:
        values = [knobs.value(i, knob) for i in range(len(one_each))]
        order = _order(values)
        groups.setdefault(tuple(order[v] for v in values), []).append(knob)
    return [(" + ".join(names), np.array(codes, dtype=np.int64)) for codes, names in groups.items()]


def _order(values: Sequence[Any]) -> dict[Any, int]:
    """Whole numbers for values, in order of first appearance."""
    return {value: i for i, value in enumerate(dict.fromkeys(values))}


class _Model:
    """Additive models of the knobs, one for each load. values: (configs, loads); knobs: codes, (configs,) each."""

    def __init__(self, values: FloatArray, knobs: Sequence[IntArray]) -> None:
        import numpy as np

        self._values = values
        self._columns = [np.eye(int(codes.max()) + 1)[codes] for codes in knobs]
        self._constant = np.ones((len(values), 1))
        self._there = ~np.isnan(values)
        self.total = float(np.nansum((values - np.nanmean(values, axis=0)) ** 2))
        self.residual, self.residual_df = 0.0, 0
        for there, y in zip(self._there.T, values.T, strict=True):
            basis = _basis(np.hstack([self._constant, *self._columns])[there])
            rest = y[there] - basis @ (basis.T @ y[there])
            self.residual += float(rest @ rest)
            self.residual_df += len(rest) - basis.shape[1]

    def knob(self, k: int, rng: np.random.Generator) -> tuple[float, float]:
        """(share, p-value) of one knob."""
        import numpy as np

        others = [self._constant, *(x for i, x in enumerate(self._columns) if i != k)]
        orders = self._orders(rng)
        explained, df = np.zeros(1 + len(orders)), 0  # as measured, then in each reassignment
        left = np.zeros_like(explained)
        for load, there in enumerate(self._there.T):
            reduced = _basis(np.hstack(others)[there])
            own = self._columns[k][there]
            own = _basis(own - reduced @ (reduced.T @ own))
            rest = np.zeros(len(there))
            y = self._values[there, load]
            rest[there] = y - reduced @ (reduced.T @ y)
            shuffled = np.vstack([rest, rest[orders]])[:, there]
            explained += ((shuffled @ own) ** 2).sum(axis=1)
            left += (shuffled**2).sum(axis=1) - ((shuffled @ reduced) ** 2).sum(axis=1)
            df += own.shape[1]
        chance = df * self.residual / self.residual_df if self.residual_df else 0.0
        share = max(0.0, (float(explained[0]) - chance) / self.total) if self.total else 0.0
        part = explained / np.maximum(left, 1e-300)
        return share, float((part >= part[0] * (1 - 1e-9)).mean())

    def _orders(self, rng: np.random.Generator) -> IntArray:
        """Random reassignments (permutations, configs), only among configs that have values at the same loads."""
        import numpy as np

        orders = np.tile(np.arange(len(self._there)), (_PERMUTATIONS, 1))
        for pattern in np.unique(self._there, axis=0):
            same = np.flatnonzero((self._there == pattern).all(axis=1))
            orders[:, same] = rng.permuted(np.tile(same, (_PERMUTATIONS, 1)), axis=1)
        return orders


def _basis(matrix: FloatArray) -> FloatArray:
    """An orthonormal basis of the columns' span, (rows, rank)."""
    import numpy as np

    weights, directions = np.linalg.eigh(matrix.T @ matrix)  # few columns, many rows
    kept = weights > 1e-9 * max(1.0, float(weights.max(initial=0.0)))
    basis: FloatArray = matrix @ (directions[:, kept] / np.sqrt(weights[kept]))
    return basis
