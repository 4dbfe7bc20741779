"""Replicas, devices and money for a traffic: every formula against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_study import PRICE_USD_PER_HOUR
from hypothesis import given
from hypothesis import strategies as st

from sweep import cli
from sweep.decide.capacity import HOURS_PER_MONTH, Traffic, capacity, price_of
from sweep.decide.opened import open_study
from sweep.errors import SlaError
from sweep.results.points import OperatingPoint

POINT = OperatingPoint(
    point_id="p", config_hash="c", fingerprint="f", launch_id="l", engine={"model": "m", "args": {}, "env": {}},
    load={"concurrency": 8}, load_label="c8", params=None, purpose="trial", devices=2, provenance="measured",
    state="measured", n_repeats=1, metrics={"request_throughput_rps": 4.0, "output_throughput_tok_s": 800.0},
)  # fmt: skip


def test_the_formulas():
    c = capacity(POINT, Traffic(30, peak_to_mean=2, growth=1.2, spare=1), 2.5)
    assert c.traffic.peak_rps == 72
    assert c.replicas == 72 / 4 + 1 == 19
    assert c.devices == 38
    assert c.cost_usd_per_month == pytest.approx(2.5 * 38 * 730)
    assert c.utilization == pytest.approx(30 / (19 * 4))
    # 30 requests/s x 200 tokens are 21.6 million tokens an hour, for 95 USD.
    assert c.cost_usd_per_mtok_at_mean == pytest.approx(2.5 * 38 / 21.6)
    assert c.missing == ()
    assert 12 * HOURS_PER_MONTH - 365 * 24 == 0


def test_a_quotient_that_is_whole_is_not_rounded_up():
    point = replace(POINT, metrics={**POINT.metrics, "request_throughput_rps": 0.9})
    assert capacity(point, Traffic(30, 2, 1.2, 0), 1.0).replicas == 80
    assert capacity(point, Traffic(30.01, 2, 1.2, 0), 1.0).replicas == 81


def test_at_full_load_it_costs_what_was_measured():
    point = replace(POINT, metrics={**POINT.metrics, "cost_usd_per_mtok": 2.5 * 2 / (3600 * 800) * 1e6})
    c = capacity(point, Traffic(40, 1, 1, 0), 2.5)
    assert c.utilization == 1
    assert c.cost_usd_per_mtok_at_mean == pytest.approx(point.metrics["cost_usd_per_mtok"])


@pytest.mark.parametrize("metrics", [{}, {"request_throughput_rps": 0.0, "output_throughput_tok_s": 800.0}])
def test_without_a_throughput_nothing_is_a_number(metrics):
    c = capacity(replace(POINT, metrics=metrics), Traffic(30), 2.5)
    assert c.replicas is c.devices is c.cost_usd_per_month is c.utilization is c.cost_usd_per_mtok_at_mean is None
    assert "request throughput of this point was not measured" in "\n".join(c.text_lines())


@pytest.mark.parametrize("price", [None, 0.0])
def test_without_a_price_replicas_are_known_and_cost_is_not(price):
    c = capacity(POINT, Traffic(30), price)
    assert c.replicas == 19
    assert c.cost_usd_per_month is c.cost_usd_per_mtok_at_mean is None
    text = "\n".join(c.text_lines())
    assert "price_usd_per_device_hour" in text
    assert "USD a month" not in text


def test_without_output_tokens_only_their_price_is_missing():
    c = capacity(replace(POINT, metrics={"request_throughput_rps": 4.0}), Traffic(30), 2.5)
    assert c.cost_usd_per_month is not None
    assert c.cost_usd_per_mtok_at_mean is None
    assert any("million output tokens" in text for text in c.missing)


@pytest.mark.parametrize(
    "values",
    [{"mean_rps": 0}, {"mean_rps": float("nan")}, {"mean_rps": 1, "peak_to_mean": 0.5}, {"mean_rps": 1, "growth": 0},
     {"mean_rps": 1, "spare": -1}, {"mean_rps": float("inf")}],
)  # fmt: skip
def test_traffic_that_cannot_be(values):
    with pytest.raises(SlaError, match="is not"):
        Traffic(**values)


@given(
    st.floats(0.01, 1000), st.floats(1, 5), st.floats(0.5, 3), st.integers(0, 3), st.floats(0.1, 50), st.integers(1, 8)
)
def test_the_peak_fits_and_one_replica_fewer_would_not_carry_it(rps, peak, growth, spare, throughput, devices):
    point = replace(POINT, devices=devices, metrics={"request_throughput_rps": throughput})
    traffic = Traffic(rps, peak, growth, spare)
    c = capacity(point, traffic, 1.0)
    serving = c.replicas - spare
    assert serving * throughput >= traffic.peak_rps * (1 - 1e-6)
    assert serving == 1 or (serving - 1) * throughput < traffic.peak_rps
    assert c.devices == c.replicas * devices


# ---------------------------------------------------------------- in a pick


def test_a_pick_carries_it_in_words_and_in_json(study_dir):
    study = open_study(study_dir)
    assert price_of(study.config) == PRICE_USD_PER_HOUR
    result = study.pick("ttft_p99_ms<=2500 quality_kl<=0.01", traffic=Traffic(30))
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))["capacity"]
    assert data["replicas"] == result.capacity.replicas
    assert data["traffic"] == {"mean_rps": 30, "peak_to_mean": 2.0, "growth": 1.2, "spare": 1}
    assert data["peak_rps"] == 72
    assert f"{result.capacity.replicas} x 730 h" in result.text()
    assert study.pick("ttft_p99_ms<=2500", traffic=30).capacity.traffic == Traffic(30)
    assert study.pick("ttft_p99_ms<=2500").to_dict()["capacity"] is None


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_line(study_dir: Path, capsys):
    sla = ["--sla", "ttft_p99_ms<=2500 quality_kl<=0.01"]
    status, out, _ = run(capsys, "pick", study_dir, *sla, "--traffic-rps", 30, "--spare", 2, "--growth", 1, "--json")
    assert status == 0
    assert json.loads(out)["capacity"]["traffic"] == {"mean_rps": 30, "peak_to_mean": 2.0, "growth": 1.0, "spare": 2}
    status, out, _ = run(capsys, "pick", study_dir, *sla, "--headroom", 0.1, "--confidence", 0.9)
    assert status == 0
    assert "with 10 % headroom and confidence 0.9" in out
    status, _, err = run(capsys, "pick", study_dir, *sla, "--growth", 2)
    assert status == 2
    assert "add --traffic-rps" in err
    status, _, err = run(capsys, "pick", study_dir, *sla, "--confidence", 2)
    assert status == 2
    assert "confidence=2" in err
