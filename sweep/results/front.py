"""The exact Pareto front of measured operating points, and its hypervolume. No fit, no hull, no tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sweep.errors import ConfigError
from sweep.results.metrics import get_metric

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sweep.results.points import OperatingPoint

# Points of different provenance never share a front: the most trusted one present is used.
_PROVENANCES = ("measured", "simulated", "estimated")


def front(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> list[OperatingPoint]:
    """The non-dominated points among those that are measured and have every objective, in the order given.

    A point is dominated if another is at least as good in every objective and better in one; equal points all
    stay. Raises ConfigError for an unknown metric, ValueError if a value is NaN or infinite.
    """
    candidates = eligible(points, objectives)
    if not candidates:
        return []
    return [p for p, kept in zip(candidates, nondominated(minimized(candidates, objectives)), strict=True) if kept]


def nondominated(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which rows of (n, objectives), lower is better, no other row dominates, (n,); equal rows all stay."""
    import moocore

    keep: npt.NDArray[np.bool_] = moocore.is_nondominated(values, keep_weakly=True)
    return keep


def eligible(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> list[OperatingPoint]:
    """The points that may be on a front of these objectives, in the order given."""
    excluded = {p.point_id for p, _ in ineligible(points, objectives)}
    return [p for p in points if p.point_id not in excluded]


def ineligible(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> list[tuple[OperatingPoint, str]]:
    """The points that cannot be on a front of these objectives, each with the reason in words."""
    if not objectives:
        raise ConfigError("no objectives given", "name at least one metric, for example cost_usd_per_mtok")
    names = [get_metric(name).name for name in objectives]
    provenance = min((p.provenance for p in points if p.state == "measured"), key=_rank, default=_PROVENANCES[0])
    found = []
    for p in points:
        missing = [name for name in names if name not in p.metrics]
        if p.state != "measured":
            found.append((p, f"{p.state}: {p.cause or 'unknown'}"))
        elif p.provenance != provenance:
            found.append((p, f"{p.provenance}, and {provenance} points never share a front with others"))
        elif missing:
            failed_quality = p.quality_cause is not None and any(name.startswith("quality_") for name in missing)
            because = f" (its quality measurement failed: {p.quality_cause})" if failed_quality else ""
            found.append((p, f"no {', '.join(missing)}{because}"))
    return found


@dataclass(frozen=True)
class Hypervolume:
    """value: volume the front dominates up to reference_point, in the product of the objectives' units."""

    value: float
    objectives: tuple[str, ...]
    reference_point: Mapping[str, float]


def hypervolume(
    points: Sequence[OperatingPoint],
    objectives: Sequence[str],
    reference_point: Mapping[str, float] | None = None,
) -> Hypervolume | None:
    """Hypervolume of the front against a stated reference point; None with neither points nor a reference.

    The default reference point is, for each objective, the worst value among all eligible points made 10 % of
    its magnitude worse (1.1 x for a positive minimized metric, 0.9 x for a maximized one; for a worst value of 0, 10 %
    of the values' range, or 0.1 where all are 0: an objective nobody differs in must not make every volume 0). It
    moves when points are added: give the same reference_point to compare two studies or two moments. Points that are
    not better than the reference in every objective add nothing.
    """
    import moocore
    import numpy as np

    candidates = eligible(points, objectives)
    signs = [get_metric(name).sign for name in objectives]
    if reference_point is None:
        if not candidates:
            return None
        values = minimized(candidates, objectives)
        worst, spread = values.max(axis=0), np.ptp(values, axis=0)
        size = np.where(worst != 0, abs(worst), np.where(spread > 0, spread, 1.0))
        reference = worst + 0.1 * size
        reference_point = {name: float(s * r) for name, s, r in zip(objectives, signs, reference, strict=True)}
    absent = [name for name in objectives if name not in reference_point]
    if absent:
        raise ConfigError(f"reference point has no {', '.join(absent)}", "give one value for each objective")
    limits = [s * reference_point[name] for name, s in zip(objectives, signs, strict=True)]
    value = moocore.hypervolume(minimized(candidates, objectives), ref=limits) if candidates else 0.0
    return Hypervolume(float(value), tuple(objectives), dict(reference_point))


def _rank(provenance: str) -> int:
    return _PROVENANCES.index(provenance) if provenance in _PROVENANCES else len(_PROVENANCES)


def minimized(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> npt.NDArray[np.float64]:
    """(n_points, n_objectives), lower is better in every column. moocore takes NaN silently; this refuses it."""
    import numpy as np

    for p in points:
        for name in objectives:
            if not math.isfinite(p.metrics[name]):
                raise ValueError(f"{name} of point {p.point_id} is {p.metrics[name]}: no data must be None")
    signs = [get_metric(name).sign for name in objectives]
    rows = [[s * p.metrics[name] for name, s in zip(objectives, signs, strict=True)] for p in points]
    return np.array(rows, dtype=np.float64)
