"""The report: complete, offline, and safe against whatever an engine argument or a log line holds.

What it does in a browser is tested in tests/browser.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace

import pytest

import sweep
from sweep.decide.plots import Hover
from sweep.decide.report import write_report
from sweep.decide.report.payload import payload
from sweep.decide.report.summary import starting_sla
from sweep.decide.sla import Sla
from sweep.engine.engine_args import EngineConfig
from sweep.results.records import RecordStore


@pytest.fixture(scope="module")
def page(study_dir, tmp_path_factory):
    copy = shutil.copytree(study_dir, tmp_path_factory.mktemp("report") / "demo")
    return write_report(copy).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(page):
    return json.loads(re.search(r"<script type='application/json' id='study'>(.*?)</script>", page).group(1))


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


def test_every_point_is_there_with_its_command_and_its_exact_values(data, study_dir):
    study = sweep.open(study_dir)
    points = data["points"]
    assert points["id"] == list(study.points["point_id"])
    assert [i for i, f in zip(points["id"], points["front"], strict=True) if f] == list(
        study.points[study.points["on_front"]]["point_id"]
    )
    for i, p in enumerate(study.operating_points):
        assert data["configs"][points["config"][i]]["command"] == EngineConfig.from_dict(p.engine).serve_command()
        assert {m: v[i] for m, v in data["values"].items() if v[i] is not None} == {
            m: v for m, v in p.metrics.items() if m in data["values"]
        }


def test_a_missing_value_is_null_and_not_a_number(data):
    assert None in data["values"]["ttft_p99_ms"]
    assert not any(v != v for values in data["values"].values() for v in values)


def test_formats_not_shown_to_be_good_enough_may_not_be_picked_in_the_page_either(study_dir):
    study = sweep.open(study_dir)
    config = {**study.config, "quality": {"non_inferiority": {"quality_kl": 0.01}}}
    strict = replace(study, meta={**study.meta, "config": config})
    barred = {p.fingerprint for p in strict.operating_points if p.fingerprint in strict.not_shown}
    made = payload(strict, set(), None, Sla(), Hover(strict.operating_points, set()))
    assert barred and made["barred"] == list(strict.not_shown.values())
    free = payload(study, set(), None, Sla(), Hover(study.operating_points, set()))["points"]["comparable"]
    for p, before, after in zip(study.operating_points, free, made["points"]["comparable"], strict=True):
        assert after == (before and p.fingerprint not in barred)


def test_every_failure_is_there(page, study_dir):
    for failure in sweep.open(study_dir).failures.itertuples():
        assert failure.cause in page
        assert html.escape(failure.detail) in page


def test_the_first_screen_says_what_was_learned_what_to_deploy_and_how_sure(page):
    rest = html.unescape(without_plotly(page))
    assert "36 operating points of 9 engine configs measured in 13 launches" in rest
    assert "<strong>20 points</strong> on the front" in rest
    assert "lower than vLLM's defaults at their best load" in rest
    assert "2 of 31 points measured more than once" in rest
    assert "is on the front with probability" in rest
    assert "No finalist was measured again" in rest
    assert "Realism</a>:" in rest
    assert "smollm2-135m-instruct" in rest and "vllm 0.32.0" in rest


def test_it_opens_with_what_the_defaults_reach_and_they_meet_it(study_dir):
    study = sweep.open(study_dir)
    sla, origin = starting_sla(study)
    assert [b.metric for b in sla.bounds] == ["ttft_p99_ms", "quality_kl"]
    assert "vLLM’s defaults at c16" in origin
    defaults = next(p for p in study.operating_points if p.purpose == "baseline" and p.load_label == "c16")
    assert all(b.meets(defaults.metrics[b.metric]) for b in sla.bounds)


def test_every_kind_of_figure_is_there(page):
    keys = set(re.findall(r"class='figure' data-key='([^']+)'", page))
    assert keys == {
        "front-cost_usd_per_mtok-ttft_p99_ms", "front-cost_usd_per_mtok-quality_kl", "front-ttft_p99_ms-quality_kl",
        "front-3d", "front-throughput", "techniques", "technique-0", "technique-1", "knobs", "progress", "cost",
        "latency", "quality_kl", "quality_top1_agreement", "failure-map",
    }  # fmt: skip


def test_each_hover_text_is_in_the_page_once(page, data):
    for text in data["points"]["hover"]:
        assert page.count(json.dumps(text).replace("<", "\\u003c")) == 1


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
