"""`sweep watch`: a study in the terminal while another process runs it. Reads its files only, and writes none.

status.json says what the sweep is doing, the launch folders how far each launch is, records.jsonl everything else. A
frame fits 80 columns; wider terminals show more of each configuration.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sweep.decide.opened import Study, open_study
from sweep.decide.tables import front_points
from sweep.decide.wording import engine_text, number_text, plural, shared_settings
from sweep.executor.local import read_events
from sweep.launch.spec import EVENTS_FILE, LAUNCHES_DIR, SPEC_FILE, WORKER_LOCK, read_spec
from sweep.results.metrics import get_metric
from sweep.results.points import failures
from sweep.results.records import RECORDS_FILE
from sweep.results.status import duration_text, read_status

_FRONT_ROWS, _FAILURE_ROWS, _BAR_WIDTH = 8, 6, 30
_COLOURS = {"running": "green", "finished": "cyan", "interrupted": "yellow", "died": "red"}
_SHORT = {"cost_usd_per_mtok": "cost $/Mtok", "quality_kl": "KL nats/tok", "output_throughput_tok_s": "tok/s"}


@dataclass
class Watched:
    """What the files of a study said last; records are read again only when their file has grown."""

    folder: Path
    study: Study = field(init=False)
    status: dict[str, Any] | None = None
    _seen: int = -1

    def __post_init__(self) -> None:
        self.study = open_study(self.folder)
        self.refresh()

    def refresh(self) -> None:
        path = self.folder / RECORDS_FILE
        size = path.stat().st_size if path.exists() else 0
        if size != self._seen:
            self.study, self._seen = open_study(self.folder), size
        self.status = read_status(self.folder)

    @property
    def running(self) -> bool:
        return self.status is not None and self.status["state"] == "running"


def watch(folder: Path, *, once: bool = False, every_s: float = 2.0, console: Console | None = None) -> None:
    """Show frames until the sweep ends, or one. Ctrl-C ends watching; the sweep does not notice."""
    console = console or Console()
    watched = Watched(folder)
    if not once and watched.running:
        with Live(frame(watched), console=console, screen=True, auto_refresh=False) as live:
            try:
                while watched.running:
                    time.sleep(max(0.2, every_s))
                    watched.refresh()
                    live.update(frame(watched), refresh=True)
            except KeyboardInterrupt:
                pass
    console.print(frame(watched))


def frame(watched: Watched, now: datetime | None = None) -> RenderableType:
    """Everything at one moment. now: for the age of the status; default: the clock."""
    study, status = watched.study, watched.status
    age_s = 0.0
    if status is not None and watched.running:
        age_s = max(0.0, ((now or datetime.now(UTC)) - datetime.fromisoformat(status["updated_at"])).total_seconds())
    parts = [_head(study, status, age_s), _devices(watched, age_s), _front(study), _failures(study)]
    return Group(*(part for part in parts if part is not None))


def _head(study: Study, status: Mapping[str, Any] | None, age_s: float) -> RenderableType:
    if status is None:
        return _panel(Text("nothing was run yet"), study.name)
    counts, state = status["counts"], str(status["state"])
    line = Text.assemble(
        (state, f"bold {_COLOURS.get(state, 'white')}"),
        f"  {counts['measured']} measured, {counts['failed']} failed, {counts['quarantined']} quarantined"
        + (f", {counts['cut']} cut" if counts.get("cut") else ""),
    )
    tried = f"{plural(counts['configs'], 'configuration')} in {plural(counts['launches'], 'launch')}"
    rows: list[RenderableType] = [line, Text(tried), _budget(study, status)]
    if status["eta_s"] is not None:
        rows.append(Text(f"about {duration_text(max(0.0, status['eta_s'] - age_s))} left"))
    if status["stop_reason"]:
        rows.append(Text(str(status["stop_reason"])))
    title = f"{study.name} on {status['node']}"
    return _panel(Group(*rows), title, f"as of {duration_text(age_s)} ago" if state == "running" else "")


def _budget(study: Study, status: Mapping[str, Any]) -> Table:
    """One bar for each bound of the budget; what has no bound is a number."""
    budget = study.config.get("budget", {})
    spent = {"hours": status["hours_spent"], "usd": status["usd_spent"], "trials": status["counts"]["settled"]}
    words = {"hours": "hours", "usd": "USD", "trials": "points"}
    table = Table.grid(padding=(0, 1))
    for name, used in spent.items():
        limit = budget.get(name)
        said = number_text(used) if limit is None else f"{number_text(used)} of {number_text(limit)}"
        table.add_row(Text(words[name], style="dim"), said, _bar(used / limit) if limit else Text("no limit", "dim"))
    return table


def _bar(share: float) -> Text:
    filled = round(_BAR_WIDTH * min(1.0, share))
    return Text.assemble(("━" * filled, "green"), ("─" * (_BAR_WIDTH - filled), "dim"), f" {share:.0%}")


def _devices(watched: Watched, age_s: float) -> RenderableType | None:
    """Every device of the node with what runs on it; devices of one launch share a row."""
    status, hardware = watched.status, watched.study.config.get("hardware", {})
    if status is None:
        return None
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    table.add_column("GPU" if hardware.get("device", "gpu") == "gpu" else "slot", no_wrap=True)
    table.add_column("launch", no_wrap=True)
    table.add_column("doing", no_wrap=True, max_width=26)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("configuration", no_wrap=True, overflow="ellipsis", ratio=1)
    free = set(range(int(hardware.get("devices") or 1)))
    for job in sorted(status["jobs"], key=lambda j: j["device_ids"]):
        free -= set(job["device_ids"])
        number, phase = str(job["launch_id"]).partition("-")[0], _progress(watched.folder, job)
        for_s = duration_text(job["running_s"] + age_s)
        table.add_row(_ranges(job["device_ids"]), number, phase, for_s, Text(str(job["config"])))
    for launch_id, phase in _verifying(watched.folder):
        table.add_row("", launch_id.partition("-")[0], phase, "", Text(f"verification {launch_id}"))
    if free and watched.running:
        table.add_row(_ranges(sorted(free)), "", Text("idle", style="dim"), "", "")
    return _panel(table, "running now") if table.row_count else None


def _progress(folder: Path, job: Mapping[str, Any]) -> str:
    """What a launch is at, by its own word, and how many of its loads are done."""
    launch = folder / LAUNCHES_DIR / str(job["launch_id"])
    phase, points = _events(launch / EVENTS_FILE)
    try:
        loads = len(read_spec(launch / SPEC_FILE).loads)
    except (OSError, ValueError, TypeError):
        loads = 0
    done = f" ({points}/{loads} loads)" if loads else ""
    return f"{phase or job['phase']}{done}"


def _events(path: Path) -> tuple[str | None, int]:
    """The newest phase, and the points recorded."""
    try:
        events, _ = read_events(path, 0)
    except (OSError, ValueError):
        return None, 0
    phases = [e["phase"] for e in events if e["event"] == "phase"]
    points = sum(e["event"] == "record" and e["record"]["kind"] == "point" for e in events)
    return (phases[-1] if phases else None), points


def _verifying(folder: Path) -> Iterator[tuple[str, str]]:
    """Verifications that hold their lock, with what each is at."""
    for path in sorted(folder.glob(f"verifications/*/{WORKER_LOCK}")):
        with path.open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                phase, _ = _events(path.parent / EVENTS_FILE)
                yield path.parent.name, phase or "starting"


def _front(study: Study) -> RenderableType | None:
    """The front so far, best in the first objective first; the best of each objective in bold."""
    if not study.objectives or not any(p.state == "measured" for p in study.operating_points):
        return None
    points, names = front_points(study, None)
    if not points:
        return None
    shared = shared_settings(study.operating_points)
    best = {n: min(get_metric(n).sign * p.metrics[n] for p in points) for n in names}
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    table.add_column("load", no_wrap=True)
    for name in names:
        table.add_column(_SHORT.get(name, name), justify="right", no_wrap=True)
    table.add_column("configuration", no_wrap=True, overflow="ellipsis", ratio=1)
    for p in points[:_FRONT_ROWS]:
        cells = [
            Text(number_text(p.metrics[n]), style="bold" if get_metric(n).sign * p.metrics[n] == best[n] else "")
            for n in names
        ]
        table.add_row(p.load_label, *cells, Text(engine_text(p, shared)))
    more = "" if len(points) <= _FRONT_ROWS else f"; the first {_FRONT_ROWS}"
    return _panel(table, f"front so far: {plural(len(points), 'point')}{more}")


def _failures(study: Study) -> RenderableType | None:
    found = [f for f in failures(study.records) if f.points or f.cause != "interrupted"]
    if not found:
        return None
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    table.add_column("cause", no_wrap=True)
    table.add_column("points", justify="right", no_wrap=True)
    table.add_column("newest", no_wrap=True, overflow="ellipsis", ratio=1)
    for f in found[:_FAILURE_ROWS]:
        mended = f" ({f.recovered} mended)" if f.recovered else ""
        table.add_row(f.cause, f"{f.points}{mended}", Text(" ".join((f.detail or "").split())))
    return _panel(table, "did not work")


def _panel(content: RenderableType, title: str, right: str = "") -> Panel:
    return Panel(content, title=Text(title), title_align="left", subtitle=right or None, subtitle_align="right",
                 box=box.ROUNDED, border_style="dim", padding=(0, 1))  # fmt: skip


def _ranges(ids: Sequence[int]) -> str:
    """0,1,2,3,6 -> "0-3,6"."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
