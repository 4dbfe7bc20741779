"""What hours are expected to buy: the night rehearsed on the estimated table, before a GPU is paid for.

The truth of a rehearsal is the estimate times an error of its own for each configuration and objective (lognormal,
ERROR), since an estimate is not the truth. Launches are made in an order until the node's device-seconds are used up;
what counts is the share of the true front's hypervolume that they have found, on the logarithmic scale. Two orders
bound a search: at random, and along the estimated front, then the front behind it and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sweep.estimate.preview import Candidate
from sweep.results.front import nondominated

ERROR = 0.2
HOURS = (2.0, 8.0, 24.0)
_REHEARSALS = 12
# The reference point: the worst value of each objective made 10 % worse.
_MARGIN = float(np.log(1.1))

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """Means over the rehearsals. launches: that fit into the hours. at_random, estimate_first: found hypervolume."""

    hours: float
    launches: int
    at_random: float
    estimate_first: float


def forecast(
    candidates: Mapping[str, Candidate], devices: int, hours: Sequence[float] = HOURS, seed: int = 0
) -> list[Forecast]:
    """One line for each of these hours on a node of so many devices. Empty where nothing was estimated."""
    known = [c for c in candidates.values() if c.values]
    if not known:
        return []
    owner = np.repeat(np.arange(len(known)), [len(c.values) for c in known])
    estimated, sign = _logarithms(np.array([row for c in known for row in c.values]))
    cost = np.array([c.devices * c.seconds for c in known])
    rng = np.random.default_rng(seed)
    order = _estimate_order(estimated, owner, len(known))
    found: dict[float, list[tuple[int, float, float]]] = {h: [] for h in hours}
    for _ in range(_REHEARSALS):
        error = rng.normal(0.0, ERROR, (len(known), estimated.shape[1])) * sign
        true = estimated + error[owner]
        worst = true.max(axis=0) + _MARGIN
        whole = _hypervolume(true, worst)
        shuffled = rng.permutation(len(known))
        for h in hours:
            afforded = [_afforded(cost[o], 3600.0 * h * devices) for o in (shuffled, order)]
            shares = [
                _hypervolume(true[np.isin(owner, o[:n])], worst) / whole
                for o, n in zip((shuffled, order), afforded, strict=True)
            ]
            found[h].append((afforded[0], shares[0], shares[1]))
    return [Forecast(h, round(float(m[0])), float(m[1]), float(m[2])) for h, m in
            ((h, np.mean(rows, axis=0)) for h, rows in found.items())]  # fmt: skip


def _logarithms(signed: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(minimized logarithms, sign of each column) of signed values, which are positive or all negated."""
    sign = np.where(signed.min(axis=0) < 0, -1.0, 1.0)
    result: FloatArray = sign * np.log(np.maximum(np.abs(signed), 1e-300))
    return result, sign


def _estimate_order(estimated: FloatArray, owner: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """Configurations by the first front on which one of their loads is, as estimated."""
    layer = np.full(n, n)
    left = np.arange(len(owner))
    depth = 0
    while len(left):
        members = np.unique(owner[left[nondominated(estimated[left])]])
        layer[members] = depth
        left = left[~np.isin(owner[left], members)]
        depth += 1
    return np.argsort(layer, kind="stable")


def _afforded(cost: FloatArray, device_seconds: float) -> int:
    """How many launches of this order fit."""
    return int(np.searchsorted(np.cumsum(cost), device_seconds, side="right"))


def _hypervolume(values: FloatArray, worst: FloatArray) -> float:
    import moocore

    return float(moocore.hypervolume(values, ref=worst)) if len(values) else 0.0
