"""What a configuration costs in use, from a study on disk and at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweep.cli import EXIT_INFEASIBLE, EXIT_USER_ERROR, main
from sweep.config import CostConfig
from sweep.decide.invoice import invoice, invoices, terms_of
from sweep.decide.opened import open_study
from sweep.decide.sla import Sla, parse_sla
from sweep.errors import ConfigError
from sweep.results.points import OperatingPoint

PRICED = CostConfig(utilization=0.5, peak_to_mean=2.0, input_price_ratio=0.25, cached_input_price_ratio=0.0)


def point(load: int, rps: float, output: float, ttft_ms: float, **metrics: float) -> OperatingPoint:
    known = {"request_throughput_rps": rps, "output_throughput_tok_s": output, "ttft_p99_ms": ttft_ms,
             "total_throughput_tok_s": 5 * output}  # fmt: skip
    base: dict[str, Any] = {
        "point_id": f"c-c{load}", "config_hash": "c", "fingerprint": "f", "launch_id": "l", "devices": 2,
        "engine": {"model": "m", "args": {}, "env": {}}, "load": {"concurrency": load}, "load_label": f"c{load}",
        "params": None, "purpose": "trial", "provenance": "measured", "state": "measured",
    }  # fmt: skip
    return OperatingPoint(**base, metrics=known | metrics)


LADDER = [point(1, 1.0, 100.0, 50.0), point(8, 6.0, 500.0, 200.0, startup_s=864.0), point(64, 20.0, 2000.0, 9000.0)]


def test_the_cost_is_that_of_the_highest_load_within_the_sla_not_of_the_peak() -> None:
    found = invoice(LADDER, parse_sla("ttft_p99_ms<=500"), CostConfig(), 3.6)
    assert found is not None and found.point.load_label == "c8"
    assert found.cost == pytest.approx(4.0) and found.at_peak == pytest.approx(1.0)
    assert found.in_use == found.cost and found.total == pytest.approx(0.8)
    assert found.prices is None and found.energy_j_per_token is None
    assert invoice(LADDER, parse_sla("ttft_p99_ms<=10"), CostConfig(), 3.6) is None
    assert invoice(LADDER, parse_sla("quality_kl<=1"), CostConfig(), 3.6) is None, "a value that is missing is missed"


def test_use_prices_and_starts() -> None:
    found = invoice(LADDER, parse_sla("ttft_p99_ms<=500"), PRICED, 3.6)
    assert found is not None and found.in_use == pytest.approx(16.0)
    assert found.prices is not None and found.prices.output_usd_per_mtok == pytest.approx(16.0 / 2)  # 4 in for 1 out
    assert found.prices.input_usd_per_mtok == pytest.approx(2.0) and found.prices.cached_input_usd_per_mtok == 0
    started = invoice(LADDER, parse_sla("ttft_p99_ms<=500"), CostConfig(starts_per_day=10), 3.6)
    assert started is not None and started.in_use == pytest.approx(4.0 * 1.1)


def test_without_a_price_nothing_costs_anything_that_could_be_said() -> None:
    found = invoice(LADDER, Sla(), PRICED, None)
    assert found is not None
    assert (found.cost, found.in_use, found.at_peak, found.total, found.prices) == (None,) * 5


def test_a_study_at_once_cheapest_in_use_first(study_dir: Path) -> None:
    found = invoices(open_study(study_dir), parse_sla("ttft_p99_ms<=4000"), CostConfig(utilization=0.5))
    costs = [line.in_use for line in found.lines]
    assert costs == sorted(costs, key=lambda cost: cost or 0.0) and len(costs) + found.missed == 9
    assert all(line.cost is not None and line.in_use == pytest.approx(2 * line.cost) for line in found.lines)


def test_terms_come_from_the_study_and_from_what_is_said() -> None:
    saved = {"cost": {"utilization": 0.7, "peak_to_mean": 3.0}}
    assert terms_of(saved, utilization=0.9, margin=None) == CostConfig(utilization=0.9, peak_to_mean=3.0)
    assert terms_of({}) == CostConfig()


def test_on_the_command_line(study_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sla = ["--sla", "ttft_p99_ms<=4000"]
    assert main(["cost", str(study_dir), *sla, "--utilization", "0.7", "--peak-to-mean", "2"]) == 0
    text = capsys.readouterr().out
    assert "0.7 of that load at the peak, peak 2 x mean" in text and "int8_per_channel_weight_only" in text
    assert main(["cost", str(study_dir), *sla, "--json", "--price", "9"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["price_usd_per_device_hour"] == 9 and told["configs"][0]["cost_usd_per_mtok"] > 0
    assert main(["cost", str(study_dir), "--sla", "ttft_p99_ms<=1"]) == EXIT_INFEASIBLE
    assert "9 configs keep the SLA at no measured load" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"), [("--utilization", "0"), ("--utilization", "1.5"), ("--peak-to-mean", "0.5"),
                          ("--starts-per-day", "-1"), ("--margin", "-1")],
)  # fmt: skip
def test_terms_that_cannot_be_are_named(
    study_dir: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cost", str(study_dir), f"{option}={value}"]) == EXIT_USER_ERROR
    assert option.strip("-").replace("-", "_") in capsys.readouterr().err
    with pytest.raises(ConfigError):
        invoices(open_study(study_dir), Sla(), CostConfig(utilization=2.0))
