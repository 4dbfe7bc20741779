"""Cliffs: configs one knob apart whose metrics jump, or of which one does not run at all.

Neighbours differ in one knob, at one load; of a knob with ordered values, the next one in the study. A jump is a change
of at least FACTOR, for better or worse, that noise does not explain: at 95 % for all neighbours of the study together
(Bonferroni). Interpolating across it would be wrong. A config that works beside one that fails for good is a cliff too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from sweep.decide.explain.change import change, is_relative
from sweep.decide.explain.knobs import Knobs, Value, differing, short_name, value_words
from sweep.decide.wording import number_text
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import COVERAGE, Spreads

FACTOR = 1.3


@dataclass(frozen=True)
class Cliff:
    """From `before` to `after` of one knob. factor: of the metric, above 1 is worse; None for a failure (with cause).

    point_id, other_id: the points at `before` and `after`: mark both on a figure. A launch that fails fails at every
    load, and often in every surrounding: one cliff for all of them, with the ids of the first.
    """

    kind: Literal["jump", "failure"]
    knob: str
    before: str
    after: str
    load_label: str
    point_id: str
    other_id: str
    metric: str | None = None
    factor: float | None = None
    interval: tuple[float, float] | None = None
    cause: str | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        step = f"{self.before} -> {self.after} at {self.load_label}"
        if self.factor is None or self.metric is None:
            return f"{step}: {self.cause}"
        size = self.factor if self.factor > 1 else 1 / self.factor
        return f"{step}: {self.metric} {number_text(size)}x {'worse' if self.factor > 1 else 'better'}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def cliffs(points: Sequence[OperatingPoint], metrics: Sequence[str]) -> list[Cliff]:
    """All cliffs of these metrics, failures first, then the largest jump first. Quality and fractions do not jump."""
    spreads = Spreads(points)
    names = [name for name in metrics if is_relative(name)]
    knobs = Knobs(points)
    found: list[Cliff] = []
    neighbours = [
        (knob, _words(low, high), before, after)
        for knob in knobs.varying
        for line in knobs.lines(knob)
        for (low, before), (high, after) in _neighbours(line, knobs.baseline[knob])
    ]
    confidence = 1 - (1 - COVERAGE) / max(1, len(neighbours) * len(names))
    for knob, words, before, after in neighbours:
        if before.state == after.state == "measured":
            found += _jumps(knob, words, before, after, names, spreads, confidence)
        else:
            found += _failure(knob, words, before, after)
    found = [*_merged(c for c in found if c.kind == "failure"), *(c for c in found if c.kind == "jump")]
    return sorted(found, key=lambda c: (c.kind != "failure", -abs(math.log(c.factor or 1.0)), c.point_id, c.other_id))


def _merged(failures: Iterable[Cliff]) -> list[Cliff]:
    groups: dict[tuple[str, ...], list[Cliff]] = {}
    for c in failures:
        groups.setdefault((c.knob, c.before, c.after, c.cause or ""), []).append(c)
    return [replace(g[0], load_label=", ".join(dict.fromkeys(c.load_label for c in g))) for g in groups.values()]


def _neighbours(line: list[tuple[Value, OperatingPoint]], base: Value) -> Iterator[Any]:
    """Adjacent values of a number; of words, each with the baseline's (else with every other)."""
    numeric = [item for item in line if _is_number(item[0])]
    if len({item[0][0][0] for item in numeric}) > 1:  # numbers of several arguments have no order
        numeric = []
    yield from pairwise(numeric)
    words = [item for item in line if item not in numeric]
    first = [item for item in line if item[0] == base]
    for index, item in enumerate(words):
        others = first or [*words[index + 1 :], *_ends(numeric)]
        yield from ((other, item) for other in others if other[0] != item[0])
    if first and first[0] not in numeric:
        yield from ((first[0], end) for end in _ends(numeric))


def _ends(numeric: list[Any]) -> list[Any]:
    return numeric if len(numeric) < 2 else [numeric[0], numeric[-1]]


def _is_number(value: Value) -> bool:
    return len(value) == 1 and isinstance(value[0][1], int | float) and not isinstance(value[0][1], bool)


def _words(low: Value, high: Value) -> tuple[str, str]:
    """ "max_num_seqs=8", "64": the name once where both sides have one and the same argument, or one has none."""
    first, second = differing(low, high), differing(high, low)
    names = {short_name(name) for name, _ in (*first, *second)}
    if len(first) <= 1 and len(second) <= 1 and len(names) == 1:
        name = names.pop()
        left, right = (value_words(v).removeprefix(f"{name}=") if v else "vLLM's default" for v in (first, second))
        return f"{name}: {left}", right
    return value_words(first), value_words(second)


def _jumps(
    knob: str,
    words: tuple[str, str],
    before: OperatingPoint,
    after: OperatingPoint,
    metrics: Sequence[str],
    spreads: Spreads,
    confidence: float,
) -> Iterator[Cliff]:
    for name in metrics:
        found = change([(before, after)], name, spreads, confidence=confidence)
        if found is None or not found.relative or found.interval is None or not found.beyond_noise:
            continue
        if abs(math.log(found.value)) < math.log(FACTOR):
            continue
        flip = get_metric(name).sign < 0
        factor = 1 / found.value if flip else found.value
        low, high = found.interval
        interval = (1 / high, 1 / low) if flip else (low, high)
        yield Cliff("jump", knob, *words, before.load_label, before.point_id, after.point_id, name, factor, interval)


def _failure(knob: str, words: tuple[str, str], before: OperatingPoint, after: OperatingPoint) -> Iterator[Cliff]:
    if {before.state, after.state} != {"measured", "failed"} or "interrupted" in (before.cause, after.cause):
        return
    if after.state == "measured":
        before, after, words = after, before, _swapped(words)
    cause = after.cause or "unknown"
    yield Cliff("failure", knob, *words, before.load_label, before.point_id, after.point_id, cause=cause)


def _swapped(words: tuple[str, str]) -> tuple[str, str]:
    name, colon, left = words[0].partition(": ")
    return (f"{name}: {words[1]}", left) if colon else (words[1], words[0])
