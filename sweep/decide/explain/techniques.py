"""Along or outward: what each technique does to the front.

A technique that only moves along the frontier offers other trade-offs (cheaper but slower); one that pushes outward
beats what could be had without it. So each value of each knob is taken out of the study, and the front with it is
compared with the front without it:

* outward: a point of the front without it is beaten by one that has it, in 95 % of the draws of results.uncertainty:
  better in one objective by 1 % or more, and worse in another by at most half of that and by at most 5 %. Where such
  points have a partner that differs in nothing else, the technique must improve something there beyond noise as well
  (else: over all such pairs): configs have many knobs, and another one may have done it.
* along: it is on the front, beats nothing of the front without it beyond noise, and does change something.
* inward: it is not on the front, and where pairs tell, it does not only help.
* no effect: pairs of configs that differ in nothing else are within 5 % of each other in every objective.
* cannot tell: everything else, with the reason.

The gain is the hypervolume that the front loses without it, as a share of what remains, with the 95 % interval over the
draws; one reference point serves all. More points never make a hypervolume smaller, so a gain alone proves nothing.

Quality is a price, not a direction here: fronts are compared in the other objectives, and the quality of both sides is
told. A lossy format could not beat a lossless one in all objectives otherwise, however much faster it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from sweep.decide.explain.arena import Arena, at_load
from sweep.decide.explain.change import Change, changes, percent_text
from sweep.decide.explain.knobs import Knobs, Pair, Value, configs, level_words, short_name, technique_of
from sweep.decide.wording import number_text, plural
from sweep.results.front import eligible, minimized, nondominated
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import COVERAGE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    BoolArray = npt.NDArray[np.bool_]

MOVEMENTS = ("outward", "along", "inward", "no effect", "cannot tell")
Movement = Literal["outward", "along", "inward", "no effect", "cannot tell"]

LIKELY, RARELY = 0.5, 0.05
WORTH, EQUAL = 0.01, 0.05  # an improvement worth a word; a difference that is none
LEAST_CONFIGS = 3  # on each side, where no pair differs in nothing else
MANY_LEVELS = 4


@dataclass(frozen=True)
class TechniqueEffect:
    """What one value of one knob does to the front (level: in words; "any of n values": all but the baseline's).

    text: the sentence. objectives: those in which fronts are compared. gain: hypervolume, as a share of that without
    it. n_with, n_without: configs; n_pairs: pairs of configs that differ in nothing else, whose changes are `effects`
    (quality included). beaten: points of the front without it that points with it beat; loads: of the points that beat
    them (else: that are on the front); improvements: the largest there, as a fraction; region: least and largest value
    of each objective of the beaten points. quality: median quality_kl (with, without) of these points; None where it
    was not measured.
    """

    technique: str
    knob: str
    level: str
    verdict: Movement
    text: str
    objectives: tuple[str, ...]
    gain: float | None
    gain_interval: tuple[float, float] | None
    n_with: int
    n_without: int
    n_pairs: int
    loads: tuple[str, ...]
    beaten: tuple[str, ...]
    improvements: Mapping[str, float]
    region: Mapping[str, tuple[float, float]]
    quality: tuple[float, float] | None
    effects: Mapping[str, Change]
    with_ids: frozenset[str] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        names = (
            "technique", "knob", "level", "verdict", "text", "objectives", "gain", "gain_interval", "n_with",
            "n_without", "n_pairs", "loads", "beaten", "quality",
        )  # fmt: skip
        effects = {name: change.to_dict() for name, change in self.effects.items()}
        return {
            **{n: getattr(self, n) for n in names},
            "improvements": dict(self.improvements),
            "region": dict(self.region),
            "effects": effects,
        }


def techniques(
    points: Sequence[OperatingPoint],
    objectives: Sequence[str],
    *,
    load: str | None = None,
    technique: str | None = None,
) -> list[TechniqueEffect]:
    """Every technique that varies, or the one named (technique, knob or argument), at all loads or at one.

    Outward ones first, then by gain. Raises ConfigError for an unknown load or a technique that does not vary.
    """
    arena = Arena(at_load(points, load), objectives)
    knobs = Knobs(arena.points)
    found = []
    for knob in knobs.chosen(technique):
        base, *others = knobs.levels(knob)
        pairs = knobs.pairs(knob)
        if len(others) > 1:
            words = f"{short_name(knob)}: any of {len(others)} values"
            found.append(_effect(arena, knobs, knob, words, [v != base for v in _column(knobs, knob)], pairs))
        if len(others) <= MANY_LEVELS or technique is not None:
            for level in others:
                mask = [v == level for v in _column(knobs, knob)]
                own = [pair for pair in pairs if pair.after_value == level]
                found.append(_effect(arena, knobs, knob, level_words(knob, level, base), mask, own))
    return sorted(found, key=lambda e: (MOVEMENTS.index(e.verdict), -(e.gain or 0.0)))


def technique_fronts(points: Sequence[OperatingPoint], effect: TechniqueEffect) -> pd.DataFrame:
    """The points behind an effect, for the figure of its two fronts, in its first two objectives (natural units).

    Columns: side ("with" or "without"), point_id, load_label, x, y, on_front (of its own side).
    """
    import pandas as pd

    names = list(effect.objectives[:2])
    rows = []
    candidates = eligible(points, effect.objectives)
    for side in ("with", "without"):
        group = [p for p in candidates if (p.point_id in effect.with_ids) == (side == "with")]
        keep: Any = nondominated(minimized(group, names)) if group else []
        rows += [
            (side, p.point_id, p.load_label, p.metrics[names[0]], p.metrics[names[-1]], bool(kept))
            for p, kept in zip(group, keep, strict=True)
        ]
    return pd.DataFrame(rows, columns=pd.Index(["side", "point_id", "load_label", "x", "y", "on_front"]))


def _column(knobs: Knobs, knob: str) -> list[Value]:
    return [knobs.value(i, knob) for i in range(len(knobs.points))]


def _effect(
    arena: Arena, knobs: Knobs, knob: str, level: str, mask_list: Sequence[bool], pairs: Sequence[Pair]
) -> TechniqueEffect:
    import numpy as np

    mask = np.array(mask_list, dtype=bool)
    ours, rest = ([p for p, m in zip(arena.points, mask, strict=True) if m == side] for side in (True, False))
    beaten = arena.beaten(mask)
    probability = np.where(mask, arena.probability, 0.0)
    shown = np.any(list(beaten.values()), axis=0) if beaten else probability >= LIKELY
    gain, gain_interval = arena.gain(mask)
    quality = [name for name in arena.asked if name.startswith("quality_")] or ["quality_kl"]
    metrics = list(dict.fromkeys([*arena.objectives, *quality]))
    effects = changes([(pair.before, pair.after) for pair in pairs], metrics, arena.spreads)
    effect = TechniqueEffect(
        technique=technique_of(knob),
        knob=knob,
        level=level,
        verdict="cannot tell",
        text="",
        objectives=arena.objectives,
        gain=gain,
        gain_interval=gain_interval,
        n_with=configs(ours),
        n_without=configs(rest),
        n_pairs=max((change.pairs for change in effects.values()), default=0),
        loads=tuple(dict.fromkeys(p.load_label for p, s in zip(arena.points, shown, strict=True) if s)),
        beaten=tuple(arena.points[i].point_id for i in beaten),
        improvements=_improvements(arena, beaten),
        region=_region(arena, beaten),
        quality=_quality(arena, list(np.flatnonzero(shown)), list(beaten), rest),
        effects=effects,
        with_ids=frozenset(p.point_id for p in ours),
    )
    verdict, text = _verdict(effect, float(probability.max(initial=0.0)), arena.unknown,
                             _attributed(arena, pairs, shown, effects))  # fmt: skip
    return replace(effect, verdict=verdict, text=text)


def _attributed(arena: Arena, pairs: Sequence[Pair], beating: BoolArray, effects: Mapping[str, Change]) -> bool | None:
    """Whether matched pairs bear out that the technique is what improves, by 1 % or more; None without any pair.

    One pair of a point that beats the front without it is enough, at 95 % for all pairs together (Bonferroni: such
    points were chosen for looking good); else the mean over all pairs counts.
    """
    if not pairs:
        return None
    ids = {p.point_id for p, b in zip(arena.points, beating, strict=True) if b}
    own = [(pair.before, pair.after) for pair in pairs if pair.after.point_id in ids]
    confidence = 1 - (1 - COVERAGE) / (len(pairs) * len(arena.objectives))
    found: list[Mapping[str, Change]] = [
        changes([pair], arena.objectives, arena.spreads, confidence=confidence) for pair in own
    ]
    return any(_improves(each[name]) for each in found or [effects] for name in arena.objectives if name in each)


def _improves(change: Change) -> bool:
    gain = abs(math.log(change.value)) if change.relative else abs(change.value)
    return change.beyond_noise and not change.worse and gain >= math.log(1 + WORTH)


def _improvements(arena: Arena, beaten: Mapping[int, BoolArray]) -> dict[str, float]:
    """The largest improvement of each objective over a beaten point, by one that beats it, as a fraction."""
    found: dict[str, float] = {}
    for i, by in beaten.items():
        best = arena.measured[by].min(axis=0)
        for name, ours, theirs in zip(arena.objectives, best, arena.measured[i], strict=True):
            if theirs:
                found[name] = max(found.get(name, 0.0), float((theirs - ours) / abs(theirs)))
    return found


def _region(arena: Arena, beaten: Iterable[int]) -> dict[str, tuple[float, float]]:
    """Least and largest value of each objective over the beaten points."""
    points = [arena.points[i] for i in beaten]
    return {n: (min(v), max(v)) for n in arena.objectives if (v := [p.metrics[n] for p in points])}


def _quality(
    arena: Arena, ours: Sequence[int], beaten: Sequence[int], rest: Sequence[OperatingPoint]
) -> tuple[float, float] | None:
    """Median quality_kl of the points with the technique, and of those they are compared with."""
    theirs = [arena.points[i] for i in beaten] or rest
    sides = [
        [p.metrics["quality_kl"] for p in group if "quality_kl" in p.metrics]
        for group in ([arena.points[i] for i in ours], theirs)
    ]
    return (median(sides[0]), median(sides[1])) if all(sides) else None


def _verdict(
    e: TechniqueEffect, probability: float, unknown: Sequence[str], attributed: bool | None
) -> tuple[Movement, str]:
    """The verdict and its sentence.

    probability: of its likeliest point being on the front. unknown: objectives without a known noise. attributed: see
    _attributed.
    """
    data = f"({plural(e.n_with, 'config')} with, {e.n_without} without, {plural(e.n_pairs, 'matched pair')})"
    effects = [e.effects[name] for name in e.objectives if name in e.effects]
    real = [c for c in effects if c.beyond_noise]
    better = any(value >= WORTH for value in e.improvements.values())
    if not e.n_pairs and min(e.n_with, e.n_without) < LEAST_CONFIGS:
        return "cannot tell", f"cannot tell: {data[1:-1]}"
    if unknown:
        return "cannot tell", f"cannot tell: the noise of {', '.join(unknown)} is unknown {data}"
    if better and attributed is not False:
        alone = "" if attributed else ", other knobs differ too"
        return "outward", f"outward{_by(e)}: {_best(e)}, {_where(e)} {data}{alone}{_quality_words(e)}"
    if effects and all(change.within(EQUAL) for change in effects):
        return "no effect", f"no effect: every objective within {EQUAL:.0%} {data}"
    if better:
        return "cannot tell", f"cannot tell: configs with it are better ({_best(e)}), it alone: {_said(effects)} {data}"
    if effects and not real:
        return "cannot tell", f"cannot tell: nothing beyond noise: {_said(effects)} {data}"
    if probability >= LIKELY:
        at = f"on the front at {', '.join(e.loads)}, beats nothing there is without it"
        changed = f"; {_said(real)}" if real else ""
        return "along", f"only along{_by(e)}: {at}{changed} {data}{_quality_words(e)}"
    if real and not any(c.worse for c in real):
        return (
            "cannot tell",
            f"cannot tell: it helps: {_said(real)}, but was not tried with what is on the front {data}",
        )
    changed = f": {_said(real)}" if real else ""
    if probability <= RARELY:
        return "inward", f"inward: not on the front at any load{changed} {data}"
    return "cannot tell", f"cannot tell: on the front in at most {probability:.0%} of the draws{changed} {data}"


def _by(e: TechniqueEffect) -> str:
    if e.gain is None:
        return ""
    around = e.gain_interval
    inside = f" ({percent_text(around[0])} to {percent_text(around[1])})" if around else ""
    return f", {percent_text(e.gain)} % hypervolume{inside}"


def _best(e: TechniqueEffect) -> str:
    parts = [
        f"{value:.0%} {'lower' if get_metric(name).sign > 0 else 'higher'} {name}"
        for name, value in sorted(e.improvements.items(), key=lambda item: -item[1])
        if value >= WORTH
    ]
    return f"up to {' or '.join(parts)}"


def _where(e: TechniqueEffect) -> str:
    name, (low, high) = next(iter(e.region.items()))
    was = number_text(low) if low == high else f"{number_text(low)} to {number_text(high)}"
    return f"at {', '.join(e.loads)}, where {name} was {was}"


def _said(found: Iterable[Change]) -> str:
    return ", ".join(change.text for change in found)


def _quality_words(e: TechniqueEffect) -> str:
    if e.quality is None:
        return "; quality not measured"
    if e.quality[0] == e.quality[1]:
        return f"; at equal quality (KL {number_text(e.quality[0])})"
    return f"; at KL {number_text(e.quality[0])} instead of {number_text(e.quality[1])}"
