"""`sweep revalidate`: after an upgrade, only the front of a study is measured again, and what moved is said.

The front's configurations and the baseline become the search space of a new study, on the same requests, loads and
settings, in a folder of its own; the old study is not touched. Their whole load ladder is measured, and the levels
that the old front has beside it (launch/ladder.py): it decides which load is on the front now. Then both studies are
compared (decide/compare.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweep.config import BudgetConfig, LadderConfig, LoadsConfig, SpaceConfig, SweepConfig
from sweep.decide.compare import compare, discoveries
from sweep.decide.comparison import Comparison
from sweep.decide.explain.change import Change, is_relative, percent_text
from sweep.decide.opened import Study, open_study
from sweep.decide.wording import number_text, plural
from sweep.errors import ConfigError, StudyError
from sweep.launch.spec import build_engine
from sweep.results.front import front
from sweep.results.points import OperatingPoint
from sweep.results.records import QualityRecord
from sweep.space.search_space import make_search_space
from sweep.study.run import Session, run_study
from sweep.study.verify import config_of

if TYPE_CHECKING:
    import pandas as pd

DIMENSION = "config"
BASELINE = "baseline"
_SHOWN = 12


@dataclass(frozen=True, repr=False)
class Revalidation:
    """comparison: of the new study with the old one. rows: of the old front's points and the baseline's, by metric;
    moved tells those that changed beyond noise (5 % false discovery rate over these rows).

    broken: points of the old front that do not work now, with the cause. session: how the new study ended.
    """

    comparison: Comparison
    rows: pd.DataFrame
    broken: tuple[OperatingPoint, ...]
    missing: tuple[OperatingPoint, ...]
    session: Session

    @property
    def moved(self) -> bool:
        """Whether anything of the old front, or all of it on average, changed beyond noise, or works no more."""
        return bool(self.rows["moved"].any()) or bool(self.broken) or bool(self.shifted)

    @property
    def shifted(self) -> list[Change]:
        """Metrics that changed beyond noise on average over all configurations, whatever single points can show."""
        shifts = self.comparison.shifts
        return [c for name, c in shifts.items() if c.beyond_noise and not name.startswith("quality_")]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "study": str(self.session.folder),
            "moved": self.moved,
            "shifted": [change.to_dict() for change in self.shifted],
            "broken": [{"point_id": p.point_id, "cause": p.cause} for p in self.broken],
            "not_measured": [p.point_id for p in self.missing],
            "comparison": self.comparison.to_dict(),
        }

    def text(self) -> str:
        """For a terminal."""
        differing = [d for d in self.comparison.differences if d.what not in ("search space", "machine")]
        lines = [f"{d.what}: {d.a} -> {d.b}" for d in differing] or ["nothing the studies record differs"]
        table = [["load", "metric", "was", "is", "change", "95 % of it", "", "engine"]]
        moved = self.rows[self.rows["moved"]]
        shown = self.rows.head(max(len(moved), _SHOWN))
        table += [_cells({str(k): v for k, v in row.items()}) for row in shown.to_dict(orient="records")]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
        lines += ["", *("  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[-1]]) for r in table), ""]
        lines += [f"NO LONGER WORKS  {p.point_id} at {p.load_label}: {p.cause}: {p.detail}" for p in self.broken]
        if self.missing:
            names = ", ".join(p.point_id for p in self.missing)
            lines.append(f"not measured again ({self.session.reason}): {names}")
        if len(shown) < len(self.rows):
            lines.append(f"and {len(self.rows) - len(shown)} more within noise (--json has all)")
        lines += [f"on average: {shift.text}{', beyond noise' if shift in self.shifted else ''}"
                  for shift in self.comparison.shifts.values()]  # fmt: skip
        better = int(moved["better"].sum())
        counts = f"{better} better, {len(moved) - better} worse, {len(self.rows) - len(moved)} within noise"
        lines.append(f"{plural(len(self.rows), 'value')} of the old front and the baseline: {counts}")
        lines.append(f"new study  {self.session.folder}")
        return "\n".join(lines)


def revalidate(study: Study, overrides: Sequence[str], cache_dir: Path) -> Revalidation:
    """Measure the front and the baseline of a study again. overrides: key=value over the old study's configuration.

    Raises StudyError for a study without a front, ConfigError for an override that does not fit.
    """
    objectives = list(study.objectives)
    best = front(study.operating_points, objectives)
    if not best:
        raise StudyError(f"{study.name} has no front to measure again", "see `sweep status` for what failed")
    config = _config(config_of(study), best, study, overrides)
    space = make_search_space(config.space, config.model, config.hardware)
    session = run_study(config, space, cache_dir)
    after = open_study(session.folder)
    return summarize(compare(study, after, objectives), study, after, session)


def summarize(comparison: Comparison, before: Study, after: Study, session: Session) -> Revalidation:
    """What the comparison says of the old front and the baseline."""
    best = front(before.operating_points, list(before.objectives))
    now = {(p.config_hash, p.load_label): p for p in after.operating_points}
    again = [(p, now.get((p.config_hash, p.load_label))) for p in best]
    wanted = {p.point_id for p in best} | {p.point_id for p in after.operating_points if p.purpose == "baseline"}
    rows = comparison.matched
    rows = rows[rows["point_a"].isin(wanted) | rows["metric"].str.startswith("quality_")].copy()
    records = [*before.records, *after.records]
    floors = [r.noise_floor_kl for r in records if isinstance(r, QualityRecord) and r.noise_floor_kl is not None]
    tied = (rows["metric"] == "quality_kl") & ((rows["b"] - rows["a"]).abs() <= max(floors, default=0.0))
    rows["moved"] = discoveries(rows["p_value"].to_numpy(dtype=float)) & ~tied  # of these values alone
    return Revalidation(
        comparison=comparison,
        rows=rows.sort_values("moved", ascending=False, kind="stable", ignore_index=True),
        broken=tuple(new for _, new in again if new is not None and new.state == "failed"),
        missing=tuple(old for old, new in again if new is None),
        session=session,
    )


def _config(old: SweepConfig, best: Sequence[OperatingPoint], study: Study, overrides: Sequence[str]) -> SweepConfig:
    """The old configuration over a space of the front and the baseline, searched to its end."""
    space = make_search_space(old.space, old.model, old.hardware)
    bundles: dict[str, Any] = {BASELINE: space.baseline()[1]}
    known = {build_engine(old, bundles[BASELINE]).hash}
    for p in best:
        if p.config_hash in known or p.params is None:
            continue
        known.add(p.config_hash)
        settings = {knob: value for knob, value in space.settings(p.params).items() if value is not None}
        bundles[p.config_hash] = settings
    old.study = f"{study.name}-revalidated-{datetime.now(UTC):%Y%m%d}"
    old.storage.dir = str(study.path.resolve().parent)
    old.ladder = LadderConfig()
    _add_levels(old.workload.loads, [p.load for p in best])
    old.space = SpaceConfig(f"front-of-{study.name}", {DIMENSION: {"bundles": bundles}})
    old.budget = BudgetConfig()
    old.sampler.kind = "grid"
    old.validation.finalists = 0
    old.warm_start = []
    return _overridden(old, overrides)


def _add_levels(loads: LoadsConfig, placed: Sequence[Mapping[str, Any]]) -> None:
    """Lengthen a ladder by the loads that launches placed beside it: only plain loops and rates are."""
    ladders: dict[str, list[Any]] = {"concurrency": loads.concurrency, "request_rate_rps": loads.request_rate_rps}
    for name, levels in ladders.items():
        found = {x[name] for x in placed if name in x and not x.keys() & {"rate_scale", "ramp_from_rps"}}
        levels += sorted(found - {*levels})


def _overridden(config: SweepConfig, overrides: Sequence[str]) -> SweepConfig:
    wrong = next((text for text in overrides if "=" not in text), None)
    if wrong is not None:
        raise ConfigError(
            f"'{wrong}' is not an override", "write key=value, for example engine.python=/opt/new/bin/python"
        )
    try:
        plain = OmegaConf.merge(
            OmegaConf.structured(SweepConfig), asdict(config), OmegaConf.from_dotlist(list(overrides))
        )
        changed = OmegaConf.to_object(plain)
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{' '.join(overrides)}: {first}", "name a key of `sweep plan --cfg job`") from error
    assert isinstance(changed, SweepConfig)
    return changed


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["low"], row["high"]
    known = low == low and low is not None
    if is_relative(row["metric"]):
        change, between = f"{percent_text(row['change'] - 1)} %", ""
        if known:
            between = f"{percent_text(low - 1)} to {percent_text(high - 1)}"
    else:
        change, between = f"{row['change']:+.4g}", f"{low:+.3g} to {high:+.3g}" if known else ""
    word = ("better" if row["better"] else "WORSE") if row["moved"] else ("within noise" if known else "noise unknown")
    values = number_text(row["a"]), number_text(row["b"])
    return [row["load_label"], row["metric"], *values, change, between, word, row["engine"]]
