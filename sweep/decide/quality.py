"""What a study knows about quality, format by format: a table, and the warnings a reader must not miss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from sweep.results.points import settings
from sweep.results.quality import judge, newest_quality
from sweep.results.records import LaunchRecord, PointRecord, QualityRecord, Record

if TYPE_CHECKING:
    import pandas as pd

_METRICS = ("quality_kl", "quality_top1_agreement", "quality_perplexity", "quality_task_accuracy")
_ALL_TASKS = "all tasks"
_Z = NormalDist().inv_cdf(0.975)
NO_EFFECT = "what was asked for had no effect"

_HEAD = (
    "format", "KL (nats/token)", "top-1 agreement", "perplexity loss", "task accuracy", "flips +/-", "McNemar p",
    "verdict",
)  # fmt: skip
COLUMNS = (
    "fingerprint", "settings", "state",
    *(f"{name}{end}" for name in _METRICS for end in ("", "_low", "_high")),
    "perplexity_loss", "perplexity_loss_low", "perplexity_loss_high",
    "task_items", "task_loss", "task_loss_low", "task_loss_high", "flips_better", "flips_worse", "mcnemar_p",
    "noise_floor_kl", "verdict", "note",
)  # fmt: skip


def quality_table(records: Iterable[Record], margins: Mapping[str, float] | None = None) -> pd.DataFrame:
    """One row for each numerics fingerprint, the reference first, then by KL divergence; NaN where nothing is known.

    settings: how its engine configurations differ from the reference's ("reference" for itself). <metric>, _low and
    _high: value and 95 % interval. perplexity_loss and task_loss: how much worse than the reference on the same text
    and items, with intervals. flips_better, flips_worse: items that only it, or only the reference, answered right;
    mcnemar_p: how likely flips that lopsided are by chance. quality_kl below noise_floor_kl is a tie with the
    reference. verdict: "reference", or of the non-inferiority margins: "non-inferior", "not shown", "inferior",
    "not measured"; empty without margins. note: what else must be known.
    """
    import pandas as pd

    records = list(records)
    found = newest_quality(records)
    if not found:
        return pd.DataFrame(columns=pd.Index(COLUMNS))
    names = format_names(records)
    rows = [_row(record, names.get(fingerprint, fingerprint), margins or {}) for fingerprint, record in found.items()]
    frame = pd.DataFrame(rows, columns=pd.Index(COLUMNS))
    texts = ("fingerprint", "settings", "state", "verdict", "note")
    frame = frame.astype({name: "float64" for name in COLUMNS if name not in texts})
    order = frame.assign(first=frame["settings"] != "reference").sort_values(["first", "quality_kl"]).index
    return frame.loc[order].reset_index(drop=True)


def _row(record: QualityRecord, name: str, margins: Mapping[str, float]) -> dict[str, Any]:
    is_reference = record.fingerprint == record.reference_fingerprint
    row: dict[str, Any] = {
        "fingerprint": record.fingerprint,
        "settings": "reference" if is_reference else name,
        "state": record.state,
        "noise_floor_kl": record.noise_floor_kl,
        "verdict": _verdict(record, margins, is_reference),
        "note": _note(record, is_reference),
    }
    for metric in _METRICS:
        low, high = _interval(record, metric)
        row |= {metric: record.metrics.get(metric), f"{metric}_low": low, f"{metric}_high": high}
    for metric, column in (("quality_perplexity", "perplexity_loss"), ("quality_task_accuracy", "task_loss")):
        loss = record.losses.get(metric, {})
        row |= {column: loss.get("loss"), f"{column}_low": loss.get("low"), f"{column}_high": loss.get("high")}
    tasks = record.tasks.get(_ALL_TASKS, {})
    row |= {"task_items": tasks.get("items"), "flips_better": tasks.get("better"), "flips_worse": tasks.get("worse")}
    return row | {"mcnemar_p": None if is_reference else tasks.get("mcnemar_p")}


def _interval(record: QualityRecord, metric: str) -> tuple[float | None, float | None]:
    """As recorded; records of older sweeps hold standard errors only."""
    value, se = record.metrics.get(metric), record.standard_errors.get(metric)
    if metric in record.intervals:
        low, high = record.intervals[metric]
        return low, high
    return (None, None) if value is None or se is None else (value - _Z * se, value + _Z * se)


def _verdict(record: QualityRecord, margins: Mapping[str, float], is_reference: bool) -> str | None:
    """The worst of the margins' verdicts."""
    if is_reference:
        return "reference"
    verdicts = [j.verdict for j in judge(record, margins)]
    return next(
        (v for v in ("not measured", "inferior", "not shown") if v in verdicts), "non-inferior" if verdicts else None
    )


def _note(record: QualityRecord, is_reference: bool) -> str | None:
    notes = []
    if record.state == "failed":
        notes.append(f"{record.cause}: {record.detail}")
    if record.identical and not is_reference:
        notes.append(f"{NO_EFFECT}: every log-probability equals the reference's")
    if record.task_failure is not None:
        notes.append(f"no task results: {record.task_failure}")
    return "; ".join(notes) or None


def format_names(records: Iterable[Record]) -> dict[str, str]:
    """fingerprint -> what all engine configurations that have it set, and the reference's do not, as one line."""
    engines: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if isinstance(record, PointRecord | LaunchRecord):
            engines.setdefault(record.fingerprint, []).append(settings(record.engine))
    references = {r.reference_fingerprint for r in newest_quality(records).values() if r.state == "measured"}
    common = {fingerprint: _common(configs) for fingerprint, configs in engines.items()}
    reference = next((common[f] for f in references if f in common), {})
    return {fingerprint: _difference(config, reference) for fingerprint, config in common.items()}


def _common(configs: list[dict[str, Any]]) -> dict[str, Any]:
    first, *others = configs
    return {name: value for name, value in first.items() if all(c.get(name) == value for c in others)}


def _difference(config: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    changed = [f"{n.partition('.')[2] or n}={_short(n, v)}" for n, v in config.items() if reference.get(n) != v]
    missing = [f"without {n.partition('.')[2] or n}" for n in reference if n not in config]
    return " ".join([*changed, *missing]) or "reference"


def _short(name: str, value: Any) -> Any:
    """A checkpoint folder by its last part."""
    return Path(value).name if name == "model" and Path(value).is_absolute() else value


def quality_warnings(meta: Mapping[str, Any], records: Iterable[Record]) -> list[str]:
    """What a reader must not miss: formats without effect, answers that change under load, speculation that is lossy.

    meta: study.json.
    """
    records = list(records)
    names = format_names(records)
    warnings = []
    for fingerprint, record in newest_quality(records).items():
        note = _note(record, fingerprint == record.reference_fingerprint)
        if note is not None:
            warnings.append(f"{names.get(fingerprint, fingerprint)}: {note}")
    return [*warnings, *_under_load(meta.get("quality_under_load"))]


def quality_checks(meta: Mapping[str, Any]) -> list[str]:
    """What was checked and found in order: answers under load, speculation. meta: study.json."""
    lines = []
    load = meta.get("quality_under_load")
    if load is not None and load.get("unchanged"):
        lines.append(
            f"answers under load ({load['load']}, {load['answered']} requests answered meanwhile): KL {load['kl']:.3g}"
            f" nats/token (tolerance {load['max_kl']:g}), {load['greedy_identical']:.0%} of greedy completions the same"
        )
    for name, check in meta.items():
        if name.startswith("speculation.") and check["lossless"]:
            lines.append(
                f"speculation of {name.partition('.')[2]} is lossless: {check['identical']:.0%} of"
                f" {check['completions']} greedy completions are the target's own, token by token"
                f" (largest gap {check['largest_gap_nats']:.3g} nats, near-ties up to {check['near_tie_nats']:g})"
            )
    return lines


def _under_load(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    if "failed" in found:
        return [f"quality under load could not be checked: {found['failed']}"]
    if found["unchanged"]:
        return []
    return [
        f"quality changes under load: at {found['load']} the answers are KL {found['kl']:.3g} nats/token from those of"
        f" the quiet engine (tolerance {found['max_kl']:g}), {found['greedy_identical']:.0%} of greedy completions are"
        " the same"
    ]


def table_rows(frame: pd.DataFrame) -> list[list[str]]:
    """The table as text for people, its head first: a row for each format, values with their 95 % intervals."""
    return [list(_HEAD), *(_cells(row) for row in frame.to_dict("records"))]


def table_lines(frame: pd.DataFrame) -> list[str]:
    """The table for a terminal."""
    if frame.empty:
        return ["no quality was measured in this study"]
    rows = table_rows(frame)
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(row: Mapping[Any, Any]) -> list[str]:
    def with_interval(name: str, digits: str = ".3g") -> str:
        value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
        if value != value:  # NaN
            return "-"
        return f"{value:{digits}}" if low != low else f"{value:{digits}} ({low:{digits}} to {high:{digits}})"

    is_reference, flips = row["settings"] == "reference", row["flips_better"] == row["flips_better"]
    return [
        str(row["settings"]),
        "-" if is_reference and row["quality_kl"] == 0 else with_interval("quality_kl"),
        "-" if is_reference else with_interval("quality_top1_agreement", ".1%"),
        f"perplexity {row['quality_perplexity']:.4g}" if is_reference else with_interval("perplexity_loss"),
        with_interval("quality_task_accuracy", ".1%"),
        f"+{row['flips_better']:.0f}/-{row['flips_worse']:.0f}" if flips and not is_reference else "-",
        f"{row['mcnemar_p']:.2g}" if row["mcnemar_p"] == row["mcnemar_p"] else "-",
        row["verdict"] if isinstance(row["verdict"], str) else "-",
    ]
