"""Tables as lines of text, and frames as JSON rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row: columns aligned to the right, the last one to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  ".join(["", *(c.rjust(w) for c, w in zip(r, widths, strict=False)), r[-1]]).rstrip() for r in rows]


def capped(lines: list[str], shown: int, noun: str) -> list[str]:
    """The first lines, and how many more there are (noun in the plural)."""
    return lines[:shown] + ([f"  and {len(lines) - shown} more {noun} (--json has all)"] if len(lines) > shown else [])


def json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows with None for what is not known: JSON has no NaN."""
    return [
        {str(name): None if value != value else value for name, value in row.items()}
        for row in frame.to_dict(orient="records")
    ]
