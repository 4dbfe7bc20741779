"""What a launch is told for its load ladder: levels it may add, bounds to look for, points it has to beat.

Only launches that measure a configuration for the first time are told anything: repeats, validations and the like have
a list of loads. Levels beyond the ladder are operating points like any other (front, pick, repeats), with two
differences: Optuna, whose load is one of the ladder, is not told of them (study/tell.py), and neither is our own
search's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sweep.config import LadderConfig
from sweep.decide.sla import Bound
from sweep.launch.ladder import LadderRules, Limit, LoadPoint, Rival, next_load
from sweep.measure.workload import Load
from sweep.results.front import front
from sweep.results.points import OperatingPoint
from sweep.results.records import PointRecord
from sweep.results.uncertainty import Spreads
from sweep.study.ledger import Ledger


def ladder_rules(
    config: LadderConfig,
    ledger: Ledger,
    objectives: Sequence[str],
    bounds: Sequence[Bound],
    ladder: Sequence[Load],
    config_hash: str,
    fingerprint: str,
) -> LadderRules:
    """For the next launch of this configuration, from what is known now."""
    if config == LadderConfig():
        return LadderRules()
    mine = ledger.settled_of(config_hash)
    added = {r.load_label for r in mine} - {load.label for load in ladder}
    rules = LadderRules(
        extra=max(0, config.extra_levels - len(added)),
        limits=tuple(Limit(b.metric, b.value) for b in bounds if not b.metric.startswith("quality_")),
        known=tuple(map(LoadPoint.of, mine)),
    )
    points = ledger.operating_points()
    quality = _quality(points, fingerprint)
    if any(b.metric in quality and not b.meets(quality[b.metric][0]) for b in bounds if not b.of_reference):
        rules = replace(rules, extra=0)  # at no load will it keep that bound
    if config.cut_confidence is None:
        return rules
    others = [p for p in points if p.config_hash != config_hash and _keeps(p, bounds)]
    spreads = Spreads(points)
    return replace(
        rules,
        confidence=config.cut_confidence,
        objectives=tuple(objectives),
        rivals=tuple(_rival(p, spreads, objectives, fingerprint) for p in front(others, objectives)),
        spreads={n: s for n in objectives if (s := spreads.pooled(n)) is not None},
        quality={n: q for n, q in quality.items() if n in objectives},
    )


def next_level(records: Sequence[PointRecord], ladder: Sequence[Load], rules: LadderRules) -> Load | None:
    """The level that a launch which ended early had still to place, from the settled points of its configuration."""
    return next_load([], [], replace(rules, known=tuple(map(LoadPoint.of, records))), ladder)


def _keeps(point: OperatingPoint, bounds: Sequence[Bound]) -> bool:
    """Whether it keeps every bound: one that does not is no reason to give another up."""
    return all(b.metric in point.metrics and b.meets(point.metrics[b.metric]) for b in bounds if not b.of_reference)


def _rival(point: OperatingPoint, spreads: Spreads, objectives: Sequence[str], fingerprint: str) -> Rival:
    known = {name: s.standard_error for name in objectives if (s := spreads.of(point, name)) is not None}
    tied = [n for n in objectives if n.startswith("quality_")] if point.fingerprint == fingerprint else []
    return Rival(point.point_id, {name: point.metrics[name] for name in objectives}, known, tuple(tied))


def _quality(points: Sequence[OperatingPoint], fingerprint: str) -> dict[str, tuple[float, float]]:
    """quality metric -> (value, standard error) of these numerics, as far as they were measured."""
    same = next((p for p in points if p.fingerprint == fingerprint and p.quality_se), None)
    return {} if same is None else {name: (same.metrics[name], se) for name, se in same.quality_se.items()}
