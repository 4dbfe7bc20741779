"""The runner-up: how far behind it is, how sure that is, and what would make it win."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweep.decide.certainty import Judge
from sweep.decide.sla import Bound
from sweep.decide.wording import value_text
from sweep.results.metrics import Metric
from sweep.results.points import OperatingPoint

# A pick whose runner-up has a better chance than this to be truly better is no clear winner.
CLEAR = 0.1


@dataclass(frozen=True)
class Rival:
    """point: the best feasible point of another engine config. needed: the target value with which it would have won.

    change: needed against measured, as a fraction. probability: that its target is truly better than the pick's; None
    where no spread is known. tighter: bounds that, tightened alone to this, would leave it the better choice.
    """

    point: OperatingPoint
    needed: float
    change: float
    probability: float | None
    tighter: tuple[Bound, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the point as plain JSON values."""
        return {
            "target_needed": self.needed,
            "change_needed": self.change,
            "probability_better": self.probability,
            "tighter_bounds": [str(b) for b in self.tighter],
        }

    def text_lines(self, target: Metric) -> list[str]:
        """What it would take, for a terminal."""
        value = self.point.metrics[target.name]
        below = "below" if target.direction == "minimize" else "above"
        lines = [
            f"would win with {target.name} {below} {value_text(target.name, self.needed)}: it has "
            f"{value_text(target.name, value)}, {abs(self.change):.1%} too {'high' if below == 'below' else 'low'}"
        ]
        if not self.change:
            lines = [f"as good as the pick in {target.name}; it lost by more overrides"]
        if self.probability is not None:
            sure = f"{self.probability:.2f}" if self.probability >= 0.01 else "below 0.01"
            lines.append(f"its {target.name} is truly better than the pick's with probability {sure}")
        lines += [f"would win if {b} were asked" for b in self.tighter]
        return lines


def rival(
    feasible: Sequence[OperatingPoint],
    chosen: OperatingPoint,
    target: Metric,
    bounds: Sequence[Bound],
    judge: Judge,
    tie_fraction: float,
) -> Rival | None:
    """The runner-up among the feasible points, best first; None if all are the chosen engine config."""
    point = next((p for p in feasible if p.config_hash != chosen.config_hash), None)
    if point is None:
        return None
    ours, theirs = chosen.metrics[target.name], point.metrics[target.name]
    margin = target.sign * tie_fraction * abs(ours)
    # Fewer overrides win a tie, as many lose by nothing, more must be better by more than a tie.
    if point.overrides < chosen.overrides:
        needed = ours + margin
    else:
        needed = ours - margin if point.overrides > chosen.overrides else ours
    behind = max(0.0, target.sign * (theirs - needed))
    return Rival(
        point=point,
        needed=needed,
        change=-target.sign * behind / abs(theirs) if theirs else 0.0,
        probability=judge.better(point, chosen, target.name),
        tighter=tuple(b for bound in bounds if (b := _tightened(bound, feasible, point, chosen, judge)) is not None),
    )


def _tightened(
    bound: Bound, feasible: Sequence[OperatingPoint], point: OperatingPoint, chosen: OperatingPoint, judge: Judge
) -> Bound | None:
    """The bound as tight as the rival keeps it, where every point before it in the order then falls out."""
    limit = judge.needed(point, bound)
    if limit is None:
        return None
    tight = Bound(bound.metric, "<=" if bound.op[0] == "<" else ">=", limit)
    before = feasible[: feasible.index(point)]
    beaten = [*before, *(p for p in feasible if p.config_hash == chosen.config_hash)]
    return tight if not any(judge.meets(p, tight) for p in beaten) else None


def clear_winner(rival: Rival | None) -> bool | None:
    """Whether the pick is clearly better than its runner-up; None where no spread tells."""
    if rival is None:
        return True
    return None if rival.probability is None else rival.probability <= CLEAR
