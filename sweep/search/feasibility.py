"""Which configurations will not run, learnt from those that did not.

Two views, of which the gloomier counts. A Gaussian process on the indicator of each cause (least-squares
classification: Rasmussen & Williams, ch. 6.5) sees that failures are near one another, as where memory runs out; all
causes share one kernel, so they cost one factorization. And crashes live where two settings meet: `suspicion` looks for
the pair that failures have in common and no success has.

What happened elsewhere (another vLLM, model or device) counts with less strength than 1: a measurement with that much
more noise for the process, part of a failure or of a success for the suspicion; and it convicts nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sweep.search.candidates import IntArray
from sweep.search.history import FloatArray
from sweep.search.model import Basis

LENGTH = 0.35
_SHARES = (0.2, 0.4, 0.4)
_DEVIATION, _NOISE = 0.45, 0.1
_USUAL_FAILURE = 0.05
_SURE = 0.02
# A success counts as this many failures that did not happen; and how much doubt is left to few failures.
_ACQUITTAL, _DOUBT = 3.0, 0.5
# From here on a pair of settings is a rule: three failures and no success, and it is not launched again.
CONVICTED = 0.85
# Of what happened with another vLLM, model or device: a failure there makes one here as likely as not.
ELSEWHERE = 0.5


@dataclass(frozen=True)
class Feasibility:
    """causes, in order of the columns of weights. base: probability of each where nothing is known."""

    causes: tuple[str, ...]
    base: FloatArray
    weights: FloatArray

    def probabilities(self, found: Basis) -> FloatArray:
        """(configs, causes), each within 0 and 1."""
        if not self.causes:
            return np.zeros((len(found.mean), 0))
        estimate = self.base + _kernel(found) @ self.weights
        result: FloatArray = np.clip(estimate, 0.0, 1.0)
        return result

    def runs(self, found: Basis) -> FloatArray:
        """P(it runs), (configs,): never quite 0 nor 1, since a failure may have been an accident."""
        failing = self.probabilities(found).sum(axis=1) if self.causes else np.full(len(found.mean), _USUAL_FAILURE)
        result: FloatArray = np.clip(1.0 - failing, _SURE, 1.0 - _SURE)
        return result


def fit_feasibility(among: Basis, causes: Sequence[str | None], strength: FloatArray | None = None) -> Feasibility:
    """among: likeness of the configurations tried. causes: of each, None where it ran. strength: of each, 0 to 1."""
    names = tuple(sorted({cause for cause in causes if cause is not None}))
    if not names:
        return Feasibility((), np.zeros(0), np.zeros((len(causes), 0)))
    indicator = np.array([[float(cause == name) for name in names] for cause in causes])
    weight = np.ones(len(causes)) if strength is None else strength
    base = (weight @ indicator + _USUAL_FAILURE) / (weight.sum() + 1.0)
    kernel = _kernel(among) + np.diag(_NOISE**2 + _DEVIATION**2 * (1.0 - weight) / weight)
    return Feasibility(names, base, np.linalg.solve(kernel, indicator - base))


def suspicion(
    rows: IntArray, seen: IntArray, failed: npt.NDArray[np.bool_], strength: FloatArray | None = None
) -> FloatArray:
    """P(it fails) by the most suspect pair of settings it has, (rows,). rows, seen: codes; failed, strength: of those.

    Every failure blames its most suspect pairs, so that what one pair explains does not make others suspect.
    """
    result = np.zeros(len(rows))
    if not failed.any():
        return result
    pairs = list(itertools.combinations(range(rows.shape[1]), 2)) or [(0, 0)]
    width = int(max(rows.max(initial=0), seen.max(initial=0))) + 1
    keys = np.stack([seen[:, i] * width + seen[:, j] for i, j in pairs], axis=1)
    asked = np.stack([rows[:, i] * width + rows[:, j] for i, j in pairs], axis=1)
    tables = np.zeros((2, len(pairs), width * width))
    which = np.arange(len(pairs))
    weight = np.ones(len(failed)) if strength is None else strength
    for key, bad, counts in zip(keys, failed, weight, strict=True):
        tables[int(bad), which, key] += counts
    ran, fell = tables
    suspect = fell / (fell + _ACQUITTAL * ran + 1.0)
    blamed = np.zeros_like(fell)
    for key, counts in zip(keys[failed], weight[failed], strict=True):
        own = suspect[which, key]
        worst = own >= 0.95 * own.max()
        blamed[which[worst], key[worst]] += counts / worst.sum()
    final = blamed / (blamed + _ACQUITTAL * ran + _DOUBT)
    result = np.asarray(final[which[None, :], asked].max(axis=1), dtype=np.float64)
    return np.minimum(result, 1.0 - _SURE)


def _kernel(found: Basis) -> FloatArray:
    single, pairs, together = _SHARES
    return _DEVIATION**2 * (single * found.mean + pairs * found.mean**2 + together * found.product)
