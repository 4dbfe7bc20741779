"""All that `explain` found, as text for a terminal and as plain JSON values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sweep.decide.explain.cliffs import Cliff
from sweep.decide.explain.importance import SIGNIFICANT
from sweep.decide.explain.interactions import Interaction
from sweep.decide.explain.membership import OPEN, SURE
from sweep.decide.explain.overrides import OverrideReport
from sweep.decide.explain.progress import Progress
from sweep.decide.explain.techniques import TechniqueEffect
from sweep.decide.explain.verdict import Verdict
from sweep.decide.layout import aligned, capped, json_rows
from sweep.decide.wording import number_text, plural

if TYPE_CHECKING:
    import pandas as pd

_SHOWN, _WIDTH = 8, 118


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a study has learnt. notes: what to keep in mind with all of it. load, technique: what it was asked for.

    Frames and dataclasses are described in the modules of decide.explain that make them. without_square: pairs of
    settings of which no interaction can be told. progress: None for one load, or where no record says when.
    """

    study: str
    objectives: tuple[str, ...]
    load: str | None
    technique: str | None
    n_points: int
    n_configs: int
    notes: tuple[str, ...]
    membership: pd.DataFrame
    progress: Progress | None
    techniques: Sequence[TechniqueEffect]
    interactions: Sequence[Interaction]
    without_square: int
    cliffs: Sequence[Cliff]
    importance: pd.DataFrame
    overrides: OverrideReport
    defaults: Verdict
    random: Verdict

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "study": self.study,
            "objectives": list(self.objectives),
            "load": self.load,
            "technique": self.technique,
            "notes": list(self.notes),
            "defaults": self.defaults.to_dict(),
            "random": self.random.to_dict(),
            "membership": json_rows(self.membership),
            "progress": self.progress.to_dict() if self.progress else None,
            "techniques": [t.to_dict() for t in self.techniques],
            "interactions": [i.to_dict() for i in self.interactions],
            "without_square": self.without_square,
            "cliffs": [c.to_dict() for c in self.cliffs],
            "importance": json_rows(self.importance),
            "importance_unknown": self.importance.attrs["cause"],
            "overrides": self.overrides.to_dict(),
        }

    def text(self) -> str:
        """For a terminal, without colour; the verdicts first."""
        at = f" at {self.load}" if self.load else ""
        title = (
            f"{self.study}: {plural(self.n_points, 'point')} of {plural(self.n_configs, 'config')}{at}, "
            f"in {', '.join(self.objectives)}"
        )
        lines = [title, *_wrapped(self.notes)]
        if self.technique is None:
            lines += ["", *_labelled("defaults", self.defaults.text), *_labelled("random", self.random.text)]
            if self.progress is not None:
                lines += _labelled("progress", self.progress.text)
            lines += ["", *self._front_lines()]
        lines += ["", *self._technique_lines(), *self._interaction_lines()]
        lines += ["", *self._cliff_lines()]
        if self.technique is None:
            lines += ["", *self._importance_lines(), "", "Overrides " + self.overrides.text_lines()[0]]
            lines += _wrapped(line.strip() for line in self.overrides.text_lines()[1:])
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()

    def _front_lines(self) -> list[str]:
        probability = self.membership["probability"]
        sure, open_ = int((probability >= SURE).sum()), int(((probability < SURE) & (probability >= OPEN)).sum())
        lines = [f"Front: {plural(sure, 'point')} sure (at least {SURE:.0%}), {open_} open"]
        rows = [["P(front)", "load", *self.objectives, "engine"]]
        for row in json_rows(self.membership[probability >= OPEN]):
            numbers = [number_text(row[name]) for name in self.objectives]
            rows.append([f"{row['probability']:.2f}", row["load_label"], *numbers, row["engine"]])
        return [*lines, *capped(aligned(rows), 1 + _SHOWN, "points")]

    def _technique_lines(self) -> list[str]:
        if not self.techniques:
            return ["Techniques: every config has the same settings"]
        names = " and ".join(self.techniques[0].objectives)
        lines = [f"Along or outward (fronts of {names})"]
        for effect in self.techniques:
            lines += _labelled("  " + effect.verdict, f"{effect.level}: {_sentence(effect)}", 15)
        return lines

    def _interaction_lines(self) -> list[str]:
        lines = []
        for text in capped([i.text for i in self.interactions], _SHOWN, "interactions"):
            lines += _labelled("  together", text.strip(), 15)
        if self.without_square:
            unknown = f"{plural(self.without_square, 'pair')} of settings never measured as a full square"
            lines += _labelled("  cannot tell", f"interactions: {unknown}", 15)
        return lines

    def _cliff_lines(self) -> list[str]:
        if not self.cliffs:
            return ["Cliffs: none beyond noise between configs one knob apart"]
        alike: dict[tuple[str | None, ...], list[Cliff]] = {}
        for c in self.cliffs:
            alike.setdefault((c.before, c.after, c.metric, c.cause), []).append(c)
        told = [f"{g[0].text}{f' ({len(g) - 1} more like it)' if len(g) > 1 else ''}" for g in alike.values()]
        return ["Cliffs (configs one knob apart)", *_wrapped(line.strip() for line in capped(told, _SHOWN, "kinds"))]

    def _importance_lines(self) -> list[str]:
        lines = ["Knobs (share of variance; knobs at equal load)"]
        for name in self.objectives:
            rows = self.importance[self.importance["objective"] == name]
            told = [
                f"{row['knob']} {row['share']:.0%}"
                for row in rows.to_dict(orient="records")
                if (row["knob"] == "load" and row["share"] >= 0.01) or (row["p_value"] or 1) <= SIGNIFICANT
            ]
            cause = self.importance.attrs["cause"].get(name)
            text = f"cannot tell: {cause}" if cause else ", ".join(told) or "no knob beyond chance"
            lines += _labelled(f"  {name}", text, 2 + max(len(n) for n in self.objectives) + 2)
        return lines


def _sentence(effect: TechniqueEffect) -> str:
    """The effect's text without its verdict, which is said before it."""
    return effect.text.removeprefix("only ").removeprefix(effect.verdict).lstrip(":, ")


def _labelled(label: str, text: str, width: int = 10) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=label.ljust(width), subsequent_indent=" " * width)


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [
        part for line in lines for part in textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    ]
