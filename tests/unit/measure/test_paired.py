"""Paired statistics against published examples and brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.measure.quality.paired import PairedTable, difference_interval, mcnemar_p, paired_table, wilson_interval

COUNTS = st.integers(0, 40)
TABLES = st.builds(PairedTable, COUNTS, COUNTS, COUNTS, COUNTS).filter(lambda t: t.items > 0)


# Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
@pytest.mark.parametrize(
    ("right", "items", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right: int, items: int, low: float, high: float) -> None:
    assert wilson_interval(right, items) == pytest.approx((low, high), abs=5e-5)


# Newcombe 1998, Statistics in Medicine 17:2635, method 10.
@pytest.mark.parametrize(
    ("cells", "low", "high"), [((36, 12, 2, 0), 0.0569, 0.3404), ((20, 12, 2, 16), 0.0562, 0.3292)]
)
def test_difference_as_published(cells: tuple[int, int, int, int], low: float, high: float) -> None:
    assert difference_interval(PairedTable(*cells)) == pytest.approx((low, high), abs=5e-5)


def test_mcnemar_by_counting_every_way_the_flips_can_fall() -> None:
    for flips in range(9):
        outcomes = [sum(way) for way in itertools.product((0, 1), repeat=flips)]
        for better in range(flips + 1):
            as_lopsided = sum(abs(2 * o - flips) >= abs(2 * better - flips) for o in outcomes)
            assert mcnemar_p(PairedTable(5, better, flips - better, 1)) == pytest.approx(as_lopsided / len(outcomes))


@given(TABLES)
def test_the_interval_holds_the_difference_and_mirrors(table: PairedTable) -> None:
    low, high = difference_interval(table)
    assert -1 - 1e-9 <= low <= table.difference <= high <= 1 + 1e-9
    mirrored = difference_interval(PairedTable(table.both, table.worse, table.better, table.neither))
    assert mirrored == pytest.approx((-high, -low))
    assert mcnemar_p(table) == mcnemar_p(PairedTable(table.neither, table.worse, table.better, table.both))


@given(TABLES)
def test_agreement_narrows_the_interval_against_unpaired_items(table: PairedTable) -> None:
    """With any positive association the paired interval is no wider than that of the same shares, unassociated."""
    low, high = difference_interval(table)
    right1, right2, n = table.both + table.better, table.both + table.worse, table.items
    (low1, high1), (low2, high2) = wilson_interval(right1, n), wilson_interval(right2, n)
    p1, p2 = right1 / n, right2 / n
    if table.both * table.neither >= table.better * table.worse:
        unpaired = math.hypot(p1 - low1, high2 - p2) + math.hypot(p2 - low2, high1 - p1)
        assert high - low <= unpaired + 1e-9


def test_pairs_are_matched_by_item() -> None:
    reference = {"a": True, "b": True, "c": False, "d": False}
    candidate = {"d": True, "c": False, "b": False, "a": True}
    assert paired_table(reference, candidate) == PairedTable(both=1, better=1, worse=1, neither=1)
    for other in ({"a": True}, {}):
        with pytest.raises(ValueError, match="different items"):
            paired_table(reference, other)
    with pytest.raises(ValueError, match="different items"):
        paired_table({}, {})
