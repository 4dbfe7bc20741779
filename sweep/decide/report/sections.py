"""Sections of the report that are plain HTML: failures, findings, provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sweep.decide.opened import Study
from sweep.decide.scorecard import Line
from sweep.decide.wording import plural, value_text
from sweep.engine.engine_args import EngineConfig
from sweep.results.points import Failure


def listing(sentences: Iterable[str], otherwise: str) -> str:
    """A list of sentences that are HTML already; a paragraph where there is none."""
    items = "".join(f"<li>{s}</li>" for s in sentences)
    return f"<ul>{items}</ul>" if items else f"<p>{escape(otherwise)}</p>"


def failure_table(found: Sequence[Failure]) -> str:
    """One row for each cause, with its evidence."""
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


def quality_formats(rows: Sequence[Sequence[str]], warnings: Sequence[str]) -> str:
    """What must not be missed of quality, and one row for each format. rows: the head first."""
    head, *body = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    told = listing((f"<strong>Warning:</strong> {escape(text)}" for text in warnings), "") if warnings else ""
    formats = "".join(f"<tr>{row}</tr>" for row in body)
    table = f"<thead><tr>{head.replace('td>', 'th>')}</tr></thead><tbody>{formats}</tbody>"
    return f"{told}<div class='scroll'><table class='quality'>{table}</table></div>"


def realism(card: Sequence[Line]) -> str:
    """The realism score card, what is bad first."""
    order = ("bad", "warn", "ok", "not applicable")
    rows = "".join(
        f"<tr class='{x.verdict.replace(' ', '-')}'><td>{x.verdict}</td><td>{escape(x.question)}</td>"
        f"<td>{escape(x.answer)}<br><small>{escape(x.evidence)}</small></td></tr>"
        for x in sorted(card, key=lambda x: order.index(x.verdict))
    )
    return (
        "<div class='scroll'><table class='realism'><thead><tr><th>verdict</th><th>does it mislead?</th>"
        f"<th>what this study did</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def provenance(study: Study, shared: Mapping[str, Any]) -> str:
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
