"""Where another measurement is worth its GPU-seconds.

Two kinds of repeat, each a fresh launch with another draw of the requests:

* the control: vLLM's defaults at their busiest load, every `control_every` launches and at least once. It tells how far
  two launches of the same configuration differ (which every point measured once needs to know), and whether the node
  itself drifted through the night.
* an open point: one that is on the front by a single measurement (it was chosen for its luck too), or whose membership
  of the front is neither clearly so nor clearly not, most open first; or, where
  that is measured less often, the rival that most likely dominates it. The open loads of one configuration are repeated
  in one launch.

Repeats may take at most `share` of the launches' seconds, and no point is measured more than `max_per_point` times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sweep.config import RepeatsConfig
from sweep.decide.sla import Bound
from sweep.measure.workload import Load
from sweep.results.front import eligible, front
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.records import LaunchRecord
from sweep.results.uncertainty import Spreads, minimized_draws, on_front
from sweep.study.ledger import Ledger

if TYPE_CHECKING:
    from sweep.results.uncertainty import FloatArray

# (config_hash, load_label, repeat)
Key = tuple[str, str, int]


@dataclass(frozen=True)
class Repeat:
    """Points of one engine config to be measured once more as draw `repeat`."""

    points: tuple[OperatingPoint, ...]
    repeat: int
    why: str


def next_repeat(
    ledger: Ledger,
    objectives: Sequence[str],
    limits: RepeatsConfig,
    baseline_hash: str,
    ladder: Sequence[Load],
    *,
    bounds: Sequence[Bound] = (),
    running_s: float = 0.0,
    exclude: AbstractSet[Key] = frozenset(),
) -> Repeat | None:
    """The repeat worth most now, or None. With bounds, what is open is membership of the front of what keeps them.

    running_s: seconds that repeats in flight will take. exclude: repeats that were tried.
    """
    if not _affordable(ledger, limits.share, running_s):
        return None
    points = {(p.config_hash, p.load_label): p for p in ledger.operating_points()}
    control = _control(ledger, limits, points.get((baseline_hash, ladder[0].label)))
    candidates = itertools.chain(
        [control] if control is not None else [], _open(list(points.values()), objectives, bounds, limits, ledger)
    )
    fresh = (r for r in candidates if not exclude & {(p.config_hash, p.load_label, r.repeat) for p in r.points})
    return next(fresh, None)


def _affordable(ledger: Ledger, share: float, running_s: float) -> bool:
    """Whether one more launch of average length stays within the share."""
    total = sum(r.duration_s for r in ledger.launches)
    spent = sum(r.duration_s for r in ledger.launches if r.repeat > 0) + running_s
    mean_s = ledger.mean_launch_s()
    return mean_s is not None and spent + mean_s <= share * (total + running_s + mean_s)


def _control(ledger: Ledger, limits: RepeatsConfig, busiest: OperatingPoint | None) -> Repeat | None:
    """The baseline at its busiest load, when enough launches have passed since it was last launched."""
    if busiest is None or busiest.state != "measured":
        return None
    passed = launches_since(ledger.launches, busiest.config_hash)
    if passed < limits.control_every and busiest.n_repeats > 1:
        return None
    return Repeat((busiest,), _draw(ledger, [busiest]), f"control: {passed} launches since the last")


def launches_since(launches: Sequence[LaunchRecord], config_hash: str) -> int:
    """How many launches ended after the last of this engine config."""
    return next((i for i, r in enumerate(reversed(launches)) if r.config_hash == config_hash), len(launches))


def _open(
    points: list[OperatingPoint],
    objectives: Sequence[str],
    bounds: Sequence[Bound],
    limits: RepeatsConfig,
    ledger: Ledger,
) -> Iterator[Repeat]:
    """Configs with points whose membership is open, the most open first."""
    if not any(Spreads(points).pooled_cv(name) for name in objectives):
        return  # nothing was repeated yet: the requests of single runs alone would call nearly everything settled
    names = list(dict.fromkeys([*objectives, *(b.metric for b in bounds)]))
    candidates = eligible(points, names)
    drawn = _competing(minimized_draws(candidates, names), names, bounds)[:, :, : len(objectives)]
    share = (on_front(drawn) & np.isfinite(drawn[:, :, 0])).mean(axis=0)
    membership = {p.point_id: float(s) for p, s in zip(candidates, share, strict=True)}
    openness = {pid: min(p, 1 - p) for pid, p in membership.items()}
    # What is on the front by one measurement was chosen for its luck too: however sure it looks, it is looked at again.
    keeping = [p for p in candidates if all(b.meets(p.metrics[b.metric]) for b in bounds)]
    openness |= {p.point_id: 0.5 for p in front(keeping, objectives) if p.n_repeats == 1}
    configs: dict[str, list[OperatingPoint]] = {}
    for p in candidates:
        if openness[p.point_id] > 1 - limits.settled:
            configs.setdefault(p.config_hash, []).append(p)
    ranked = sorted(configs.values(), key=lambda group: -max(openness[p.point_id] for p in group))
    for group in ranked:
        most_open = max(group, key=lambda p: openness[p.point_id])
        rival = _rival(candidates, candidates.index(most_open), drawn)
        wanted = [group] if rival is None or most_open.n_repeats <= rival.n_repeats else [[rival], group]
        for points_of in wanted:
            repeatable = [p for p in points_of if p.n_repeats < limits.max_per_point]
            if repeatable:
                yield Repeat(tuple(repeatable), _draw(ledger, repeatable), _why(repeatable, membership))


def _competing(drawn: FloatArray, names: Sequence[str], bounds: Sequence[Bound]) -> FloatArray:
    """The draws (n, points, names), infinitely bad where a point misses a bound: it competes with nothing."""
    for bound in bounds:
        k, sign = names.index(bound.metric), get_metric(bound.metric).sign
        drawn[drawn[:, :, k] > sign * bound.value] = np.inf
    return drawn


def _rival(points: Sequence[OperatingPoint], index: int, drawn: FloatArray) -> OperatingPoint | None:
    """The point that dominates this one in most draws; None if none ever does. drawn: (draws, points, objectives)."""
    columns = drawn.transpose(2, 0, 1)
    no_worse = np.logical_and.reduce([column <= column[:, [index]] for column in columns])
    better = np.logical_or.reduce([column < column[:, [index]] for column in columns])
    dominates = (no_worse & better).mean(axis=0)
    best = int(dominates.argmax())
    return points[best] if dominates[best] > 0 else None


def _why(group: Sequence[OperatingPoint], membership: dict[str, float]) -> str:
    shares = ", ".join(f"{p.load_label} {membership[p.point_id]:.0%}" for p in group)
    return f"repeat: on the front with probability {shares}"


def _draw(ledger: Ledger, points: Sequence[OperatingPoint]) -> int:
    """The next draw of the requests that none of these points has seen."""
    return 1 + max(ledger.newest_repeat(p.config_hash, p.load_label) for p in points)
