"""Hypervolume over time, and how much is probably left.

Time is counted twice: wall-clock since the first launch began, and device-seconds, sum over launches of devices x
seconds so far. A point enters when it was first measured, with everything known of it now.

How much is left is a species question. Every place in the space of the objectives that a config dominates is a
"species", and each config tried shows some of them. Of the volume seen, f1 is what exactly one config dominates and
f2 what exactly two do. With m configs tried (failed ones show nothing, and count),

    left >= (m - 1) / m * f1^2 / (2 f2)          (Chao 1987, for incidence; first-order jackknife where f2 = 0)
    the next config adds f1 / m on average       (Good 1953)

as if further configs came from where the tried ones did, and within the range of the objectives seen. A sampler that
learns does better than that for a while, and what no config comes near stays unseen: it is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sweep.decide.explain.arena import spanned
from sweep.decide.wording import number_text, plural
from sweep.results.front import eligible, hypervolume, minimized, nondominated
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.records import LaunchRecord, PointRecord, Record
from sweep.results.status import duration_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    from sweep.decide.opened import Study

LEAST_CONFIGS = 10
_SAMPLES = 8_192
_COLUMNS = ("device_s", "wall_s", "hypervolume", "share", "gain", "point_id", "launch_id")


@dataclass(frozen=True)
class Left:
    """share: of the hypervolume so far that is probably still to gain, at least. next_config: expected of one more.

    configs: tried, failed ones included.
    """

    share: float
    next_config: float
    configs: int


@dataclass(frozen=True)
class Progress:
    """frame: one row for each point in order of time (columns in progress()). left: None for the reason in cause."""

    frame: pd.DataFrame
    objectives: tuple[str, ...]
    reference_point: dict[str, float]
    left: Left | None
    cause: str | None

    def reached(self, share: float) -> tuple[float, float]:
        """(device-seconds, wall seconds) after which this share of the final hypervolume was there."""
        row = self.frame[self.frame["share"] >= share].iloc[0]
        return float(row["device_s"]), float(row["wall_s"])

    @property
    def text(self) -> str:
        """One line for people."""
        device_s, wall_s = (float(self.frame[name].iloc[-1]) for name in ("device_s", "wall_s"))
        reached, _ = self.reached(0.95)
        last = self.frame[self.frame["gain"] > 0].iloc[-1]
        total = f"{duration_text(wall_s)}, {number_text(device_s / 3600)} device-hours"
        text = f"{total}; 95 % of the hypervolume after {_share_text(reached, device_s)} of the device time"
        text += f", the last gain ({float(last['gain']):.1%}) after {_share_text(float(last['device_s']), device_s)}"
        if self.left is None:
            return f"{text}; what is left: cannot tell: {self.cause}"
        by = f"{plural(self.left.configs, 'config')} tried"
        return f"{text}; left: at least {self.left.share:.1%}, the next config adds {self.left.next_config:.2%} ({by})"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        left = self.left
        return {
            "objectives": list(self.objectives),
            "reference_point": self.reference_point,
            "course": self.frame.to_dict(orient="records"),
            "left": None if left is None else {"share": left.share, "next_config": left.next_config,
                                               "configs": left.configs},
            "cause": self.cause,
        }  # fmt: skip


def progress(study: Study, objectives: Sequence[str] | None = None) -> Progress | None:
    """How the front grew; None while no point has every objective, or no record says when.

    frame: device_s, wall_s (seconds), hypervolume (against the final reference point), share (of the final one),
    gain (share that this point added), point_id, launch_id.
    """
    import pandas as pd

    names = list(objectives or study.objectives)
    measured = {(p.config_hash, p.load_label, p.provenance): p for p in eligible(study.operating_points, names)}
    names = list(spanned(list(measured.values()), names))
    final = hypervolume(list(measured.values()), names)
    times = _first_measured(study.records, measured)
    clock = _Clock(study.records)
    if final is None or not times or clock.start is None:
        return None
    signs = [get_metric(name).sign for name in names]
    limits = [sign * final.reference_point[name] for name, sign in zip(names, signs, strict=True)]
    values = minimized([p for p, _ in times], names)
    course = _growing(values, limits)
    total = course[-1]
    rows = [
        (clock.device_s(at), (at - clock.start).total_seconds(), volume, volume / total, (volume - before) / total,
         p.point_id, p.launch_id)
        for (p, at), volume, before in zip(times, course, [0.0, *course[:-1]], strict=True)
    ]  # fmt: skip
    tried = [p for p in study.operating_points if p.provenance == times[0][0].provenance]
    left, cause = what_is_left([p for p, _ in times], names, len({p.config_hash for p in tried}))
    frame = pd.DataFrame(rows, columns=pd.Index(_COLUMNS))
    return Progress(frame, tuple(names), dict(final.reference_point), left, cause)


def what_is_left(
    points: Sequence[OperatingPoint], objectives: Sequence[str], configs_tried: int, *, seed: int = 0
) -> tuple[Left | None, str | None]:
    """(estimate, None), or (None, why not). points: eligible ones. The formula is in the module's docstring."""
    import numpy as np

    if configs_tried < LEAST_CONFIGS:
        return None, f"{plural(configs_tried, 'config')} tried, {LEAST_CONFIGS} are needed"
    reference = hypervolume(points, objectives)
    assert reference is not None  # a point is there
    signs = [get_metric(name).sign for name in objectives]
    worst = np.array([s * reference.reference_point[name] for name, s in zip(objectives, signs, strict=True)])
    values = minimized(points, objectives)
    best = values.min(axis=0)
    if (np.ptp(values, axis=0) == 0).any():
        return None, "an objective has the same value everywhere"
    samples = np.random.default_rng(seed).uniform(best, worst, (_SAMPLES, len(objectives)))
    seen = np.zeros(_SAMPLES, dtype=np.int64)
    rows: dict[str, list[int]] = {}
    for i, p in enumerate(points):
        rows.setdefault(p.config_hash, []).append(i)
    for own in rows.values():
        seen += _dominated(samples, values[own][nondominated(values[own])])
    once, twice, ever = ((seen == 1).mean(), (seen == 2).mean(), (seen >= 1).mean())
    if ever == 0:
        return None, "no config is better than the reference point"
    m = configs_tried
    unseen = (m - 1) / m * (once**2 / (2 * twice) if twice else once)
    room = 1 - ever  # no more than what is not dominated yet
    return Left(float(min(unseen, room) / ever), float(once / m / ever), m), None


def _dominated(samples: npt.NDArray[np.float64], front: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which samples (n, objectives) some point of the front (k, objectives) dominates, (n,)."""
    import numpy as np

    found = np.zeros(len(samples), dtype=bool)
    for point in front:
        found |= (samples >= point).all(axis=1)
    return found


def _growing(values: npt.NDArray[np.float64], limits: Sequence[float]) -> list[float]:
    """The hypervolume after each row (n, objectives), minimized."""
    import moocore
    import numpy as np

    best = np.empty((0, values.shape[1]))
    course, volume = [], 0.0
    for row in values:
        if not (best <= row).all(axis=1).any():
            best = np.vstack([best[~(best >= row).all(axis=1)], row])
            volume = float(moocore.hypervolume(best, ref=limits))
        course.append(volume)
    return course


def _first_measured(
    records: Sequence[Record], points: dict[tuple[str, str, str], OperatingPoint]
) -> list[tuple[OperatingPoint, datetime]]:
    """The points with the time of their first measurement, in order of it."""
    first: dict[tuple[str, str, str], datetime] = {}
    for r in records:
        if isinstance(r, PointRecord) and r.state == "measured" and r.purpose != "validation" and r.finished_at:
            key, at = (r.config_hash, r.load_label, r.provenance), datetime.fromisoformat(r.finished_at)
            first[key] = min(at, first.get(key, at))
    return sorted(((p, first[key]) for key, p in points.items() if key in first), key=lambda item: item[1])


class _Clock:
    """Device-seconds that all launches had spent by a time."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._spans = [
            (datetime.fromisoformat(r.started_at), datetime.fromisoformat(r.finished_at), r.devices)
            for r in records
            if isinstance(r, LaunchRecord) and r.started_at and r.finished_at
        ]
        self.start = min((start for start, _, _ in self._spans), default=None)

    def device_s(self, at: datetime) -> float:
        """Sum over launches of devices x seconds until `at`."""
        return sum(
            devices * (min(at, end) - start).total_seconds() for start, end, devices in self._spans if start < at
        )


def _share_text(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
