"""What comparing two studies answers, as text for a terminal and as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sweep.decide.explain.change import Change, is_relative, percent_text
from sweep.decide.layout import aligned, capped, json_rows
from sweep.decide.wording import number_text, plural
from sweep.results.points import OperatingPoint

if TYPE_CHECKING:
    import pandas as pd

FALSE_DISCOVERY_RATE = 0.05
_SHOWN, _FRONT_SHOWN, _DIFFERENCES_SHOWN = 8, 24, 12


@dataclass(frozen=True)
class Difference:
    """What the two studies differ in; a or b is None where a study does not say."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Hypervolumes:
    """a, b: of both fronts against reference_point. ratio: b / a with its 95 % interval over the draws.

    beaten_a: points of a's front that a point of b beats (explain.arena.beats) in 95 % of the draws; beaten_b likewise.
    """

    a: float
    b: float
    ratio: float | None
    interval: tuple[float, float] | None
    reference_point: Mapping[str, float]
    beaten_a: tuple[str, ...]
    beaten_b: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Comparison:
    """matched: one row for each matched point and metric: change is b / a, or b - a for quality and fractions, with its
    95 % interval; moved: significant; better: whether the change is one for the better. Quality has one row for each
    pair of numerics fingerprints. shifts: the mean change of each metric. fronts: the front points of both studies.
    states: matched points that work in one study only, with the cause.
    """

    names: tuple[str, str]
    objectives: tuple[str, ...]
    differences: tuple[Difference, ...]
    same_requests: bool | None
    matched: pd.DataFrame
    n_matched: int
    shifts: Mapping[str, Change]
    only: tuple[tuple[OperatingPoint, ...], tuple[OperatingPoint, ...]]
    states: tuple[tuple[OperatingPoint, OperatingPoint], ...]
    fronts: pd.DataFrame
    hypervolumes: Hypervolumes | None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        volumes = self.hypervolumes
        return {
            "studies": list(self.names),
            "objectives": list(self.objectives),
            "differences": [{"what": d.what, "a": d.a, "b": d.b} for d in self.differences],
            "same_requests": self.same_requests,
            "n_matched": self.n_matched,
            "matched": json_rows(self.matched),
            "shifts": {name: c.to_dict() for name, c in self.shifts.items()},
            "only_a": [p.point_id for p in self.only[0]],
            "only_b": [p.point_id for p in self.only[1]],
            "states": [
                {"point_a": a.point_id, "state_a": a.state, "cause_a": a.cause,
                 "point_b": b.point_id, "state_b": b.state, "cause_b": b.cause}
                for a, b in self.states
            ],
            "fronts": json_rows(self.fronts),
            "hypervolumes": None if volumes is None else {
                "a": volumes.a, "b": volumes.b, "ratio": volumes.ratio, "interval": volumes.interval,
                "reference_point": dict(volumes.reference_point),
                "beaten_a": list(volumes.beaten_a), "beaten_b": list(volumes.beaten_b),
            },
        }  # fmt: skip

    def text(self) -> str:
        """For a terminal, without colour."""
        lines = [f"A  {self.names[0]}", f"B  {self.names[1]}", "", *self._difference_lines(), ""]
        lines += [self._verdict(), "", *self._matched_lines(), "", *self._front_lines()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()

    def _difference_lines(self) -> list[str]:
        said = {
            True: "the same requests",
            False: "DIFFERENT requests: matched points answered other questions",
            None: "not recorded whether the requests were the same",
        }[self.same_requests]
        width = max((len(d.what) for d in self.differences), default=0)
        lines = [f"  {d.what.ljust(width)}  {_shown(d.a)} -> {_shown(d.b)}" for d in self.differences]
        told = capped(lines, _DIFFERENCES_SHOWN, "settings") or ["  nothing that the studies record"]
        return [f"What differs ({said})", *told]

    def _verdict(self) -> str:
        volumes = self.hypervolumes
        if volumes is None:
            return f"Fronts: cannot tell: a study has no measured point with {', '.join(self.objectives)}"
        if volumes.ratio is None:
            size = "cannot tell by how much: A's front dominates nothing up to the reference point"
        else:
            around = "" if volumes.interval is None else " ({} to {})".format(
                *(percent_text(v - 1) for v in volumes.interval)
            )  # fmt: skip
            size = f"hypervolume {percent_text(volumes.ratio - 1)} %{around}"
        counts = [int((self.fronts["study"] == side).sum()) for side in ("A", "B")]
        return (
            f"Fronts, B against A: {size}; of A's {plural(counts[0], 'point')} B beats {len(volumes.beaten_a)}, "
            f"of B's {counts[1]} A beats {len(volumes.beaten_b)}"
        )

    def _matched_lines(self) -> list[str]:
        alone = f"{len(self.only[0])} only in A, {len(self.only[1])} only in B"
        lines = [f"{plural(self.n_matched, 'matched point')} (same settings and load), {alone}"]
        for name, shift in self.shifts.items():
            rows = self.matched[self.matched["metric"] == name]
            moved = rows[rows["moved"]]
            better = int(moved["better"].sum())
            counts = f"{better} better, {len(moved) - better} worse, {len(rows) - len(moved)} within noise"
            lines.append(f"  {shift.text} on average; {counts}")
        moved = self.matched[self.matched["moved"]]
        if len(moved):
            lines.append(f"What moved ({FALSE_DISCOVERY_RATE:.0%} false discovery rate), largest first")
            lines += capped([_moved_text(row) for row in json_rows(moved)], _SHOWN, "changes")
        return lines + self._state_lines()

    def _state_lines(self) -> list[str]:
        groups: dict[tuple[str, str], list[str]] = {}
        for a, b in self.states:
            worked = a.state == "measured"
            what = f"no longer works ({b.cause or 'unknown'})" if worked else f"works now (was {a.cause or 'unknown'})"
            groups.setdefault((a.config_hash, what), []).append(a.load_label)
        lines = [f"  config {config} {what} at {', '.join(loads)}" for (config, what), loads in groups.items()]
        return capped(lines, _SHOWN, "configs")

    def _front_lines(self) -> list[str]:
        lines = ["Both fronts (* beats or ties with everything in the other)"]
        rows = [["", "load", *self.objectives, "engine"]]
        for row in self.fronts.to_dict(orient="records"):
            numbers = [number_text(row[name]) for name in self.objectives]
            rows.append([f"{row['study']}{'*' if row['on_both'] else ' '}", row["load_label"], *numbers, row["engine"]])
        return [*lines, *capped(aligned(rows), 1 + _FRONT_SHOWN, "points")]


def _moved_text(row: Mapping[str, Any]) -> str:
    better = "better" if row["better"] else "worse"
    if is_relative(row["metric"]):
        size = (
            f"{percent_text(row['change'] - 1)} % ({percent_text(row['low'] - 1)} to {percent_text(row['high'] - 1)})"
        )
    else:
        size = f"{row['change']:+.4g} ({row['low']:+.4g} to {row['high']:+.4g})"
    values = f"{number_text(row['a'])} -> {number_text(row['b'])}"
    return f"  {row['load_label']}  {row['metric']} {values}, {size} {better}: {row['engine']}"


def _shown(value: Any) -> str:
    return "not recorded" if value is None else str(value)
