"""The front and the status as text for a terminal, and as plain JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sweep.decide.answer import point_dict
from sweep.decide.opened import Study
from sweep.decide.quality import quality_warnings
from sweep.decide.wording import engine_text, plural, shared_settings
from sweep.results.front import front, ineligible
from sweep.results.metrics import get_metric
from sweep.results.points import Failure, OperatingPoint, failures
from sweep.results.records import LaunchRecord, PointRecord
from sweep.results.status import duration_text
from sweep.results.uncertainty import Spreads, front_probability
from sweep.results.validation import validations

# A point off the front that is on it in at least this share of draws is worth a name.
_RIVAL_SHARE = 0.1
_ALSO_SHOWN = ("output_throughput_tok_s", "itl_p50_ms")


def front_points(study: Study, objectives: Sequence[str] | None) -> tuple[list[OperatingPoint], list[str]]:
    """The front in order of its first objective, best first, and the objectives used."""
    names = list(objectives or study.objectives)
    metric = get_metric(names[0])
    points = front(study.operating_points, names)
    return sorted(points, key=lambda p: metric.sign * p.metrics[names[0]]), names


def front_text(study: Study, objectives: Sequence[str] | None = None) -> str:
    """The front as a table, each objective with its 95 % interval; then how sure it is, what is missing, and why."""
    points, names = front_points(study, objectives)
    all_points = study.operating_points
    membership = front_probability(all_points, names)
    columns = [*names, *(m for m in _ALSO_SHOWN if m not in names)]
    shared = shared_settings(all_points)
    rows = [["load", *columns, "on front", "engine"]]
    for p in points:
        text = engine_text(p, shared)
        baseline = " (vLLM's defaults)" if p.purpose == "baseline" and "defaults" not in text else ""
        numbers = [_cell(p, c, with_interval=c in names) for c in columns]
        rows.append([p.load_label, *numbers, f"{membership[p.point_id]:.0%}", text + baseline])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    table = ["  ".join([*(c.rjust(w) for c, w in zip(r, widths, strict=False)), r[-1]]).rstrip() for r in rows]
    measured = sum(p.state == "measured" for p in all_points)
    title = f"Pareto front of {', '.join(names)}: {len(points)} of {plural(measured, 'measured point')}"
    lines = [title, *table, *_certainty_lines(study, names, membership)] if points else [title]
    without = [(p, why) for p, why in ineligible(all_points, names) if p.state == "measured"]
    if without:
        lines.append(f"not on any front: {plural(len(without), 'measured point')}, for example {without[0][1]}")
    lines += [_failure_line(f.cause, f.points, f.recovered, f.detail) for f in _told(study)]
    if cut := [p for p in all_points if p.state == "cut"]:
        lines.append(f"cut       {plural(len(cut), 'point')} not measured: {cut[0].detail}"[:200])
    lines += [f"quality   {warning}" for warning in quality_warnings(study.meta, study.records)]
    lines += [*_validation_lines(study, names), *_changed_by_vllm(study), *_cross_check(study)]
    return "\n".join(lines)


def _cell(point: OperatingPoint, name: str, *, with_interval: bool) -> str:
    """A value, and how far its 95 % interval reaches to the farther side, in per cent of it: "639.5 ±12%"."""
    value, ends = point.metrics.get(name), point.intervals.get(name)
    if value is None:
        return ""
    if not with_interval or ends is None or not value:
        return f"{value:.4g}"
    return f"{value:.4g} ±{max(value - ends[0], ends[1] - value) / abs(value):.0%}"


def _certainty_lines(study: Study, names: Sequence[str], membership: Mapping[str, float]) -> list[str]:
    """Where the intervals come from, which points off the front may belong on it, and whether the node drifted."""
    points = study.operating_points
    spreads = Spreads(points)
    known = [(name, cv) for name in names if (cv := spreads.pooled_cv(name)) is not None]
    if known:
        said = ", ".join(f"{name} {cv:.1%}" for name, cv in known)
        repeated = sum(p.n_repeats - 1 for p in points if p.n_repeats > 1)
        lines = [f"spread    between launches, from {plural(repeated, 'repeat')}: {said}"]
    else:
        lines = ["spread    between launches unknown, nothing was repeated: ± is what the requests of one run tell"]
    on_front = {p.point_id for p in front(points, names)}
    rivals = [(share, p) for p in points if (share := membership.get(p.point_id, 0.0)) >= _RIVAL_SHARE]
    rivals = sorted((r for r in rivals if r[1].point_id not in on_front), key=lambda r: -r[0])
    if rivals:
        shared = shared_settings(points)
        named = ", ".join(f"{engine_text(p, shared)} at {p.load_label} ({share:.0%})" for share, p in rivals[:3])
        more = f" and {len(rivals) - 3} more" if len(rivals) > 3 else ""
        lines.append(f"tied      off this front but perhaps on the true one: {named}{more}")
    return [*lines, *_drift_lines(study, names)]


def _drift_lines(study: Study, names: Sequence[str]) -> list[str]:
    """vLLM's defaults at one load, measured again and again: the last against the first."""
    by_load: dict[str, list[PointRecord]] = {}
    for r in study.records:
        if isinstance(r, PointRecord) and r.purpose == "baseline" and r.state == "measured":
            by_load.setdefault(r.load_label, []).append(r)
    controls = max(by_load.values(), key=len, default=[])
    if len(controls) < 2:
        return []
    changes = []
    for name in names:
        first, last = controls[0].metrics.get(name), controls[-1].metrics.get(name)
        if first and last is not None:
            changes.append(f"{name} {last / first - 1:+.1%}")
    where = f"vLLM's defaults at {controls[0].load_label}, {len(controls)} times from first to last"
    return [f"control   {where}: {', '.join(changes)}"] if changes else []


def _validation_lines(study: Study, objectives: Sequence[str]) -> list[str]:
    """What a fresh launch on held-out requests made of the finalists, against what the search had seen."""
    lines = []
    for v in validations(study.records, objectives):
        if v.state != "measured":
            lines.append(f"held out  {v.point.point_id}: {v.state}: {v.cause}")
            continue
        changes = []
        for name, value in v.held_out.items():
            by = v.worse_by(name)
            text = "" if by is None else f" ({abs(by):.1%} {'worse' if by > 0 else 'better'})"
            changes.append(f"{name} {v.first[name]:.4g} -> {value:.4g}{text}")
        lines.append(f"held out  {v.point.point_id}: {', '.join(changes)}")
    return lines


def _changed_by_vllm(study: Study) -> list[str]:
    """One line for each argument that vLLM resolved to something else than asked, with how often it did."""
    changes = Counter(
        f"{name}: asked {asked}, ran with {resolved}"
        for record in study.records
        if isinstance(record, LaunchRecord)
        for name, (asked, resolved) in record.resolved_differently.items()
    )
    return [f"changed   by vLLM in {plural(n, 'launch')}: {text}" for text, n in changes.most_common()]


def _cross_check(study: Study) -> list[str]:
    """What vLLM's own bench saw beside our client, where the study asked for it."""
    check = study.meta.get("cross_check")
    if check is None:
        return []
    if "failed" in check:
        return [f"cross-check failed: {check['failed']}"]
    pairs = {name: (v["sweep"], v["vllm_bench"]) for name, v in check.items() if isinstance(v, dict)}
    shown = [f"{name} {a:.4g} against {b:.4g}" for name, (a, b) in pairs.items() if a is not None and b is not None]
    return [f"cross-check at {check['load']}, ours against vLLM's bench: {', '.join(shown)}"]


def front_dict(study: Study, objectives: Sequence[str] | None = None) -> dict[str, Any]:
    """The front as plain JSON values."""
    points, names = front_points(study, objectives)
    membership = front_probability(study.operating_points, names)
    return {
        "study": study.name,
        "objectives": [{"metric": n, "direction": get_metric(n).direction} for n in names],
        "front": [{**point_dict(p), "probability_on_front": membership[p.point_id]} for p in points],
        "ineligible": [{"point_id": p.point_id, "reason": why} for p, why in ineligible(study.operating_points, names)],
    }


def status_text(study: Study, status: Mapping[str, Any] | None) -> str:
    """What the study is doing, for people."""
    if status is None:
        return f"{study.name}: nothing was run yet"
    counts = status["counts"]
    state = f"running (process {status['pid']})" if status["state"] == "running" else status["state"]
    if status["state"] == "died":
        state = "stopped without finishing; the same `sweep run` command continues it"
    spent = f"{status['hours_spent']:.2f} h, {status['usd_spent']:.2f} USD"
    lines = [
        f"{study.name}: {state}",
        f"  points    {counts['measured']} measured, {counts['failed']} failed, {counts['quarantined']} quarantined"
        + (f", {counts['cut']} cut" if counts.get("cut") else "")
        + f"; {plural(counts['configs'], 'configuration')} in {plural(counts['launches'], 'launch')}",
        f"  spent     {spent}",
    ]
    if status["eta_s"] is not None:
        lines.append(f"  ETA       {duration_text(status['eta_s'])}")
    if status["stop_reason"]:
        lines.append(f"  ended     {status['stop_reason']}")
    for job in status["jobs"]:
        running = duration_text(job["running_s"])
        lines.append(f"  now       {job['launch_id']}: {job['phase']} ({running}): {job['config']}")
    for name, best in status["best"].items():
        lines.append(f"  best      {name} {best['value']:.4g}: {best['config']} at {best['load']}")
    lines += ["  " + _failure_line(f.cause, f.points, f.recovered, f.detail) for f in _told(study)]
    for v in study.verifications:
        outcome = "passed" if v.passed else f"NOT passed{'' if v.cause is None else f': {v.cause}'}"
        lines.append(f"  verified  {v.point_id}: {outcome}, {v.sla} ({v.verification_id})")
    return "\n".join(lines)


def _told(study: Study) -> list[Failure]:
    """Failures worth a line: an interruption that cost no point is not one."""
    return [f for f in failures(study.records) if f.points or f.cause != "interrupted"]


def _failure_line(cause: str, points: int, recovered: int, detail: str | None) -> str:
    mended = f", {recovered} measured after a retry" if recovered else ""
    return f"failed    {cause}: {plural(points, 'point')}{mended}: {(detail or 'no detail')[:160]}"
