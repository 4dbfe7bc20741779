"""What a study has learnt, in a minute: how sure the front is, what moved it, what to leave alone.

`explain(study)` puts together what the modules here work out from its measured points; every number is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sweep.decide.explain.arena import at_load
from sweep.decide.explain.cliffs import cliffs
from sweep.decide.explain.explanation import Explanation
from sweep.decide.explain.importance import importance
from sweep.decide.explain.interactions import interactions
from sweep.decide.explain.knobs import Knobs
from sweep.decide.explain.membership import membership
from sweep.decide.explain.overrides import OverrideReport, override_worth
from sweep.decide.explain.progress import progress
from sweep.decide.explain.techniques import techniques
from sweep.decide.explain.verdict import against_defaults, against_random
from sweep.errors import StudyError
from sweep.results.front import eligible
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint

if TYPE_CHECKING:
    from sweep.decide.opened import Study

__all__ = ["Explanation", "explain"]


def explain(
    study: Study,
    objectives: Sequence[str] | None = None,
    *,
    load: str | None = None,
    technique: str | None = None,
    point_id: str | None = None,
) -> Explanation:
    """Explain a study in its own or other objectives, at all loads or at one (its label), for all techniques or one.

    point_id: the point whose overrides are explained; default: the best of the first objective. Raises StudyError
    when no point has every objective, ConfigError for an unknown metric, load or technique.
    """
    names = [get_metric(name).name for name in objectives or study.objectives]
    points = at_load(study.operating_points, load)
    candidates = eligible(points, names)
    if not candidates:
        raise StudyError(
            f"nothing to explain in '{study.name}': no measured point has {', '.join(names) or 'an objective'}",
            "see `sweep status`, or name other metrics with --objectives",
        )
    only = None if technique is None else Knobs(candidates).chosen(technique)
    jumps = cliffs(points, names)
    together, without = interactions(points, names, only=only)
    return Explanation(
        study=study.name,
        objectives=tuple(names),
        load=load,
        technique=technique,
        n_points=len(candidates),
        n_configs=len({p.config_hash for p in candidates}),
        notes=_notes(points, names),
        membership=membership(points, names),
        progress=progress(study, names) if load is None else None,
        techniques=techniques(points, names, technique=technique),
        interactions=together,
        without_square=without,
        cliffs=[c for c in jumps if only is None or c.knob in only],
        importance=importance(points, names),
        overrides=_overrides(study, points, candidates, names, point_id),
        defaults=against_defaults(points, names),
        random=against_random(study, names),
    )


def _overrides(
    study: Study,
    points: Sequence[OperatingPoint],
    candidates: Sequence[OperatingPoint],
    objectives: Sequence[str],
    point_id: str | None,
) -> OverrideReport:
    first = get_metric(objectives[0])
    if point_id is None:
        point = min(candidates, key=lambda p: (first.sign * p.metrics[first.name], p.overrides))
        return override_worth(points, point, objectives)
    point = study.point(point_id)
    if point.state != "measured":
        raise StudyError(f"point {point_id} is {point.state}: {point.cause}", "name a measured one: see `sweep front`")
    return override_worth(study.operating_points, point, objectives)


def _notes(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> tuple[str, ...]:
    """What everything else rests on: how noise is known."""
    measured = eligible(points, objectives)
    simulated = {p.provenance for p in measured} - {"measured"}
    notes = [f"These points are {', '.join(simulated)}, not measured."] if simulated else []
    if not any(p.n_repeats > 1 for p in measured):
        notes.append(
            "No point was repeated: noise is known within runs only, and launches may differ by more than that."
        )
    return tuple(notes)
