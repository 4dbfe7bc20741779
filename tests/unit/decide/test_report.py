"""The report: complete, offline, and safe against whatever an engine argument or a log line holds."""

from __future__ import annotations

import html
import re
import shutil

import pytest

import sweep
from sweep.decide.report import write_report
from sweep.engine.engine_args import EngineConfig
from sweep.results.records import RecordStore


@pytest.fixture(scope="module")
def page(study_dir, tmp_path_factory):
    copy = shutil.copytree(study_dir, tmp_path_factory.mktemp("report") / "demo")
    return write_report(copy).read_text(encoding="utf-8")


def without_plotly(page: str) -> str:
    """The page without the inlined library, whose source has addresses it never loads here."""
    from plotly.offline import get_plotlyjs

    assert page.count(get_plotlyjs()) == 1, "the library is inlined exactly once"
    return page.replace(get_plotlyjs(), "")


def test_nothing_is_loaded_from_anywhere(page):
    rest = without_plotly(page)
    assert not re.search(r"""(src|href)\s*=\s*['"]?\s*(https?:|//|file:)""", rest)
    assert "@import" not in rest
    assert "url(" not in rest
    assert "default-src 'none'" in rest, "and the browser is told to forbid it"


def test_every_front_point_and_its_command_is_there(page, study_dir):
    study = sweep.open(study_dir)
    on_front = [p for p in study.operating_points if p.point_id in set(study.front()["point_id"])]
    assert len(on_front) == 20
    table = page[page.index("id='table-front'") :]
    table = table[: table.index("</table>")]
    for p in on_front:
        assert f"<code>{p.point_id}</code>" in table
        assert f"<pre>{html.escape(EngineConfig.from_dict(p.engine).serve_command())}</pre>" in page


def test_every_point_and_every_failure_is_there(page, study_dir):
    study = sweep.open(study_dir)
    table = page[page.index("id='table-all'") :]
    table = table[: table.index("</table>")]
    assert table.count("<tr class=") == len(study.points)
    for failure in study.failures.itertuples():
        assert failure.cause in page
        assert html.escape(failure.detail) in page


def test_the_headline_compares_with_the_defaults(page):
    rest = without_plotly(page)
    assert "36 operating points of 9 engine configs measured in 13 launches" in rest
    assert "<strong>20 points</strong> on the front" in rest
    assert "lower than vLLM's defaults at their best load" in html.unescape(rest)
    assert "smollm2-135m-instruct" in rest
    assert "vllm 0.32.0" in rest


def test_missing_values_are_dashes_and_not_numbers(page):
    rest = without_plotly(page)
    assert "<td class='number'>–</td>" in rest
    assert "nan" not in re.sub(r"<[^>]*>", " ", rest[rest.index("id='table-all'") :]).lower().split()


def test_hostile_text_stays_text(study_dir, tmp_path):
    copy = shutil.copytree(study_dir, tmp_path / "hostile")
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    records = copy / "records.jsonl"
    lines = records.read_text().replace("int8_per_channel_weight_only", evil).replace("proof_failed", evil)
    records.write_text(lines)
    assert any(evil in str(r) for r in RecordStore(copy).read())
    text = write_report(copy).read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<img" not in without_plotly(text)
    assert html.escape(evil) in text


def test_a_study_without_points_has_a_report(empty_study_dir):
    text = write_report(empty_study_dir).read_text(encoding="utf-8")
    assert "none measured yet" in text
    assert not list(empty_study_dir.glob("*.part"))
