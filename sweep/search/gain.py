"""The expected gain in hypervolume of measuring a configuration, for many configurations at once.

Hypervolume on the model's scale, the logarithm of every positive objective: 5 % cheaper counts the same at every
price, and the far ends of a front do not outweigh its middle. The volume that a set of uncertain points adds is the
integral, over everything the front does not dominate yet, of the probability that one of them dominates it:

    gain(c) = sum_u weight P(some load of c dominates u),   P(y <= u) = prod_j Phi((u_j - mean_j) / sd_j)

over places u spread evenly (an additive recurrence with the generalized golden ratio) over what is still open and
within reach. The loads of one launch err together, so "some load" is the likeliest one.

With constraints a point gains only as far as it keeps them: each probability is multiplied by that of keeping every
bound (constrained expected improvement: Schonlau, Welch & Jones 1998; Gardner et al. 2014). A bound on an objective is
part of the same event, P(y_j <= min(u_j, bound_j)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sweep.results.front import nondominated
from sweep.search.history import FloatArray

PLACES = 800
_COARSE = 100
_DRAWN = 20_000
# The reference point: the worst value of each objective made 10 % worse.
_MARGIN = float(np.log(1.1))


@dataclass(frozen=True)
class Places:
    """at: (places, objectives) on the model's scale, not dominated by the front. weight: the volume of each.

    dominated: the volume of the front itself. box: of everything between the ideal and the reference point.
    """

    at: FloatArray
    weight: float
    dominated: float
    box: float


def draw_places(front: FloatArray, within_reach: FloatArray, worst: FloatArray, seed: int) -> Places:
    """Open places up to the reference point. front: (n, objectives), possibly empty.

    within_reach: (m, objectives), the best that any configuration could turn out to be.
    """
    best = within_reach[nondominated(within_reach)]
    low = np.concatenate([best, front]).min(axis=0)
    span = np.maximum(worst + _MARGIN - low, 1e-9)
    at = low + _recurrence(_DRAWN, len(low), seed) * span
    dominated = _dominated(at, front)
    open_ = np.flatnonzero(~dominated & _dominated(at, best))
    weight = float(span.prod()) / _DRAWN
    kept = open_[:PLACES]
    weight_kept = weight * max(1.0, len(open_) / PLACES)
    return Places(at[kept], weight_kept, weight * float(dominated.sum()), float(span.prod()))


def _recurrence(n: int, m: int, seed: int) -> FloatArray:
    """n points that fill the unit cube evenly: Roberts' R sequence, started anywhere."""
    ratio = 2.0
    for _ in range(40):
        ratio = (1.0 + ratio) ** (1.0 / (m + 1))
    steps = (1.0 / ratio) ** np.arange(1, m + 1)
    start = np.random.default_rng(seed).random(m)
    result: FloatArray = (start + np.arange(1, n + 1)[:, None] * steps) % 1.0
    return result


def _dominated(at: FloatArray, front: FloatArray) -> npt.NDArray[np.bool_]:
    result = np.zeros(len(at), dtype=bool)
    columns = np.ascontiguousarray(at.T)
    for point in front:
        result |= np.logical_and.reduce([value <= column for value, column in zip(point, columns, strict=True)])
    return result


def normal_cdf(x: FloatArray) -> FloatArray:
    """Phi to within 2e-4: the tanh form of Page (1977)."""
    result: FloatArray = x * x
    result *= 0.7978845608 * 0.044715  # in place: of a suggestion's time most is spent here
    result += 0.7978845608
    result *= x
    np.tanh(result, out=result)
    result += 1.0
    result *= 0.5
    return result


def log_kept(mean: FloatArray, deviation: FloatArray, bounds: FloatArray) -> FloatArray:
    """log P(every bound is kept), (...). mean, deviation: (..., columns); bounds: (columns,), infinite where none.

    The logarithm tells hopeless from more hopeless. In the tail by the bound of Sampford (1953) on Mills' ratio.
    """
    x = (bounds - mean) / deviation
    t = np.maximum(-x, 2.0)
    tail = -0.5 * t * t - 0.5 * np.log(2 * np.pi) + np.log(4.0 / (3.0 * t + np.sqrt(t * t + 8.0)))
    result: FloatArray = np.where(x < -2.0, tail, np.log(normal_cdf(np.maximum(x, -2.0)))).sum(axis=-1)
    return result


def chance(places: FloatArray, mean: FloatArray, deviation: FloatArray) -> FloatArray:
    """P(a point dominates a place), (points, places). mean, deviation: (points, objectives)."""
    result = np.ones((len(mean), len(places)), dtype=places.dtype)
    for j in range(places.shape[1]):
        result *= normal_cdf((places[None, :, j] - mean[:, j, None]) / deviation[:, j, None])
    return result


def load_gains(places: Places, mean: FloatArray, deviation: FloatArray, coarse: bool = False) -> FloatArray:
    """Gain of every load by itself, (configs, loads). mean, deviation: (configs, loads, objectives), NaN: not asked.

    coarse: from a few of the places and in single precision, for a first look at many configurations.
    """
    at = places.at[:_COARSE] if coarse else places.at
    weight = places.weight * len(places.at) / max(1, len(at))
    result = np.zeros(mean.shape[:2])
    kind: type[np.floating[Any]] = np.float32 if coarse else np.float64
    at, mean, deviation = at.astype(kind), mean.astype(kind), deviation.astype(kind)
    for load in range(mean.shape[1]):
        asked = np.isfinite(mean[:, load]).all(axis=1)
        result[asked, load] = chance(at, mean[asked, load], deviation[asked, load]).sum(axis=1) * weight
    return result


def best_loads(chances: FloatArray, start_cost: float, load_costs: FloatArray) -> tuple[float, float, list[int]]:
    """(places gained, cost, loads) of the part of one launch's ladder that gains most per cost.

    chances: (loads, places) as from `chance`, a row of NaN for a load that is not to be measured. Loads are added
    greedily.
    """
    left = np.flatnonzero(np.isfinite(chances).all(axis=1)).tolist()
    covered = np.zeros(chances.shape[1])
    cost, chosen = start_cost, list[int]()
    best: tuple[float, float, list[int]] | None = None
    while left:
        gains = (np.maximum(chances[left], covered) - covered).sum(axis=1)
        pick = left.pop(int((gains / load_costs[left]).argmax()))
        covered = np.maximum(covered, chances[pick])
        cost += float(load_costs[pick])
        chosen = [*chosen, pick]
        gain = float(covered.sum())
        if best is None or gain / cost > best[0] / best[1]:
            best = gain, cost, chosen
    return best or (0.0, cost, [])


def more_loads(
    chances: FloatArray, chosen: list[int], rate: float, load_costs: FloatArray
) -> tuple[list[int], FloatArray]:
    """The chosen loads and every other that gains at least `rate` places per cost beside them; and what they cover."""
    covered = chances[chosen].max(axis=0)
    left = [i for i in np.flatnonzero(np.isfinite(chances).all(axis=1)).tolist() if i not in chosen]
    while left:
        rates = (np.maximum(chances[left], covered) - covered).sum(axis=1) / load_costs[left]
        pick = int(rates.argmax())
        if rates[pick] < rate or rates[pick] <= 0.0:
            break
        covered = np.maximum(covered, chances[left[pick]])
        chosen = [*chosen, left.pop(pick)]
    return chosen, covered
