"""Finalists measured again, launched fresh, on requests no search has seen: what is left of a point that looked best.

The best of many noisy points is better than it is (the winner's curse: Capen, Clapp & Campbell 1971; Thaler 1988).
Validation records never enter the front; they say how far to trust it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint, operating_points
from sweep.results.records import PointRecord, Record


@dataclass(frozen=True)
class Validation:
    """One validated point. first, held_out: the objectives as the search saw them and on the held-out requests.

    state, cause: of the validation itself; held_out is empty unless it was measured.
    """

    point: OperatingPoint
    state: str
    cause: str | None
    first: Mapping[str, float]
    held_out: Mapping[str, float]

    def worse_by(self, metric: str) -> float | None:
        """How much worse the held-out value is, as a fraction of the first; negative when it is better."""
        first, second = self.first.get(metric), self.held_out.get(metric)
        if first is None or second is None or first == 0:
            return None
        return get_metric(metric).sign * (second - first) / abs(first)


def is_validation(record: Record) -> bool:
    return isinstance(record, PointRecord) and record.purpose == "validation"


def validations(records: Iterable[Record], objectives: Sequence[str]) -> list[Validation]:
    """The newest validation of every validated point, in order of the points."""
    everything = list(records)
    newest = {(r.config_hash, r.load_label): r for r in everything if isinstance(r, PointRecord) and is_validation(r)}
    found = []
    for point in operating_points(everything):
        record = newest.get((point.config_hash, point.load_label))
        if record is None:
            continue
        # Quality belongs to the numerics, not to the requests: it is not measured again.
        names = [name for name in objectives if not name.startswith("quality_")]
        held_out = {n: v for n in names if (v := record.metrics.get(n)) is not None and record.state == "measured"}
        first = {n: point.metrics[n] for n in names if n in point.metrics}
        found.append(Validation(point, record.state, record.cause, first, held_out))
    return found
