"""report.html: one offline file: what was measured, what it means and how to run each front point."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

from sweep.decide.opened import Study, open_study
from sweep.decide.plots import front_figure
from sweep.decide.wording import (
    engine_text,
    load_text,
    plural,
    point_value_text,
    setting_items,
    shared_settings,
    value_text,
)
from sweep.engine.engine_args import EngineConfig
from sweep.results.front import eligible, front, ineligible
from sweep.results.metrics import METRICS, get_metric
from sweep.results.points import Failure, OperatingPoint, failures
from sweep.results.records import LaunchRecord

REPORT_FILE = "report.html"
# Columns of the tables, after the objectives; those without a single value are left out.
_COLUMNS = (
    "cost_usd_per_mtok", "output_throughput_tok_s", "user_throughput_tok_s", "ttft_p50_ms", "ttft_p99_ms",
    "itl_p50_ms", "itl_p99_ms", "e2e_p99_ms", "goodput_rps", "quality_kl",
    "quality_top1_agreement", "startup_s",
)  # fmt: skip


def write_report(study_dir: Path) -> Path:
    """Write report.html into the study folder, replacing an older one in one step, and return its path."""
    study = open_study(study_dir)
    path = study_dir / REPORT_FILE
    part = path.with_suffix(".html.part")
    part.write_text(report_html(study), encoding="utf-8")
    part.replace(path)  # a reader never sees half a report
    return path


def report_html(study: Study) -> str:
    """The whole page. It needs no network: a content policy in it forbids loading anything."""
    from plotly.offline import get_plotlyjs

    points, objectives = study.operating_points, study.objectives
    shared = shared_settings(points)
    best = front(points, objectives) if objectives else []
    best = sorted(best, key=lambda p: [get_metric(o).sign * p.metrics[o] for o in objectives])
    ids = {p.point_id for p in best}
    sections = [
        ("What was measured", "".join(f"<p>{s}</p>" for s in _summary(study, best, shared))),
        ("Fronts", _figures(points, objectives)),
        (
            f"The front: {plural(len(best), 'point')}",
            _table("front", best, objectives, shared, ids, state=False),
        ),
        ("How to run each front point", _commands(best, shared)),
        (
            f"All {plural(len(points), 'operating point')}",
            _table("all", points, objectives, shared, ids, state=True),
        ),
        ("What did not work", _failures(failures(study.records))),
        ("Provenance", _provenance(study, shared)),
    ]
    body = "".join(f"<section><h2>{escape(title)}</h2>{content}</section>" for title, content in sections)
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{escape(study.name)}: sweep report</title><style>{_asset('report.css')}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><main>"
        f"<h1>{escape(study.name)}</h1>{body}</main><script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("sweep.decide").joinpath(name).read_text(encoding="utf-8")


def _summary(study: Study, best: Sequence[OperatingPoint], shared: Mapping[str, Any]) -> list[str]:
    """Paragraphs of HTML in plain words."""
    points = study.operating_points
    measured = [p for p in points if p.state == "measured"]
    if not measured:
        return [f"{plural(len(points), 'operating point')} tried, none measured yet."]
    launches = [r for r in study.records if isinstance(r, LaunchRecord)]
    lost = len(points) - len(measured)
    configs = len({p.config_hash for p in measured})
    hours = sum(r.duration_s for r in launches) / 3600
    sentences = [
        f"{plural(len(measured), 'operating point')} of {plural(configs, 'engine config')} measured in "
        f"{plural(len(launches), 'launch')}"
        + (f" ({hours:.1f} h of server time)" if hours >= 0.1 else "")
        + (f"; {lost} more failed or were quarantined, each with its cause below." if lost else "; nothing failed.")
    ]
    names = " × ".join(escape(get_metric(o).label) for o in study.objectives)
    out = [p for p, _ in ineligible(measured, study.objectives)] if study.objectives else []
    if study.objectives:
        without = f" {len(out)} measured without one of them could not take part." if out else ""
        sentences.append(f"<strong>{plural(len(best), 'point')}</strong> on the front of {names}.{without}")
    # The best of one objective is named among the points that have all of them: those that can be on the front.
    comparable = eligible(points, study.objectives) if study.objectives else []
    sentences += [_best_of(name, comparable or measured, shared) for name in study.objectives]
    sentences.append(_defaults_on_front(points, best, study.objectives))
    return [s for s in sentences if s]


def _best_of(name: str, points: Sequence[OperatingPoint], shared: Mapping[str, Any]) -> str:
    """The best value of one objective, its point, and how vLLM's defaults compare."""
    metric = get_metric(name)
    having = [p for p in points if name in p.metrics]
    if not having:
        return f"No point has {escape(metric.label)}."
    best = min(having, key=lambda p: metric.sign * p.metrics[name])
    word = "Lowest" if metric.direction == "minimize" else "Highest"
    best_value = best.metrics[name]
    same = sum(p.metrics[name] == best_value for p in having)
    holder = f"<code>{escape(engine_text(best, shared))}</code> at {escape(best.load_label)}"
    text = f"{word} {escape(metric.label)}: <strong>{escape(point_value_text(best, name))}</strong>, "
    text += f"reached by {same} points" if same > 1 else f"with {holder}"
    defaults = [p for p in having if p.purpose == "baseline"]
    if not defaults:
        return f"{text}. vLLM's defaults were not measured for comparison."
    theirs = min(defaults, key=lambda p: metric.sign * p.metrics[name])
    value = theirs.metrics[name]
    if best_value == value:
        return f"{text}: no better than vLLM's defaults."
    better = "lower" if metric.direction == "minimize" else "higher"
    change = f"{abs(best_value - value) / abs(value):.0%} {better} than" if value else "against"
    said = f"{escape(value_text(name, value))} at {escape(theirs.load_label)}"
    return f"{text}: {change} vLLM's defaults at their best load ({said})."


def _defaults_on_front(
    points: Sequence[OperatingPoint], best: Sequence[OperatingPoint], objectives: Sequence[str]
) -> str:
    defaults = [p for p in points if p.purpose == "baseline" and p.state == "measured"]
    if not defaults or not objectives:
        return ""
    kept = sum(p.purpose == "baseline" for p in best)
    if kept == len(best):
        return "Nothing measured is better than vLLM's defaults."
    if kept == 0:
        return f"None of the {plural(len(defaults), 'point')} of vLLM's defaults is on the front."
    if kept == len(defaults):
        return f"Every point of vLLM's defaults ({kept}) is on the front."
    return f"{kept} of the {plural(len(defaults), 'point')} of vLLM's defaults are on the front."


def _figures(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> str:
    """One figure for each pair of objectives; with three, the third is the colour."""
    pairs = list(combinations(objectives, 2)) or [(o, "output_throughput_tok_s") for o in objectives]
    parts = []
    for number, (x, y) in enumerate(pairs):
        rest = [o for o in objectives if o not in (x, y)]
        color = rest[0] if len(rest) == 1 else "load"
        figure = front_figure(points, x, y, color=color, objectives=objectives if len(objectives) > 1 else None)
        parts.append(
            figure.to_html(
                full_html=False,
                include_plotlyjs=False,
                div_id=f"front-{number}",
                config={"displaylogo": False, "responsive": True},
            )
        )
    return "".join(f"<figure>{part}</figure>" for part in parts) or "<p>The study names no objectives.</p>"


def _table(
    name: str,
    points: Sequence[OperatingPoint],
    objectives: Sequence[str],
    shared: Mapping[str, Any],
    on_front: set[str],
    *,
    state: bool,
) -> str:
    """A sortable table; a value that was not measured is a dash and sorts last."""
    if not points:
        return "<p>None yet.</p>"
    columns = [c for c in dict.fromkeys([*objectives, *_COLUMNS]) if any(c in p.metrics for p in points)]
    head = ["point", "engine", "load", "devices", *(["state"] if state else []), *columns, "repeats"]
    rows = []
    for p in points:
        engine = engine_text(p, shared)
        cells = [
            f"<td><code>{escape(p.point_id)}</code></td>",
            f"<td class='engine'>{escape(engine)}</td>",
            _number_cell(p.load.get("concurrency") or p.load.get("request_rate_rps"), p.load_label, load_text(p.load)),
            _number_cell(p.devices, str(p.devices)),
        ]
        if state:
            shown = "on the front" if p.point_id in on_front else p.state
            cells.append(f"<td title='{escape(p.detail or '')}'>{escape(p.cause or shown)}</td>")
        for column in columns:
            value = p.metrics.get(column)
            # The column head has the unit.
            text = "–" if value is None else point_value_text(p, column).rsplit(" ", 1)[0]
            cells.append(_number_cell(value, text))
        cells.append(_number_cell(p.n_repeats, str(p.n_repeats)))
        kind = "front" if p.point_id in on_front else p.state
        rows.append(f"<tr class='{escape(kind)}'>{''.join(cells)}</tr>")
    text_heads = ("point", "engine", "state")
    heads = "".join(
        f"<th scope='col'{'' if c in text_heads else ' class=number'}><button>{_head(c)}</button></th>" for c in head
    )
    return (
        f"<p class='note'>{_shared_note(shared)}Click a column to sort.</p><div class='scroll'>"
        f"<table class='sortable' id='table-{name}'><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _head(column: str) -> str:
    if column not in METRICS:
        return escape(column)
    metric = METRICS[column]
    unit = "%" if metric.unit == "fraction" else metric.unit
    arrow = "↓" if metric.direction == "minimize" else "↑"
    label = metric.label.split(" (")[0]
    title = escape(f"{column}: {metric.description}")
    return f"<span title='{title}'>{escape(label)} {arrow}<br><small>{escape(unit)}</small></span>"


def _number_cell(value: float | None, text: str, title: str = "") -> str:
    sort = "" if value is None else f" data-sort='{value!r}'"
    hint = f" title='{escape(title)}'" if title else ""
    return f"<td class='number'{sort}{hint}>{escape(text)}</td>"


def _shared_note(shared: Mapping[str, Any]) -> str:
    if not shared:
        return ""
    return f"Every point has <code>{escape(' '.join(setting_items(shared)))}</code>. "


def _commands(points: Sequence[OperatingPoint], shared: Mapping[str, Any]) -> str:
    """One block for each engine config on the front, with the loads it is on the front for."""
    configs: dict[str, list[OperatingPoint]] = {}
    for p in points:
        configs.setdefault(p.config_hash, []).append(p)
    parts = []
    for group in configs.values():
        command = EngineConfig.from_dict(group[0].engine).serve_command()
        which = ", ".join(f"<code>{escape(p.point_id)}</code> ({escape(load_text(p.load))})" for p in group)
        parts.append(
            f"<div class='command'><p><strong>{escape(engine_text(group[0], shared))}</strong><br>{which}</p>"
            f"<div class='line'><pre>{escape(command)}</pre><button class='copy'>Copy</button></div></div>"
        )
    return "".join(parts) or "<p>None yet.</p>"


def _failures(found: Sequence[Failure]) -> str:
    if not found:
        return "<p>Nothing failed.</p>"
    rows = []
    for f in found:
        hit = "quality measurement" if f.subject == "quality" else plural(f.points, "point")
        if f.recovered:
            hit += f", {f.recovered} measured after a retry"
        log = f"<br><small>{escape(f.log)}</small>" if f.log else ""
        engine = "" if f.engine is None else escape(EngineConfig.from_dict(f.engine).serve_command())
        rows.append(
            f"<tr><td>{escape(f.cause)}</td><td>{escape(hit)}</td>"
            f"<td><code>{escape(f.detail or '–')}</code>{log}</td><td><code>{engine or '–'}</code></td></tr>"
        )
    return (
        "<div class='scroll'><table class='failures'><thead><tr><th>cause</th><th>hit</th><th>evidence</th>"
        f"<th>example</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _provenance(study: Study, shared: Mapping[str, Any]) -> str:
    """Versions, host, workload and budget as a table; the whole configuration folded away."""
    meta, config = study.meta, study.config
    rows: dict[str, Any] = {
        "created": meta.get("created_at"),
        "model": shared.get("model"),
        "versions": meta.get("versions"),
        "host": meta.get("host"),
        "hardware": config.get("hardware"),
        "workload": config.get("workload"),
        "workload checksum": meta.get("workload_checksum"),
        "search space": meta.get("search_space_fingerprint"),
        "budget": config.get("budget"),
        "numbers are": ", ".join(sorted({p.provenance for p in study.operating_points})) or None,
    }
    reference = study.hypervolume() if study.objectives else None
    if reference is not None:
        at = ", ".join(value_text(k, v) for k, v in reference.reference_point.items())
        rows["hypervolume"] = f"{reference.value:.4g}, reference point {at}"
    cells = "".join(
        f"<tr><th scope='row'>{escape(k)}</th><td>{escape(_plain(v))}</td></tr>" for k, v in rows.items() if v
    )
    whole = escape(json.dumps(config, indent=2, ensure_ascii=False))
    return (
        f"<table class='facts'><tbody>{cells}</tbody></table>"
        f"<details><summary>Resolved configuration</summary><pre>{whole}</pre></details>"
    )


def _plain(value: Any) -> str:
    """Nested settings on one line: "trials 36, hours 0.25"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items() if v not in (None, [], {}))
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_plain(v) for v in value)
    return str(value)
