"""What measurements say of configurations nobody has launched: a Gaussian process over (configuration, load).

    value(x, load) = estimate(x, load) + bias + effects of single knobs + of pairs of knobs + of everything together

on the logarithmic scale. The estimate enters as it is (what is learnt is its residual), or with a fitted slope, or not
at all: whichever explains the measurements best, so an estimator that misleads is dropped. Kernels: with k_d the
likeness of two configurations in dimension d (the load is one more), A = mean_d k_d, pairs A^2, everything
prod_d k_d. Their scales, the noise and the length are chosen from a grid by the marginal likelihood times a weak prior.
Rasmussen & Williams (2006), ch. 2 and 5; additive kernels: Duvenaud et al. (2011).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweep.search.candidates import IntArray
from sweep.search.history import FloatArray

LENGTHS = (0.35, 1.2)
# Share of the variance in single knobs, pairs, and all together.
_SHARES = ((0.6, 0.2, 0.2), (0.25, 0.25, 0.5), (0.85, 0.1, 0.05))
_DEVIATIONS = (0.08, 0.2, 0.5, 1.2)
_NOISES = (0.02, 0.07)
_BIAS_VARIANCE = 0.1
# Weak beliefs: an estimator is off by a factor of about 1.3 beyond its bias, and rather right than wrong.
_USUAL_DEVIATION, _DEVIATION_SPREAD = 0.3, 0.8
_TRUST_NATS = 1.5
# Choosing scales needs no more rows than this, and predicting no more than that.
_ROWS_TO_CHOOSE = 100
MAX_ROWS = 240


@dataclass(frozen=True)
class Basis:
    """Likeness of rows to columns: mean over dimensions, and product. Shapes (rows, columns)."""

    mean: FloatArray
    product: FloatArray

    def kernel(self, deviation: float, shares: tuple[float, float, float]) -> FloatArray:
        single, pairs, together = shares
        mixed = single * self.mean + pairs * self.mean**2 + together * self.product
        result: FloatArray = _BIAS_VARIANCE + deviation**2 * mixed
        return result


def basis(
    tables: Sequence[FloatArray], rows: IntArray, columns: IntArray, load_likeness: FloatArray | None = None
) -> Basis:
    """tables: one likeness table per dimension. rows, columns: (n, dimensions). load_likeness: (rows, columns)."""
    total = np.zeros((len(rows), len(columns))) if load_likeness is None else load_likeness.copy()
    product = np.ones((len(rows), len(columns))) if load_likeness is None else load_likeness.copy()
    for d, table in enumerate(tables):
        alike = np.take(table[:, columns[:, d]], rows[:, d], axis=0)  # whole rows are copied fastest
        total += alike
        product *= alike
    return Basis(total / (len(tables) + (load_likeness is not None)), product)


@dataclass(frozen=True)
class Fit:
    """One objective's process. slope: what the estimate counts (1: as it is). A linear term in the estimate was
    fitted where linear is not None: its (center, scale)."""

    length: float
    deviation: float
    shares: tuple[float, float, float]
    noise: float
    linear: tuple[float, float] | None
    estimate_used: bool
    inverse: FloatArray
    weights: FloatArray
    offset: float
    prior: FloatArray  # of the rows fitted on

    def means(self, found: Basis, dimensions: int, near: FloatArray, estimate: FloatArray) -> FloatArray:
        """Means of `predict` at every load, (rows, loads), without a kernel for each of them.

        found: likeness of configurations, over so many dimensions, to the rows fitted on; near: (loads, rows fitted
        on), likeness of the loads, which is one dimension more. estimate: (rows, loads). A and A^2 are polynomials in
        `near`, so one product of matrices does all loads.
        """
        single, pairs, together = self.shares
        weights = self.weights
        d, near_weights = dimensions, (near * weights).T
        linear = d * (found.mean @ weights)[:, None] + near_weights.sum(axis=0)
        squared = d * d * (found.mean**2 @ weights)[:, None] + 2 * d * (found.mean @ near_weights) + near**2 @ weights
        whole = single * linear / (d + 1) + pairs * squared / (d + 1) ** 2 + together * (found.product @ near_weights)
        mean = self.offset + _BIAS_VARIANCE * weights.sum() + self.deviation**2 * whole
        if self.linear is not None:
            mean += _standard(estimate, self.linear) * (_standard(self.prior, self.linear) @ weights)
        return self._with_estimate(mean, estimate)

    def predict(self, found: Basis, estimate: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(mean, standard deviation) of the rows of `found`, whose columns are the rows fitted on; without noise."""
        kernel = found.kernel(self.deviation, self.shares)
        variance = np.full(len(kernel), _BIAS_VARIANCE + self.deviation**2)
        if self.linear is not None:
            own, fitted = _standard(estimate, self.linear), _standard(self.prior, self.linear)
            kernel = kernel + own[:, None] * fitted[None, :]
            variance = variance + own**2
        mean = self._with_estimate(self.offset + kernel @ self.weights, estimate)
        explained = np.einsum("ij,ij->i", kernel @ self.inverse, kernel)
        return mean, np.sqrt(np.maximum(variance - explained, 1e-8))

    def _with_estimate(self, mean: FloatArray, estimate: FloatArray) -> FloatArray:
        if self.linear is None and self.estimate_used:
            mean = mean + np.where(np.isfinite(estimate), estimate, self.prior.mean())
        return mean


def fit(bases: dict[float, Basis], values: FloatArray, estimate: FloatArray | None) -> Fit:
    """Fit one objective. bases: length -> likeness among the rows. values: (n,). estimate: (n,), NaN where unknown."""
    n = len(values)
    known = None if estimate is None else np.nan_to_num(estimate, nan=float(np.nanmean(values)))
    chosen = np.arange(n) if n <= _ROWS_TO_CHOOSE else np.linspace(0, n - 1, _ROWS_TO_CHOOSE).astype(int)
    modes = ("residual", "slope", "none") if known is not None else ("none",)
    best: tuple[float, tuple[str, float, float, tuple[float, float, float], float]] | None = None
    for mode, length in itertools.product(modes, LENGTHS):
        among = bases[length]
        small = Basis(among.mean[np.ix_(chosen, chosen)], among.product[np.ix_(chosen, chosen)])
        target, extra = _target(mode, values[chosen], None if known is None else known[chosen])
        choices = list(itertools.product(_DEVIATIONS, _SHARES, _NOISES))
        kernels = np.stack([small.kernel(deviation, shares) + extra for deviation, shares, _ in choices])
        evidences = _evidences(kernels, np.array([noise for *_, noise in choices]), target)
        for (deviation, shares, noise), evidence in zip(choices, evidences.tolist(), strict=True):
            evidence += _belief(mode, deviation)
            if best is None or evidence > best[0]:
                best = evidence, (mode, length, deviation, shares, noise)
    assert best is not None
    mode, length, deviation, shares, noise = best[1]
    target, extra = _target(mode, values, known)
    offset = float(target.mean())
    kernel = bases[length].kernel(deviation, shares) + extra
    inverse = np.asarray(np.linalg.inv(kernel + noise**2 * np.eye(n)), dtype=np.float64)
    linear = _centre(known) if mode == "slope" and known is not None else None
    prior = known if known is not None else np.zeros(n)
    weights: FloatArray = inverse @ (target - offset)
    return Fit(length, deviation, shares, noise, linear, mode != "none", inverse, weights, offset, prior)


def _target(mode: str, values: FloatArray, known: FloatArray | None) -> tuple[FloatArray, FloatArray | float]:
    if mode == "residual" and known is not None:
        return values - known, 0.0
    if mode == "slope" and known is not None:
        own = _standard(known, _centre(known))
        return values, own[:, None] * own[None, :]
    return values, 0.0


def _centre(known: FloatArray) -> tuple[float, float]:
    return float(known.mean()), float(known.std()) or 1.0


def _standard(estimate: FloatArray, linear: tuple[float, float]) -> FloatArray:
    result: FloatArray = (np.nan_to_num(estimate, nan=linear[0]) - linear[0]) / linear[1]
    return result


def _evidences(kernels: FloatArray, noises: FloatArray, target: FloatArray) -> FloatArray:
    """Log marginal likelihood of what is left beside the mean, (m,). kernels: (m, n, n); noises: (m,); target: (n,).

    The target is one more row of the matrix that is factored, so that its row of the factor is what a solve would give.
    """
    m, n = kernels.shape[:2]
    centred = target - target.mean()
    whole = np.zeros((m, n + 1, n + 1))
    whole[:, :n, :n] = kernels
    whole[:, np.arange(n), np.arange(n)] += (noises**2 + 1e-9)[:, None]
    whole[:, n, :n] = whole[:, :n, n] = centred
    # Any number above half @ half keeps the matrix positive definite.
    whole[:, n, n] = 1.0 + 2.0 * centred @ centred / (noises**2 + 1e-9)
    lower = np.linalg.cholesky(whole)
    half, diagonal = lower[:, n, :n], np.diagonal(lower, axis1=1, axis2=2)[:, :n]
    result: FloatArray = -0.5 * (half * half).sum(axis=1) - np.log(diagonal).sum(axis=1)
    return result


def _belief(mode: str, deviation: float) -> float:
    away = np.log(deviation / _USUAL_DEVIATION) / _DEVIATION_SPREAD
    usual = -0.5 * away**2 if mode == "residual" else 0.0
    return float(usual + {"residual": _TRUST_NATS, "slope": 0.0, "none": -_TRUST_NATS}[mode])
