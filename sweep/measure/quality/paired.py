"""Two engines on the same task items: flips, McNemar's exact test, and the interval of the paired difference.

Accuracies of two formats differ by less than the standard error of either on a test of any usual size, so comparing
them as if they were measured on different items orders nothing. On the same items only those count that one engine
gets right and the other wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# The standard normal's 97.5 % quantile: every interval here covers 95 %.
Z = 1.959963984540054
Interval = tuple[float, float]


@dataclass(frozen=True)
class PairedTable:
    """Items by who answered them right. better: only the candidate; worse: only the reference. Both are flips."""

    both: int
    better: int
    worse: int
    neither: int

    @property
    def items(self) -> int:
        return self.both + self.better + self.worse + self.neither

    @property
    def difference(self) -> float:
        """Accuracy of the candidate minus that of the reference."""
        return (self.better - self.worse) / self.items


def paired_table(reference: Mapping[str, bool], candidate: Mapping[str, bool]) -> PairedTable:
    """item -> answered right. Raises ValueError unless both answered the same items, at least one."""
    if not reference or reference.keys() != candidate.keys():
        raise ValueError("reference and candidate answered different items")
    pairs = [(reference[item], candidate[item]) for item in reference]
    cells = (pairs.count(pair) for pair in ((True, True), (False, True), (True, False), (False, False)))
    return PairedTable(*cells)


def mcnemar_p(table: PairedTable) -> float:
    """Two-sided exact McNemar test: P(flips as lopsided as these | either direction equally likely).

    2 x the binomial tail of the smaller kind of flip in n = better + worse throws of a fair coin, at most 1 (McNemar
    1947 with the exact conditional distribution). 1 where nothing flipped.
    """
    flips, fewer = table.better + table.worse, min(table.better, table.worse)
    tail = sum(math.comb(flips, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << flips))


def wilson_interval(right: int, items: int) -> Interval:
    """95 % interval of a share, by the score method (Wilson 1927): sensible at 0 and 1 and for few items."""
    share, z2 = right / items, Z * Z
    centre = share + z2 / (2 * items)
    reach = Z * math.sqrt(share * (1 - share) / items + z2 / (4 * items * items))
    scale = 1 + z2 / items
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def difference_interval(table: PairedTable) -> Interval:
    """95 % interval of the difference of two paired shares (Newcombe 1998, Statistics in Medicine 17:2635, method 10).

    Combines the Wilson intervals (l1, u1) of the candidate and (l2, u2) of the reference with their correlation phi,
    continuity-corrected:  difference - sqrt(a² - 2 phi a b + b²), a = p1 - l1, b = u2 - p2, and mirrored above.
    """
    n = table.items
    right1, right2 = table.both + table.better, table.both + table.worse
    p1, p2 = right1 / n, right2 / n
    (low1, high1), (low2, high2) = wilson_interval(right1, n), wilson_interval(right2, n)
    phi = _correlation(table)

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return p1 - p2 - reach(p1 - low1, high2 - p2), p1 - p2 + reach(p2 - low2, high1 - p1)


def _correlation(table: PairedTable) -> float:
    right1, right2 = table.both + table.better, table.both + table.worse
    margins = right1 * (table.items - right1) * right2 * (table.items - right2)
    if not margins:
        return 0.0
    association: float = table.both * table.neither - table.better * table.worse
    if association > 0:
        association = max(association - table.items / 2, 0.0)
    return association / math.sqrt(margins)
