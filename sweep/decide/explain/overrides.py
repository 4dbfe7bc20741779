"""What each override of a configuration is worth, and the same configuration with fewer of them.

Both come from measured points alone: the neighbour that leaves one override to vLLM's defaults and differs in nothing
else, at the same load. What nobody measured stays unknown: nothing is interpolated. An override is one knob at another
value than vLLM's defaults have; "vLLM's defaults" are the study's baseline, which may itself need some arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweep.decide.explain.change import Change, changes
from sweep.decide.explain.knobs import Knobs, level_words
from sweep.decide.wording import engine_text, shared_settings
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import Spreads

EQUAL, WORTH = 0.05, 0.01


@dataclass(frozen=True)
class OverrideWorth:
    """One override of a point. without: the measured neighbour that leaves it out; None if nobody measured one.

    effects: what having the override does to each metric (before: without it, after: the point).
    """

    knob: str
    setting: str
    without: OperatingPoint | None
    effects: Mapping[str, Change]

    @property
    def text(self) -> str:
        """One line for people."""
        if self.without is None or self.without.state == "cut":
            return f"{self.setting}: not measured without it"
        if self.without.state != "measured":
            return f"{self.setting}: needed, without it: {self.without.cause}"
        better = [c.text for c in self.effects.values() if c.beyond_noise and not c.worse]
        worse = [c.text for c in self.effects.values() if c.beyond_noise and c.worse]
        if not better and not worse:
            inside = ", ".join(c.text for c in self.effects.values())
            return f"{self.setting}: nothing beyond noise ({inside})"
        parts = [f"gains {', '.join(better)}"] if better else []
        parts += [f"costs {', '.join(worse)}"] if worse else []
        return f"{self.setting}: {' and '.join(parts)}"


@dataclass(frozen=True)
class OverrideReport:
    """minimal: the measured point with fewest of the same overrides that is as good; may be the point itself.

    As good: in no metric worse by 5 %, noise included (quality: not worse beyond noise). sure: False where that only
    looks so, by 1 %, because noise is too large or unknown to tell. minimal_effects: what the dropped overrides do to
    each metric (before: minimal, after: the point).
    """

    point: OperatingPoint
    minimal: OperatingPoint
    minimal_effects: Mapping[str, Change]
    sure: bool
    dropped: tuple[str, ...]
    worths: tuple[OverrideWorth, ...]
    shared: Mapping[str, Any]

    def text_lines(self) -> list[str]:
        """For a terminal."""
        where = f"{engine_text(self.point, self.shared)} at {self.point.load_label} ({self.point.point_id})"
        lines = [f"of {where}"]
        if not self.worths:
            return [*lines, "  no overrides: these are vLLM's defaults"]
        lines += [f"  {worth.text}" for worth in self.worths if worth.without is not None]
        unknown = [worth.setting for worth in self.worths if worth.without is None]
        lines += [f"  cannot tell: not measured without {', nor without '.join(unknown)}"] if unknown else []
        if self.dropped:
            seen = ", ".join(c.text for c in self.minimal_effects.values())
            which = ", ".join(self.dropped)
            verb = f"drop {which}" if self.sure else f"cannot tell: as good without {which} as far as noise allows"
            fewer = f"minimal: {verb} ({self.minimal.point_id}): they change {seen}"
            return [*lines, f"  {fewer}"]
        return [*lines, "  minimal: no measured config with fewer of these overrides is as good"]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "point_id": self.point.point_id,
            "minimal": self.minimal.point_id,
            "sure": self.sure,
            "dropped": list(self.dropped),
            "minimal_effects": {name: c.to_dict() for name, c in self.minimal_effects.items()},
            "overrides": [
                {
                    "knob": w.knob,
                    "setting": w.setting,
                    "without": w.without.point_id if w.without else None,
                    "effects": {name: c.to_dict() for name, c in w.effects.items()},
                    "text": w.text,
                }
                for w in self.worths
            ],
        }


def override_worth(points: Sequence[OperatingPoint], point: OperatingPoint, metrics: Sequence[str]) -> OverrideReport:
    """What the overrides of one measured point are worth in these metrics, and its minimal version."""
    same_load = [p for p in points if (p.load_label, p.provenance) == (point.load_label, point.provenance)]
    knobs, spreads = Knobs(points), Spreads(points)
    where = {p.point_id: i for i, p in enumerate(knobs.points)}
    own = _overrides(knobs, where[point.point_id])
    others = {p.point_id: _overrides(knobs, where[p.point_id]) for p in same_load}
    worths = []
    for knob in sorted(own):
        rest = {k: v for k, v in own.items() if k != knob}
        without = next((p for p in same_load if others[p.point_id] == rest), None)
        effects = changes([(without, point)], metrics, spreads) if without is not None else {}
        worths.append(OverrideWorth(knob, level_words(knob, own[knob], knobs.baseline[knob]), without, effects))
    minimal, sure = _minimal(same_load, others, point, metrics, spreads)
    dropped = sorted(own.keys() - others[minimal.point_id].keys())
    return OverrideReport(
        point=point,
        minimal=minimal,
        minimal_effects=changes([(minimal, point)], metrics, spreads) if dropped else {},
        sure=sure,
        dropped=tuple(level_words(knob, own[knob], knobs.baseline[knob]) for knob in dropped),
        worths=tuple(worths),
        shared=shared_settings(points),
    )


def _overrides(knobs: Knobs, index: int) -> dict[str, Any]:
    return {k: v for k in knobs.varying if (v := knobs.value(index, k)) != knobs.baseline[k]}


def _minimal(
    points: Sequence[OperatingPoint],
    overrides: Mapping[str, Mapping[str, Any]],
    point: OperatingPoint,
    metrics: Sequence[str],
    spreads: Spreads,
) -> tuple[OperatingPoint, bool]:
    """The point with the fewest overrides that is as good, and whether that is sure; the point itself, for sure."""
    own = overrides[point.point_id].items()
    fewer = [
        (p, list(changes([(point, p)], metrics, spreads).values()))
        for p in points
        if p.state == "measured" and overrides[p.point_id].items() < own and all(m in p.metrics for m in metrics)
    ]
    first = get_metric(metrics[0])
    fewer.sort(key=lambda item: (len(overrides[item[0].point_id]), first.sign * item[0].metrics[first.name]))
    shown = [p for p, found in fewer if all(_no_worse(c) for c in found)]
    looks = [p for p, found in fewer if all(_looks_no_worse(c) for c in found)]
    return (shown[0], True) if shown else (looks[0], False) if looks else (point, True)


def _no_worse(change: Change) -> bool:
    """Whether noise included, a change is for the worse by less than 5 %; of a difference, by none beyond noise."""
    if change.interval is None:
        return False
    if not change.relative:
        return not (change.worse and change.beyond_noise)
    low, high = change.interval
    return high <= 1 + EQUAL if get_metric(change.metric).sign > 0 else low >= 1 / (1 + EQUAL)


def _looks_no_worse(change: Change) -> bool:
    return not change.worse or (abs(change.value - 1) <= WORTH if change.relative else not change.beyond_noise)
