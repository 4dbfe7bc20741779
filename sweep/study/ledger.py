"""What the records say about every configuration: which loads are settled, what was spent, what may be told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from sweep.results.points import Join, OperatingPoint
from sweep.results.quality import judge
from sweep.results.records import LaunchRecord, PointRecord, QualityRecord, Record
from sweep.study.tell import Outcome


class Ledger:
    """An index over records, kept current by `add`. retries: how often a transient failure of a point is repeated.

    margins: quality metric -> largest accepted loss (results.quality).
    """

    def __init__(
        self,
        records: Iterable[Record],
        objectives: Sequence[str],
        retries: int,
        quality_enabled: bool,
        margins: Mapping[str, float] | None = None,
    ) -> None:
        self._objectives = tuple(objectives)
        self._retries = retries
        self._quality_enabled = quality_enabled
        self._margins = margins or {}
        self.records: list[Record] = []
        self._join = Join()
        self._points: dict[tuple[str, str], list[PointRecord]] = defaultdict(list)
        self._validated: set[tuple[str, str]] = set()
        self._quality: dict[str, QualityRecord] = {}
        self._launches: list[LaunchRecord] = []
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        self.records.append(record)
        self._join.add(record)
        match record:
            case PointRecord() if record.purpose == "validation":
                self._validated.add((record.config_hash, record.load_label))
            case PointRecord():
                self._points[record.config_hash, record.load_label].append(record)
            case QualityRecord():
                if record.state == "measured" or record.fingerprint not in self._quality:
                    self._quality[record.fingerprint] = record
            case LaunchRecord():
                self._launches.append(record)

    @property
    def settled_points(self) -> int:
        """Operating points that need nothing more: measured, quarantined, or failed for good. Cut ones cost none."""
        return sum(self.settled(*key) and records[-1].state != "cut" for key, records in self._points.items())

    @property
    def launches(self) -> Sequence[LaunchRecord]:
        return self._launches

    def settled(self, config_hash: str, load_label: str) -> bool:
        """Whether this operating point will not be measured again."""
        records = self._points.get((config_hash, load_label), [])
        if any(not r.transient or r.state != "failed" for r in records):
            return True
        return len(records) > self._retries

    def validated(self, config_hash: str, load_label: str) -> bool:
        """Whether a validation of this point was recorded, whatever came of it."""
        return (config_hash, load_label) in self._validated

    def newest_repeat(self, config_hash: str, load_label: str) -> int:
        """The highest repeat number on record for this point, whatever came of it; -1 without a record."""
        return max((r.repeat for r in self._points.get((config_hash, load_label), [])), default=-1)

    def quality(self, fingerprint: str) -> QualityRecord | None:
        return self._quality.get(fingerprint)

    def measured(self) -> list[PointRecord]:
        """Every measured record, in order of its point's first appearance."""
        return [r for records in self._points.values() for r in records if r.state == "measured"]

    def measured_fingerprints(self) -> list[str]:
        """Numerics fingerprints of the measured points, in order of first appearance."""
        return list(dict.fromkeys(r.fingerprint for r in self.measured()))

    def newest_points(self) -> list[PointRecord]:
        """The newest record of every operating point, in order of first appearance."""
        return [records[-1] for records in self._points.values()]

    def settled_of(self, config_hash: str) -> list[PointRecord]:
        """A record of each settled point of this configuration: the newest that is no transient failure, if any."""
        mine = [records for key, records in self._points.items() if key[0] == config_hash and self.settled(*key)]
        return [max(reversed(r), key=lambda x: not (x.state == "failed" and x.transient)) for r in mine]

    def operating_points(self) -> list[OperatingPoint]:
        """The points so far, without intervals."""
        return self._join.points()

    def outcome(self, config_hash: str, load_label: str) -> Outcome | None:
        """What may be told of an operating point; None while it is unmeasured or waits for a retry or its quality."""
        if not self.settled(config_hash, load_label):
            return None
        records = self._points[config_hash, load_label]
        fingerprint = records[-1].fingerprint
        quality = self._quality.get(fingerprint)
        point = self._join.point(config_hash, load_label, records[-1].provenance)
        attributes = {
            "point_id": point.point_id,
            "state": point.state,
            "cause": point.cause,
            "purpose": point.purpose,
        }
        if point.state == "failed":
            return Outcome(None, not records[-1].transient, {}, attributes)
        if point.state in ("quarantined", "cut"):
            return Outcome(None, False, {}, attributes)
        if self._margins and self._quality_enabled and quality is None:
            return None
        misses = {j.metric: j.relative_miss for j in judge(quality, self._margins)}
        if None in misses.values():  # it runs, but what must be shown of it never will be
            return Outcome(None, True, point.metrics, attributes)
        values = [point.metrics.get(name) for name in self._objectives]
        if any(v is None for v in values):
            waits = self._quality_enabled and quality is None
            return None if waits else Outcome(None, False, point.metrics, attributes)
        losses = {name: miss for name, miss in misses.items() if miss is not None}
        return Outcome(tuple(v for v in values if v is not None), False, point.metrics, attributes, losses)

    def active_hours(self) -> float:
        """Wall-clock hours during which at least one launch was alive: the union of all launch intervals."""
        spans = sorted((_seconds(r.started_at), _seconds(r.finished_at)) for r in self._launches)
        total, end = 0.0, float("-inf")
        for start, stop in spans:
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total / 3600.0

    def mean_launch_s(self) -> float | None:
        """Mean duration of launches that measured something, seconds; None before the first."""
        good = [r.duration_s for r in self._launches if r.state == "ok"]
        return sum(good) / len(good) if good else None


def _seconds(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()
