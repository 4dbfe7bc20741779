"""Was the search worth it: the front against vLLM's defaults, and against as many random configurations.

Defaults: fine, if no point of theirs is beaten (as decide.explain.techniques has it, at no loss of quality) and no
single objective can be bettered by 1 % beyond noise at equal load.

Random: random search of equal budget is the baseline of every search. A study that was itself random, or a grid in
random order, is that baseline. Otherwise its own start-up configs, which its sampler drew at random, are: the
hypervolume of all of them against that of as many configs launched after them, both together with the defaults. Budgets
are compared at equal numbers of configs; nothing is extrapolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from sweep.decide.explain.arena import Arena, relative_gain
from sweep.decide.explain.change import Change, change, is_relative, percent_text
from sweep.decide.wording import number_text, plural
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.records import PointRecord
from sweep.results.uncertainty import COVERAGE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sweep.decide.opened import Study

WORTH = 0.01
LEAST_RANDOM = 5
_RANDOM = ("random", "qmc")
_RANDOM_START = ("tpe", "nsga2", "gp")


@dataclass(frozen=True)
class Verdict:
    """outcome: "fine" or "beaten" (the defaults), "better", "no better" (than random), "is random", "cannot tell".

    gain: hypervolume over the baseline's, as a share of it (over the defaults': without quality, as in techniques);
    gain_interval: 95 %, over the draws.
    """

    outcome: Literal["fine", "beaten", "better", "no better", "is random", "cannot tell"]
    text: str
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def against_defaults(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> Verdict:
    """Whether anything measured beats vLLM's defaults, by how much, and in what."""
    import numpy as np

    arena = Arena(points, objectives, quality_is_a_price=False)
    theirs = np.array([p.purpose == "baseline" for p in arena.points], dtype=bool)
    if not theirs.any():
        return Verdict("cannot tell", "cannot tell: vLLM's defaults have no measured point with every objective")
    if theirs.all():
        return Verdict("cannot tell", "cannot tell: nothing but vLLM's defaults was measured")
    gain, interval = Arena(points, objectives).gain(~theirs)
    by = _by(gain, interval)
    if arena.unknown:
        noise = f"the noise of {', '.join(arena.unknown)} is unknown"
        return Verdict("cannot tell", f"cannot tell: {noise}; as measured{by}", gain, interval)
    tests = int(theirs.sum() * (~theirs).sum()) * len(arena.objectives)
    beaten = [
        i
        for i, by in arena.beaten(~theirs).items()
        if any(
            _shown(arena, arena.points[i], arena.points[j], name, tests)
            for j in by.nonzero()[0]
            for name in arena.objectives
        )
    ]
    gains = _gains(arena, theirs)
    total = int(theirs.sum())
    if not beaten and not gains:
        text = f"the defaults are fine: none of their {plural(total, 'point')} is beaten beyond noise{by}"
        return Verdict("fine", text, gain, interval)
    parts = [f"{len(beaten)} of their {plural(total, 'point')} beaten"] if beaten else []
    parts += [f"at equal load {', '.join(gains)}"] if gains else []
    lead = "the defaults can be beaten" if beaten else "the defaults are on the front, but can be traded for better"
    return Verdict("beaten", f"{lead}: {'; '.join(parts)}{by}", gain, interval)


def _shown(arena: Arena, default: OperatingPoint, rival: OperatingPoint, name: str, rivals: int) -> Change | None:
    """The improvement of an objective, if it is one of 1 % or more beyond noise.

    The best of many rivals looks better than it is: at 95 % for all of them together (Bonferroni).
    """
    found = change([(default, rival)], name, arena.spreads, confidence=1 - (1 - COVERAGE) / max(1, rivals))
    if found is None or not found.relative or not found.beyond_noise or found.worse:
        return None
    return found if abs(found.value - 1) >= WORTH else None


def _gains(arena: Arena, theirs: npt.NDArray[np.bool_]) -> list[str]:
    """Of each objective, the largest improvement over the defaults at one load that is beyond noise, in words."""
    said = []
    for name in filter(is_relative, arena.objectives):
        found: list[tuple[Change, str]] = []
        for i in theirs.nonzero()[0]:
            default = arena.points[i]
            rivals = [
                p for p, d in zip(arena.points, theirs, strict=True) if not d and p.load_label == default.load_label
            ]
            if rivals:
                best = min(rivals, key=lambda p: get_metric(name).sign * p.metrics[name])
                step = change([(default, best)], name, arena.spreads)
                tests = len(rivals) * len(arena.objectives) * int(theirs.sum())
                if step is not None and _shown(arena, default, best, name, tests):
                    found.append((step, f"at {default.load_label}{_quality(best)}"))
        if found:
            step, where = max(found, key=lambda item: abs(item[0].value - 1))
            said.append(f"{step.text} {where}")
    return said


def _quality(point: OperatingPoint) -> str:
    kl = point.metrics.get("quality_kl")
    return "" if kl is None else f" (KL {number_text(kl)})"


def against_random(study: Study, objectives: Sequence[str] | None = None, *, seed: int = 0) -> Verdict:
    """Whether the search found more than as many random configurations."""
    import numpy as np

    names = list(objectives or study.objectives)
    sampler = study.config.get("sampler", {})
    kind = sampler.get("kind")
    if kind in _RANDOM:
        return Verdict("is random", f"this study is the baseline: its sampler is {kind}")
    if kind not in _RANDOM_START:
        why = f"{kind} draws none of its configs at random" if kind else "the study does not say which sampler it used"
        return Verdict("cannot tell", f"cannot tell: {why}")
    arena = Arena(study.operating_points, names, quality_is_a_price=False)
    order = _launched(study)
    defaults = {p.config_hash for p in arena.points if p.purpose == "baseline"}
    random = _startup(study, order, int(sampler.get("startup_trials", 0)))
    learnt = [c for c in order if c not in random and c not in defaults]
    n = min(len(random), len(learnt))
    if n < LEAST_RANDOM:
        data = (
            f"{plural(len(random), 'random config')}, {len(learnt)} chosen by {kind}; {LEAST_RANDOM} of each are needed"
        )
        return Verdict("cannot tell", f"cannot tell: {data}")

    def volumes(configs: Sequence[str]) -> npt.NDArray[np.float64]:
        chosen = {*configs, *defaults}
        return arena.volumes(np.array([p.config_hash in chosen for p in arena.points], dtype=bool))

    rng = np.random.default_rng(seed)
    # Of more random configs than needed, the mean over subsets is what n of them give.
    subsets = [random] if len(random) == n else [list(rng.choice(random, n, replace=False)) for _ in range(32)]
    baseline = np.mean([volumes(subset) for subset in subsets], axis=0)
    gain, interval = relative_gain(volumes(learnt[:n]), baseline)
    data = f"{kind}'s first {n} configs against as many random ones{_by(gain, interval)}"
    if interval is None or arena.unknown:
        return Verdict("cannot tell", f"cannot tell: noise is unknown or too large; {data}", gain, None)
    if interval[0] > 0:
        return Verdict("better", f"better than random: {data}", gain, interval)
    word = "worse than random" if interval[1] < 0 else "no better than random"
    return Verdict("no better", f"{word}: {data}", gain, interval)


def _launched(study: Study) -> list[str]:
    """Configs that trials asked for, in order of their first record, failed ones included."""
    trials = [r for r in study.records if isinstance(r, PointRecord) and r.purpose == "trial"]
    return list(dict.fromkeys(r.config_hash for r in trials))


def _startup(study: Study, order: Sequence[str], startup_trials: int) -> list[str]:
    """Configs that were begun before the sampler had seen its number of start-up trials (finished points)."""
    settled: list[str] = []
    begun: dict[str, str] = {}
    for r in study.records:
        if isinstance(r, PointRecord) and r.purpose in ("baseline", "trial"):
            settled.append(r.finished_at)
            begun[r.config_hash] = min(r.started_at, begun.get(r.config_hash, r.started_at))
    if len(settled) <= startup_trials:
        return list(order)
    learnt_from = sorted(settled)[startup_trials - 1] if startup_trials else ""
    return [c for c in order if begun[c] < learnt_from]


def _by(gain: float | None, interval: tuple[float, float] | None) -> str:
    if gain is None:
        return ""
    around = f" ({percent_text(interval[0])} to {percent_text(interval[1])})" if interval else ""
    return f"; {percent_text(gain)} % hypervolume{around}"
