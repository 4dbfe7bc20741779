"""The report in a real headless Chromium: it decides as sweep does, answers to hands, and asks for nothing."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chromium
import pytest
from example_study import write_study

import sweep
from sweep.decide.answer import PickResult
from sweep.decide.pick import pick
from sweep.decide.report import write_report
from sweep.decide.sla import Bound, Sla
from sweep.engine.engine_args import EngineConfig
from sweep.results.metrics import get_metric
from sweep.results.records import PointRecord, to_json

pytestmark = pytest.mark.skipif(
    chromium.EXECUTABLE is None,
    reason="no Chromium on PATH: apt-get install chromium (.ci/run does)",
)
COPIES = 103  # of the 49 points of the example study


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study with its report."""
    folder = write_study(tmp_path_factory.mktemp("browser") / "demo")
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def large(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same study with over 5,000 points: every point at further loads, each with values of its own."""
    large = tmp_path_factory.mktemp("browser") / "large"
    shutil.copytree(folder, large)
    rng = random.Random(5)
    records = sweep.open(folder).records
    lines = [to_json(r) for r in records]
    for number in range(1, COPIES):
        for r in records:
            if isinstance(r, PointRecord) and r.repeat == 0 and not r.transient:
                load = {**r.load, "concurrency": 100 * r.load["concurrency"] + number}
                metrics = {k: v if v is None else v * rng.uniform(0.8, 1.25) for k, v in r.metrics.items()}
                lines.append(to_json(replace(r, load=load, load_label=f"c{load['concurrency']}", metrics=metrics)))
    (large / "records.jsonl").write_text("\n".join(lines) + "\n")
    write_report(large)
    return large


def in_browser(script: Callable[[chromium.Page], Awaitable[None]], report: Path, width: int = 1280) -> None:
    """Open a report, run the script on it, and see that nothing complained and nothing was fetched."""

    async def run() -> None:
        async with chromium.browser(width) as page:
            await page.open(report)
            await script(page)
            assert page.errors == []
            asked = [url for url in page.requested if not url.startswith(("data:", "blob:"))]
            assert asked == [report.resolve().as_uri()], "the page itself and nothing else"

    asyncio.run(run())


def some_slas(study: sweep.Study, count: int, seed: int = 1) -> list[tuple[str, Sla]]:
    """Targets and bounds of all tightnesses: measured values themselves, values between, impossible ones."""
    rng = random.Random(seed)
    names = ["cost_usd_per_mtok", "ttft_p99_ms", "itl_p99_ms", "quality_kl", "output_throughput_tok_s"]
    slas = []
    for _ in range(count):
        target, *bounded = rng.sample(names, rng.randint(1, 4))
        bounds = []
        for name in bounded:
            values = [p.metrics[name] for p in study.operating_points if name in p.metrics]
            op = "<=" if get_metric(name).sign > 0 else ">="
            bounds.append(Bound(name, op, rng.choice(values) * rng.choice([1, 1, 1.1, 0.5])))
        slas.append((target, Sla(tuple(bounds))))
    return slas


def answer_of_sweep(study: sweep.Study, target: str, sla: Sla) -> dict[str, Any]:
    goal = {"minimize": target} if get_metric(target).sign > 0 else {"maximize": target}
    found = pick(study.operating_points, sla, **goal)
    if isinstance(found, PickResult):
        return {
            "chosen": found.chosen.point_id,
            "feasible": found.n_feasible,
            "ties": sorted(p.point_id for p in found.ties),
        }
    return {"nearest": found.nearest.point_id, "misses": [m.relative for m in found.misses]}


ANSWER_OF_PAGE = """(bounds, target) => {
  const found = sweepReport.pick(bounds, target), ids = sweepReport.study.points.id;
  return found.chosen !== undefined
    ? {chosen: ids[found.chosen], feasible: found.feasible.length, ties: found.ties.map(i => ids[i]).sort()}
    : {nearest: ids[found.nearest], misses: found.misses};
}"""


@pytest.mark.parametrize("which", ["folder", "large"])
def test_the_page_picks_what_sweep_picks(which: str, request: pytest.FixtureRequest) -> None:
    study = sweep.open(request.getfixturevalue(which))
    slas = some_slas(study, 150 if which == "folder" else 12)
    expected = [answer_of_sweep(study, target, sla) for target, sla in slas]
    assert {"chosen", "nearest"} <= {key for answer in expected for key in answer}, "both kinds are tried"
    asked = [[[{"metric": b.metric, "op": b.op, "value": b.value} for b in sla.bounds], target] for target, sla in slas]

    async def script(page: chromium.Page) -> None:
        got = await page.run(f"{json.dumps(asked)}.map(([b, t]) => ({ANSWER_OF_PAGE})(b, t))")
        for (target, sla), ours, theirs in zip(slas, expected, got, strict=True):
            misses = ours.pop("misses", None)
            assert theirs.pop("misses", None) == (None if misses is None else pytest.approx(misses)), (target, str(sla))
            assert theirs == ours, (target, str(sla))

    in_browser(script, study.path / "report.html")


def test_a_slider_moved_by_hand_changes_the_pick_and_the_figure(folder: Path) -> None:
    study = sweep.open(folder)

    async def script(page: chromium.Page) -> None:
        shown = "document.getElementById('pick').dataset.point"
        await page.run("document.getElementById('no-bounds').click()")
        assert await page.run(shown) == study.pick().chosen.point_id
        await page.run("document.getElementById('slider-ttft_p99_ms').focus()")
        for _ in range(12):
            await page.press("ArrowLeft", 37)
        bound = float(await page.run("document.querySelector('#slider-ttft_p99_ms + .bound input').value"))
        expected = study.pick(f"ttft_p99_ms<={bound}").chosen
        assert await page.run(shown) == expected.point_id != study.pick().chosen.point_id
        command = EngineConfig.from_dict(expected.engine).serve_command()
        assert await page.run("document.querySelector('#pick pre').textContent") == command
        text = await page.run("document.getElementById('pick').innerText")
        assert f'--sla "ttft_p99_ms<={bound:g}"' in text
        plot = "document.querySelector('.panels figure:not([hidden]) .plot')"
        await page.until(f"{plot}.data && {plot}.data.at(-1).x[0] === {expected.metrics['cost_usd_per_mtok']!r}")
        kept = await page.run(f"{plot}.data.flatMap(t => t.selectedpoints ?? []).length")
        comparable = {"cost_usd_per_mtok", "ttft_p99_ms"}
        points = [p for p in study.operating_points if comparable <= set(p.metrics)]
        assert kept == sum(p.metrics["ttft_p99_ms"] <= bound for p in points) < len(points)

    in_browser(script, folder / "report.html")


def test_an_sla_nothing_meets_names_the_nearest(folder: Path) -> None:
    study = sweep.open(folder)

    async def script(page: chromium.Page) -> None:
        await page.run(
            "(() => { document.getElementById('no-bounds').click();"
            "const f = document.querySelector('#slider-ttft_p99_ms + .bound input');"
            "f.value = 1; f.dispatchEvent(new Event('change')); })()"
        )
        assert await page.run("document.getElementById('pick').className") == "infeasible"
        nearest = await page.run("document.getElementById('pick').dataset.nearest")
        assert nearest == study.pick("ttft_p99_ms<=1").nearest.point_id
        assert "missed by" in await page.run("document.getElementById('pick').innerText")

    in_browser(script, folder / "report.html")


def test_a_click_on_a_point_copies_its_command(folder: Path) -> None:
    study = sweep.open(folder)

    async def script(page: chromium.Page) -> None:
        await page.run("(() => { window.copied = null; document.execCommand = () => { window.copied ="
                       " document.querySelector('textarea').value; return true; };"
                       "navigator.clipboard.writeText = async text => { window.copied = text; }; })()")  # fmt: skip
        await page.until("document.querySelector('.panels .plot .main-svg')")
        await page.run("document.querySelector('.panels').scrollIntoView()")
        place = await page.run(
            "(() => { const plot = document.querySelector('.panels figure:not([hidden]) .plot');"
            "const {xaxis, yaxis} = plot._fullLayout, box = plot.getBoundingClientRect();"
            "const {values, points} = sweepReport.study, i = points.front.lastIndexOf(true);"
            "const [x, y] = plot.closest('figure').dataset.axes.split(' ').map(name => values[name][i]);"
            "return {x: box.x + xaxis._offset + xaxis.c2p(x), y: box.y + yaxis._offset + yaxis.c2p(y)}; })()"
        )
        await page.click(place["x"], place["y"])
        await page.until("window.copied")
        commands = {EngineConfig.from_dict(p.engine).serve_command() for p in study.operating_points}
        assert await page.run("window.copied") in commands
        assert (await page.run("document.getElementById('toast').textContent")).startswith("Copied: the vllm serve")
        assert await page.run("window.copied") in await page.run("document.getElementById('detail').textContent")

    in_browser(script, folder / "report.html")


def test_the_table_sorts_and_filters_thousands_of_rows_and_draws_few(large: Path) -> None:
    study = sweep.open(large)
    assert len(study.operating_points) > 5000

    async def script(page: chromium.Page) -> None:
        rows = "document.querySelectorAll('#table tbody tr[data-point]')"
        assert await page.run(f"{rows}.length") < 100
        column = await page.run(
            "[...document.querySelectorAll('#table th')].findIndex(h => h.textContent.startsWith('TTFT p99'))"
        )
        await page.run(f"document.querySelectorAll('#table th button')[{column}].click()")
        first = await page.run(f"sweepReport.study.points.id[{rows}[0].dataset.point]")
        fastest = min(
            (p for p in study.operating_points if "ttft_p99_ms" in p.metrics), key=lambda p: p.metrics["ttft_p99_ms"]
        )
        assert first == fastest.point_id
        await page.run(
            "(() => { const f = document.getElementById('filter'); f.value = 'kv_cache_dtype=fp8 c8 ttft_p99_ms<2000';"
            "f.dispatchEvent(new Event('input')); })()"
        )
        wanted = [
            p for p in study.operating_points
            if p.engine["args"].get("kv_cache_dtype") == "fp8" and p.load_label == "c8"
            and p.metrics.get("ttft_p99_ms", 1e9) < 2000
        ]  # fmt: skip
        count = await page.run("document.getElementById('rows').textContent")
        assert count.startswith(f"{len(wanted):,} of ") and wanted
        assert await page.run("performance.getEntriesByName('sweep-ready')[0].startTime") < 20_000

    in_browser(script, large / "report.html")


@pytest.fixture(scope="module")
def hostile(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small study with an engine argument and a cause that want to be a script."""
    hostile = shutil.copytree(folder, tmp_path_factory.mktemp("browser") / "hostile")
    evil = "<img src=x onerror='window.evil=1'></script><script>window.evil=2</script>"
    records = hostile / "records.jsonl"
    lines = records.read_text().replace("int8_per_channel_weight_only", evil).replace("proof_failed", evil)
    records.write_text(lines)
    write_report(hostile)
    return hostile


@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_draws_within_the_window_and_hostile_text_does_nothing(hostile: Path, width: int) -> None:
    async def script(page: chromium.Page) -> None:
        await page.run("document.querySelectorAll('figure[data-key]').forEach(f => f.closest('.panels') || draw(f))")
        await page.until(
            "[...document.querySelectorAll('figure[data-key]')]"
            ".every(f => f.closest('.panels') || f.querySelector('.main-svg'))"
        )
        for tab in range(await page.run("document.querySelectorAll('[role=tab]').length")):
            await page.run(f"document.querySelectorAll('[role=tab]')[{tab}].click()")
            await page.until("document.querySelector('.panels figure:not([hidden]) .plot')._fullData?.length")
        await page.run("document.querySelector('#table tr.lost').click()")
        assert await page.run("document.documentElement.scrollWidth") <= width
        assert await page.run("window.evil === undefined && !document.querySelector('img')")

    in_browser(script, hostile / "report.html", width)
