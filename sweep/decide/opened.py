"""A study folder opened for reading, running or finished: tables, front, figure and pick."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.decide.answer import Infeasible, PickResult
from sweep.decide.capacity import Traffic, price_of
from sweep.decide.certainty import Demand
from sweep.decide.pick import pick
from sweep.decide.quality import quality_table
from sweep.decide.repricing import repriced
from sweep.decide.sla import Sla, parse_sla
from sweep.decide.verdict import Verdict, judge
from sweep.decide.wording import plural
from sweep.errors import SlaError, StudyError, did_you_mean
from sweep.results.front import Hypervolume, eligible, hypervolume
from sweep.results.metrics import METRICS, get_metric
from sweep.results.points import (
    OperatingPoint,
    cell,
    failures,
    nullable,
    operating_points,
    points_frame,
    settings,
)
from sweep.results.quality import not_shown
from sweep.results.records import LaunchRecord, Record, RecordStore
from sweep.results.verifications import Verification, read_verifications

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from sweep.decide.comparison import Comparison
    from sweep.decide.explain import Explanation

STUDY_FILE = "study.json"
_LAUNCH = (
    "launch_id", "config_hash", "fingerprint", "purpose", "devices", "device_ids", "state", "cause", "detail",
    "transient", "attempt", "startup_s", "duration_s", "started_at", "finished_at", "vllm_version",
    "resolved_differently", "log",
)  # fmt: skip
_FAILURES = ("cause", "subject", "points", "recovered", "launches", "transient", "detail", "engine", "log")


@dataclass(frozen=True, repr=False)
class Study:
    """One moment of a study: what its files held when it was opened. `refresh()` reads them again."""

    path: Path
    meta: Mapping[str, Any]
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        """The study's name."""
        return str(self.meta.get("study", self.path.name))

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration the study runs with."""
        return dict(self.meta.get("config", {}))

    @property
    def objectives(self) -> tuple[str, ...]:
        """The metrics the study optimizes."""
        return tuple(self.meta.get("objectives", ()))

    @cached_property
    def operating_points(self) -> list[OperatingPoint]:
        """The points as plain objects (no pandas)."""
        return operating_points(self.records)

    def point(self, point_id: str) -> OperatingPoint:
        """The point of this id. Raises StudyError naming the nearest ones."""
        found = {p.point_id: p for p in self.operating_points}
        if point_id not in found:
            near = did_you_mean(point_id, found)
            hint = near if near.startswith("did you mean") else "`sweep front --json` and `sweep export` list them"
            raise StudyError(f"study '{self.name}' has no point '{point_id}'", hint)
        return found[point_id]

    @cached_property
    def points(self) -> pd.DataFrame:
        """One row for each operating point; the columns are described in results.points.points_frame."""
        return points_frame(self.records, self.objectives)

    def front(self, objectives: Sequence[str] | None = None) -> pd.DataFrame:
        """The rows of `points` on the front of these metrics (default: the study's), sorted by them."""
        chosen = list(objectives or self.objectives)
        frame = points_frame(self.records, chosen)
        rows = frame[frame["on_front"]]
        if chosen:
            rows = rows.sort_values(chosen, ascending=[get_metric(o).direction == "minimize" for o in chosen])
        return rows.reset_index(drop=True)

    def plot_front(self, objectives: Sequence[str] | None = None, color: str | None = None) -> go.Figure:
        """Interactive figure of two metrics; a third one given, or `color`, is shown as colour.

        color: a metric, an engine argument such as "max_num_seqs", or "load".
        """
        from sweep.decide.explain.membership import front_band
        from sweep.decide.plots import front_figure

        chosen = list(objectives or self.objectives)
        chosen += [name for name in ("cost_usd_per_mtok", "output_throughput_tok_s") if name not in chosen]
        wanted = len(objectives or self.objectives)
        if color is None and wanted > 2:
            color = chosen[2]
        return front_figure(
            self.operating_points,
            chosen[0],
            chosen[1],
            color=color or "load",
            objectives=chosen[: max(2, wanted)],
            band=front_band(eligible(self.operating_points, chosen[: max(2, wanted)]), chosen[0], chosen[1]),
        )

    def pick(
        self,
        sla: str | Sla | None = None,
        *,
        minimize: str | None = None,
        maximize: str | None = None,
        headroom: float = 0.0,
        confidence: float | None = None,
        traffic: Traffic | float | None = None,
        devices: int | None = None,
        price_usd_per_device_hour: float | None = None,
        utilization: float | None = None,
        allow_inferior: bool = False,
    ) -> PickResult | Infeasible:
        """The best measured point that meets the SLA; the target defaults to the study's first objective.

        headroom, confidence: of every bound, see decide.certainty.Demand. traffic: mean requests per second, or a
        decide.capacity.Traffic, to size the deployment for; devices: that there are for it. price and utilization:
        other ones than measured, see decide.repricing. What `sweep verify` found of the pick comes with it.
        allow_inferior: also points not shown to lose less quality than quality.non_inferiority. Raises SlaError where
        that leaves none.
        """
        if minimize is None and maximize is None and self.objectives:
            first = get_metric(self.objectives[0])
            minimize, maximize = (first.name, None) if first.direction == "minimize" else (None, first.name)
        bounds = parse_sla(sla) if isinstance(sla, str) else sla or Sla()
        price = price_of(self.config)
        barred = {} if allow_inferior else self.not_shown
        result = pick(
            repriced(_without(self.operating_points, barred), price, price_usd_per_device_hour, utilization),
            bounds,
            minimize=minimize,
            maximize=maximize,
            demand=Demand(headroom, confidence),
            traffic=Traffic(traffic) if isinstance(traffic, int | float) else traffic,
            price_usd_per_device_hour=price_usd_per_device_hour or price,
            devices=devices,
        )
        if not isinstance(result, PickResult):
            return result
        return replace(result, verdicts=self.verdicts(result), why=(*result.why, *_barred_text(barred)))

    @cached_property
    def not_shown(self) -> dict[str, str]:
        """Numerics fingerprints not shown to be non-inferior within quality.non_inferiority, and why."""
        measured = (p.fingerprint for p in self.operating_points if p.state == "measured")
        return not_shown(measured, self.records, self._margins)

    @property
    def _margins(self) -> dict[str, float]:
        return dict(self.config.get("quality", {}).get("non_inferiority") or {})

    @property
    def quality(self) -> pd.DataFrame:
        """One row for each numerics fingerprint: see decide.quality.quality_table."""
        return quality_table(self.records, self._margins)

    @cached_property
    def verifications(self) -> tuple[Verification, ...]:
        """What `sweep verify` found of points of this study, in order."""
        return tuple(read_verifications(self.path))

    def verdicts(self, picked: PickResult) -> tuple[Verdict, ...]:
        """The verifications of a pick, newest first, held against its bounds."""
        chosen = picked.chosen
        mine = [v for v in self.verifications if v.point_id == chosen.point_id]
        return tuple(judge(v, picked.sla, chosen.metrics) for v in reversed(mine))

    def explain(
        self,
        objectives: Sequence[str] | None = None,
        *,
        load: str | None = None,
        technique: str | None = None,
        point_id: str | None = None,
    ) -> Explanation:
        """What the study has learnt: the front's certainty, techniques, cliffs, knobs, overrides (decide.explain)."""
        from sweep.decide.explain import explain

        return explain(self, objectives, load=load, technique=technique, point_id=point_id)

    def compare(self, other: Study, objectives: Sequence[str] | None = None) -> Comparison:
        """Another study against this one, see decide.compare."""
        from sweep.decide.compare import compare

        return compare(self, other, objectives)

    def hypervolume(self, reference_point: Mapping[str, float] | None = None) -> Hypervolume | None:
        """Hypervolume of the study's front with the reference point used; None while nothing is measured."""
        return hypervolume(self.operating_points, self.objectives, reference_point)

    @property
    def failures(self) -> pd.DataFrame:
        """One row for each cause: points hit, how many were measured after a retry, and evidence."""
        import pandas as pd

        rows = [
            {
                **{name: getattr(f, name) for name in _FAILURES},
                "launches": len(f.launches),
                "engine": cell(f.engine),
            }
            for f in failures(self.records)
        ]
        return pd.DataFrame(rows, columns=pd.Index(_FAILURES))

    @property
    def launches(self) -> pd.DataFrame:
        """One row for each launch, in order; durations in seconds, engine settings as in `points`."""
        import pandas as pd

        rows = []
        for record in self.records:
            if isinstance(record, LaunchRecord):
                row = {name: cell(getattr(record, name)) for name in _LAUNCH}
                rows.append(row | {name: cell(value) for name, value in settings(record.engine).items()})
        engine = sorted({name for row in rows for name in row} - {*_LAUNCH, "model"})
        frame = pd.DataFrame(rows, columns=pd.Index([*_LAUNCH, "model", *engine]))
        return nullable(frame.astype({"startup_s": "float64", "duration_s": "float64"}), engine)

    def export(self, path: str | Path) -> Path:
        """Write `points` as .csv or .parquet, by suffix. Raises StudyError for another suffix."""
        path = Path(path)
        if path.suffix not in (".csv", ".parquet"):
            raise StudyError(f"cannot export to '{path.name}'", "name a file that ends in .csv or .parquet")
        if not path.parent.is_dir():
            raise StudyError(f"folder '{path.parent}' does not exist", "create it, or export to another place")
        frame = self.points
        if path.suffix == ".csv":
            frame.to_csv(path, index=False)
        else:
            # args.compilation_config may hold text and numbers; a Parquet column has one type.
            mixed = [
                str(c)
                for c in frame
                if frame[c].dtype == object and frame[c].map(type, na_action="ignore").nunique() > 1
            ]
            frame.assign(**{c: frame[c].map(str, na_action="ignore") for c in mixed}).to_parquet(path, index=False)
        return path

    def refresh(self) -> Study:
        """The same study as its files are now."""
        return open_study(self.path)

    def __repr__(self) -> str:
        points = self.operating_points
        measured = sum(p.state == "measured" for p in points)
        return f"<Study {self.name}: {len(points)} operating points, {measured} measured>"


def _without(points: Sequence[OperatingPoint], barred: Mapping[str, str]) -> list[OperatingPoint]:
    """The points whose fingerprint is not barred. Raises SlaError if that takes every measured one."""
    left = [p for p in points if p.fingerprint not in barred]
    if barred and not any(p.state == "measured" for p in left):
        raise SlaError(
            f"no measured point is shown to be non-inferior: {'; '.join(barred.values())}",
            "--allow-inferior picks all the same; more quality.num_prompts or task items narrow the intervals",
        )
    return left


def _barred_text(barred: Mapping[str, str]) -> tuple[str, ...]:
    formats = f"{plural(len(barred), 'format')} took no part, not shown to be non-inferior"
    return (f"{formats}: {'; '.join(barred.values())}.",) if barred else ()


def open_study(path: str | Path) -> Study:
    """Open a study folder. Raises StudyError if it is missing, is not a study, or cannot be read."""
    path = Path(path)
    file = path / STUDY_FILE
    if not path.exists():
        raise StudyError(f"no study at '{path}'", _studies_near(path))
    if not file.is_file():
        raise StudyError(f"'{path}' is not a study folder: it has no {STUDY_FILE}", _studies_near(path))
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(meta, dict):
            raise ValueError("it does not hold a JSON object")
    except (OSError, ValueError) as error:
        raise StudyError(
            f"cannot read {file}: {error}",
            "restore the file from a backup; the measurements in records.jsonl beside it are a separate file",
        ) from error
    unknown = [name for name in meta.get("objectives", ()) if name not in METRICS]
    if unknown:
        raise StudyError(
            f"{file} names objectives this sweep does not know: {', '.join(unknown)}",
            "open it with the sweep version that wrote it (see 'versions' in the file)",
        )
    try:
        return Study(path, meta, tuple(RecordStore(path).read()))
    except OSError as error:
        raise StudyError(f"cannot read the records of '{path}': {error}", "check the folder's permissions") from error


def _studies_near(path: Path) -> str:
    """Name the studies a person may have meant: inside the path, or beside it."""
    for folder in (path, path.parent, Path("runs")):
        if folder.is_dir() and (found := sorted(str(f.parent) for f in folder.glob(f"*/{STUDY_FILE}"))):
            return f"studies there: {', '.join(found[:8])}"
    return "give the folder that `sweep run` printed, usually runs/<study>"
