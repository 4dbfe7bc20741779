"""The page itself: sections in the order a person decides in, and the scripts that make it answer."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from sweep.decide.explain.techniques import technique_fronts
from sweep.decide.invoice import terms_of
from sweep.decide.opened import Study, open_study
from sweep.decide.plots import (
    Hover,
    cost_figure,
    failure_figure,
    knobs_figure,
    latency_figure,
    progress_figure,
    quality_figure,
    technique_figure,
    techniques_figure,
)
from sweep.decide.plots.cost import cost_steps
from sweep.decide.quality import quality_warnings, table_rows
from sweep.decide.report import findings as found
from sweep.decide.report import sections, summary
from sweep.decide.report.figures import Shown, caption, fronts, slim
from sweep.decide.report.payload import embed, payload
from sweep.decide.scorecard import score_card
from sweep.decide.wording import plural, setting_items, shared_settings
from sweep.measure.cost import Usage
from sweep.results.front import eligible, front
from sweep.results.metrics import get_metric
from sweep.results.points import failures
from sweep.results.records import LOST

REPORT_FILE = "report.html"
_SCRIPTS = ("pick.js", "figures.js", "sliders.js", "table.js")
_LATENCIES = ("ttft_p99_ms", "itl_p99_ms", "e2e_p99_ms", "ttft_p50_ms")
_QUALITIES = ("quality_kl", "quality_top1_agreement", "quality_perplexity", "quality_task_accuracy")
# The drawing library compiles functions, hence unsafe-eval; nothing can be loaded or sent, whatever runs here.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"


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

    page = _Page(study)
    body = "".join(
        f"<section id='{key}'><h2>{escape(title)}</h2>{content}</section>" for key, title, content in page.sections()
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{escape(study.name)}: sweep report</title><style>{_asset('report.css')}</style></head><body><main>"
        f"<h1>{escape(study.name)}</h1>{body}</main><div id='toast' role='status'></div>"
        f"{_json('study', page.data)}{_json('template', _template())}{page.figure_scripts()}"
        f"<script>{get_plotlyjs()}</script><script>{''.join(map(_asset, _SCRIPTS))}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("sweep.decide.report").joinpath(name).read_text(encoding="utf-8")


def _json(element_id: str, data: Any) -> str:
    return f"<script type='application/json' id='{element_id}'>{embed(data)}</script>"


def _template() -> Any:
    import plotly.io

    return plotly.io.templates["plotly_white"].to_plotly_json()


class _Page:
    """Sections and figures of one report; the figures collect while the sections are written."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.points, self.objectives = study.operating_points, study.objectives
        self.shared = shared_settings(self.points)
        best = front(self.points, self.objectives) if self.objectives else []
        self.best = sorted(best, key=lambda p: [get_metric(o).sign * p.metrics[o] for o in self.objectives])
        self.on_front = {p.point_id for p in best}
        self.sla, self.origin = summary.starting_sla(study)
        self.pick = summary.starting_pick(study, self.sla)
        self.card = score_card(study)
        self.findings = found.findings(study) if self.best else None
        target = self.objectives[0] if self.best else None
        self.hover = Hover(self.points, self.on_front)
        self.data = payload(study, self.on_front, target, self.sla, self.hover)
        self._number = {p.point_id: i for i, p in enumerate(self.points)}
        self._specs: list[tuple[str, str]] = []

    def sections(self) -> list[tuple[str, str, str]]:
        """(id, title, HTML) in order."""
        front_count = plural(len(self.best), "point") + " on the front"
        return [
            ("summary", "What we learned, what to deploy, how sure", self._summary()),
            ("decide", "Decide: state your SLA", self._decide()),
            ("points", f"All {plural(len(self.points), 'operating point')}, {front_count}", self._table()),
            *([("explain", "Why", self._explain())] if self.findings else []),
            ("cost", "Cost and latency", self._cost_and_latency()),
            ("quality", "Quality", self._quality()),
            ("failures", "What did not work", self._failures()),
            ("realism", "How realistic this is", sections.realism(self.card)),
            ("provenance", "Provenance", sections.provenance(self.study, self.shared)),
        ]

    def figure_scripts(self) -> str:
        """Every figure as JSON, drawn when it comes into sight."""
        return "".join(
            f"<script type='application/json' class='figure' data-key='{key}'>{spec}</script>"
            for key, spec in self._specs
        )

    def _figure(self, shown: Shown, attributes: str = "") -> str:
        self._specs.append((shown.key, embed(slim(shown.figure, self._number, self.data["points"]["hover"]))))
        title, subtitle = caption(shown.figure)
        height = shown.figure.layout.height - 60
        axes = f" data-axes='{' '.join(shown.axes)}'" if shown.axes else ""
        return (
            f"<figure data-key='{shown.key}'{axes}{attributes}><figcaption><strong>{title}</strong> {subtitle}"
            f"</figcaption><div class='plot' style='min-height:{height}px'></div></figure>"
        )

    def _summary(self) -> str:
        verdicts = [escape(v[:1].upper() + v[1:]) for v in self.findings.verdicts] if self.findings else []
        learned = [*summary.learned(self.study, self.best, self.shared), *verdicts]
        cards = [("What we learned", learned)]
        if self.pick is not None:
            cards.append(("What to deploy", summary.picked(self.pick, self.origin)))
        if self.objectives:
            cards.append(("How sure", summary.sure(self.study, self.pick, self.card)))
        made = (f"<div><h3>{title}</h3>{''.join(f'<p>{s}</p>' for s in texts)}</div>" for title, texts in cards)
        return f"<div class='cards'>{''.join(made)}</div>"

    def _decide(self) -> str:
        if self.findings is None:
            return "<p>Nothing to decide with yet: no measured point has every objective.</p>"
        shown = fronts(self.points, self.objectives, self.findings.bands, found.cliff_pairs(self.findings), self.hover)
        tabs = "".join(
            f"<button type='button' role='tab' aria-controls='{s.key}' aria-selected='false'>{escape(s.tab)}</button>"
            for s in shown
        )
        panels = "".join(self._figure(s, f" id='{s.key}' role='tabpanel' hidden") for s in shown)
        note = f"Opens with {escape(self.origin)}. Click a point to copy its <code>vllm serve</code> command."
        controls = (
            "<div class='controls'><label>best is <select id='target'></select></label>"
            "<button type='button' id='no-bounds'>no bounds</button></div>"
        )
        return (
            f"<p class='note'>{note}</p><div class='decide'><div class='choose'>{controls}<div id='sliders'></div>"
            "<div id='pick' aria-live='polite'></div></div><div class='fronts'><div class='tabs' role='tablist'>"
            f"{tabs}</div><div class='panels'>{panels}</div></div></div>"
        )

    def _table(self) -> str:
        if not self.points:
            return "<p>None yet.</p>"
        same = f"Every point has <code>{escape(' '.join(setting_items(self.shared)))}</code>. " if self.shared else ""
        scopes = "".join(
            f"<label><input type='radio' name='scope' value='{value}'{checked}> {label}</label>"
            for value, label, checked in (
                ("all", "all", " checked"),
                ("front", "on the front", ""),
                ("sla", "meets the SLA", ""),
                ("lost", "not measured", ""),
            )
        )
        return (
            f"<p class='note'>{same}Click a column to sort, a row for its command. The filter takes words and bounds: "
            "<code>fp8 c8 ttft_p99_ms&lt;500</code>.</p><div class='controls'><input id='filter' type='search' "
            f"placeholder='filter' aria-label='filter rows'>{scopes}<span id='rows' class='note'></span></div>"
            "<div id='detail' hidden></div><div class='scroll' id='table'></div>"
        )

    def _explain(self) -> str:
        assert self.findings is not None
        f = self.findings
        parts = [self._figure(Shown("techniques", "", techniques_figure(f.techniques)))] if f.techniques else []
        told = [e for e in f.techniques if e.verdict in ("outward", "along", "inward")]
        shown = [e for e in told if len(e.objectives) > 1][:2]
        rest = (f"<code>{escape(e.level)}</code>: {escape(e.text)}" for e in told[:10] if e not in shown)
        pair = [
            self._figure(
                Shown(f"technique-{i}", "", technique_figure(technique_fronts(self.points, e), e, *e.objectives[:2]))
            )
            for i, e in enumerate(shown)
        ]
        parts.append(f"<div class='pair'>{''.join(pair)}</div>")
        parts.append(sections.listing(rest, "" if told else "No technique can be judged from these data."))
        parts.append("<h3>Which knobs matter</h3>" + found.importance_table(f))
        parts.append("<h3>Cliffs: one knob, a jump</h3>")
        parts.append(sections.listing(found.cliff_sentences(f), "No two points one knob apart differ beyond noise."))
        knobs = knobs_figure(self.points, self.objectives, importance=found.knob_shares(f))
        parts.append(f"<div class='wide'>{self._figure(Shown('knobs', '', knobs))}</div>")
        if f.progress is not None:
            parts.append(self._figure(Shown("progress", "", progress_figure(f.progress.frame, f.progress.text))))
        return "".join(parts)

    def _cost_and_latency(self) -> str:
        parts = []
        if self.pick is not None:
            terms = terms_of(self.study.config)
            usage = Usage(terms.utilization, terms.peak_to_mean, terms.starts_per_day)
            steps, missing = cost_steps(self.points, self.pick.chosen, usage)
            figure = cost_figure(steps, f"the pick above, {self.pick.chosen.point_id}", missing)
            parts.append(self._figure(Shown("cost", "", figure)))
        wanted = [o for o in self.objectives if o.endswith("_ms")] or [*_LATENCIES]
        metric = next((m for m in wanted if eligible(self.points, [m])), None)
        if metric is not None:
            figure = latency_figure(self.points, metric, objectives=self.objectives, hover=self.hover)
            parts.append(self._figure(Shown("latency", "", figure)))
        return f"<div class='pair'>{''.join(parts)}</div>" if parts else "<p>Neither was measured.</p>"

    def _quality(self) -> str:
        table = self.study.quality
        known = [m for m in _QUALITIES if m in table and table[m].notna().any()]
        parts = [self._figure(Shown(metric, "", quality_figure(table, metric))) for metric in known]
        if not parts:
            return "<p>Quality was not measured.</p>"
        warnings = quality_warnings(self.study.meta, self.study.records)
        return f"<div class='pair'>{''.join(parts)}</div>" + sections.quality_formats(table_rows(table), warnings)

    def _failures(self) -> str:
        table = sections.failure_table(failures(self.study.records))
        lost: Sequence[Any] = [p for p in self.points if p.state in LOST]
        return (self._figure(Shown("failure-map", "", failure_figure(self.points))) if lost else "") + table
