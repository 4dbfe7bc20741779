"""Techniques that help or hinder each other: what two knobs do together beyond what each does alone.

Measured only where a full square exists at one load: neither, one, the other and both, everything else equal. On the
log scale, for a metric y,

    interaction = log y(both) - log y(one) - log y(other) + log y(neither)

so a factor of 1 means that the two effects multiply. Squares of the same four configs at several loads count as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from sweep.decide.explain.change import Step, fewest, is_relative, mean_step, percent_text
from sweep.decide.explain.knobs import DEFAULT, Knobs, Value, level_words
from sweep.decide.wording import plural
from sweep.results.front import eligible
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import COVERAGE, Spreads

WORTH = 0.05
Square = tuple[OperatingPoint, OperatingPoint, OperatingPoint, OperatingPoint]


@dataclass(frozen=True)
class Interaction:
    """factor: what `metric` is multiplied with when both settings are there, beyond both effects.

    settings: of these knobs, in words. interval: at 95 % for all interactions of the study together (Bonferroni).
    squares: of configs.
    """

    knobs: tuple[str, str]
    settings: tuple[str, str]
    metric: str
    factor: float
    interval: tuple[float, float] | None
    squares: int

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "text": self.text}

    @property
    def text(self) -> str:
        """For people: which way, by how much, from how many squares."""
        worse = get_metric(self.metric).sign * (self.factor - 1) > 0
        around = "" if self.interval is None else " ({} to {})".format(*(percent_text(v - 1) for v in self.interval))
        return (
            f"{self.settings[0]} and {self.settings[1]} {'hinder' if worse else 'help'} each other: {self.metric} "
            f"{percent_text(self.factor - 1)} %{around} beyond both effects ({plural(self.squares, 'square')})"
        )


def interactions(
    points: Sequence[OperatingPoint], objectives: Sequence[str], *, only: Sequence[str] | None = None
) -> tuple[list[Interaction], int]:
    """Interactions that are beyond noise and 5 %, largest first; and how many pairs of settings have no square at all.

    Of objectives that change by a factor; quality is measured once for each format and has its own table. only: knobs
    of which one has to take part.
    """
    names = [name for name in objectives if is_relative(name)]
    candidates = eligible(points, names) if names else []
    knobs = Knobs(candidates)
    logs = {name: _logarithms(candidates, name, Spreads(points)) for name in names}
    found: list[tuple[tuple[str, str], tuple[str, str], str, Step, int]] = []
    without = 0
    for pair in combinations(knobs.varying, 2):
        if only is not None and not set(pair) & set(only):
            continue
        squares = _squares(knobs, *pair)
        without += (len(knobs.levels(pair[0])) - 1) * (len(knobs.levels(pair[1])) - 1) - len(squares)
        for settings, group in squares.items():
            groups = _by_configs(group)
            for name in names:
                if all(p.point_id in logs[name] for square in group for p in square):
                    step = mean_step([[_contrast(square, logs[name]) for square in same] for same in groups])
                    found.append((pair, settings, name, step, len(groups)))
    confidence = 1 - (1 - COVERAGE) / max(1, len(found))
    every = [
        Interaction(pair, settings, name, *step.estimate(confidence, logarithm=True), squares)
        for pair, settings, name, step, squares in found
    ]
    told = [i for i in every if i.beyond_noise and abs(math.log(i.factor)) >= math.log(1 + WORTH)]
    return sorted(told, key=lambda i: -abs(math.log(i.factor))), without


def _squares(knobs: Knobs, first: str, second: str) -> dict[tuple[str, str], list[Square]]:
    """Settings of both knobs -> the squares (neither, first, second, both) there are."""
    bases = knobs.baseline[first], knobs.baseline[second]
    where: dict[tuple[Any, ...], dict[tuple[Value, Value], OperatingPoint]] = {}
    for p, values in zip(knobs.points, knobs.values, strict=True):
        rest = frozenset((k, v) for k, v in values.items() if k not in (first, second))
        corner = values.get(first, DEFAULT), values.get(second, DEFAULT)
        where.setdefault((p.load_label, rest), {})[corner] = p
    found: dict[tuple[str, str], list[Square]] = {}
    for corners in where.values():
        for one, other in _both(corners, bases):
            square = [corners.get(c) for c in (bases, (one, bases[1]), (bases[0], other), (one, other))]
            if None not in square:
                words = level_words(first, one, bases[0]), level_words(second, other, bases[1])
                found.setdefault(words, []).append(tuple(square))  # type: ignore[arg-type]
    return found


def _both(corners: dict[tuple[Value, Value], OperatingPoint], bases: tuple[Value, Value]) -> Iterator[Any]:
    return ((one, other) for one, other in corners if one != bases[0] and other != bases[1])


def _by_configs(squares: Sequence[Square]) -> list[list[Square]]:
    """The squares of the same four configs, at their loads."""
    groups: dict[tuple[str, ...], list[Square]] = {}
    for square in squares:
        groups.setdefault(tuple(p.config_hash for p in square), []).append(square)
    return list(groups.values())


def _logarithms(points: Sequence[OperatingPoint], metric: str, spreads: Spreads) -> dict[str, Step]:
    """point_id -> log of the metric with its standard error, of the points where it is positive."""
    found = {}
    for p in points:
        value, spread = p.metrics[metric], spreads.of(p, metric)
        if value > 0:
            error, degrees = (None, None) if spread is None else (spread.standard_error / value, spread.degrees)
            found[p.point_id] = Step(math.log(value), error, degrees)
    return found


def _contrast(square: Square, logs: Mapping[str, Step]) -> Step:
    neither, one, other, both = corners = [logs[p.point_id] for p in square]
    errors = [c.error for c in corners if c.error is not None]
    error = math.hypot(*errors) if len(errors) == len(corners) else None
    return Step(both.value - one.value - other.value + neither.value, error, fewest(c.degrees for c in corners))
