"""SLA files: the same bounds as text, per class, with target and traffic; one clear line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweep import cli
from sweep.decide.ask import Ask, ask_of, read_ask
from sweep.decide.capacity import Traffic
from sweep.decide.sla import Bound, parse_sla
from sweep.errors import SlaError

FILE = """\
bounds:
  ttft_p99: 0.5s
  quality_kl: "<=3ref"
  goodput_rps: 2
classes:
  interactive: {itl_p99: 50ms}
minimize: cost_usd_per_mtok
headroom: 0.1
confidence: 0.9
traffic: {rps: 30, peak_to_mean: 3, spare: 2}
devices: 16
price_usd_per_device_hour: 2.5
utilization: 0.6
"""


def test_everything_a_file_can_say(tmp_path: Path) -> None:
    path = tmp_path / "sla.yaml"
    path.write_text(FILE)
    assert read_ask(path) == Ask(
        parse_sla("ttft_p99_ms<=500 quality_kl<=3ref goodput_rps>=2 itl_p99_ms.interactive<=50"),
        minimize="cost_usd_per_mtok",
        headroom=0.1,
        confidence=0.9,
        traffic=Traffic(30, 3.0, spare=2),
        devices=16,
        price_usd_per_device_hour=2.5,
        utilization=0.6,
    )


@pytest.mark.parametrize(
    "data",
    [
        "ttft_p99<=0.5s",
        {"bounds": "ttft_p99<=0.5s"},
        {"bounds": ["ttft_p99_ms <= 500"]},
        {"bounds": {"ttft_p99_ms": 500}},
        {"bounds": {"ttft_p99": "500ms"}},
        {"bounds": {"ttft_p99": "≤ 0.5 s"}},
    ],
)
def test_spellings_of_one_bound(data: object) -> None:
    assert ask_of(data).sla.bounds == (Bound("ttft_p99_ms", "<=", 500.0),)


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ([], "mapping", "bounds"),
        ({}, "no bounds", "bounds"),
        ({"bound": {}}, "'bound' is unknown", "did you mean 'bounds'"),
        ({"bounds": {"tftt_p99_ms": 5}}, "unknown metric 'tftt_p99_ms'", "ttft_p99_ms"),
        ({"bounds": {"ttft_p99": 5}}, "has no unit", "ttft_p99_ms"),
        ({"bounds": {"ttft_p99_ms": True}}, "bound ttft_p99_ms is True", "number"),
        ({"bounds": {"ttft_p99_ms": ">=5"}}, "better when lower", "ttft_p99_ms<="),
        ({"classes": {"chat": 5}}, "class chat has 5", "interactive"),
        ({"bounds": {"ttft_p99_ms": 5}, "traffic": {"rsp": 3}}, "traffic is", "rps"),
        ({"bounds": {"ttft_p99_ms": 5}, "headroom": "much"}, "headroom is 'much'", "number"),
    ],
)
def test_mistakes(data: object, message: str, hint: str) -> None:
    with pytest.raises(SlaError) as error:
        ask_of(data)
    assert message in error.value.message and hint in str(error.value.hint)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SlaError, match="cannot read the SLA file"):
        read_ask(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("bounds: {ttft_p99_ms: 5")
    with pytest.raises(SlaError, match="is no YAML"):
        read_ask(tmp_path / "broken.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(SlaError, match=r"empty\.yaml: an SLA file holds a mapping"):
        read_ask(tmp_path / "empty.yaml")


def test_the_command_line_has_the_last_word() -> None:
    ask = ask_of({"bounds": {"ttft_p99_ms": 500}, "minimize": "cost_usd_per_mtok", "traffic": 10, "devices": 4})
    changed = ask.but(maximize="goodput_rps", devices=None, headroom=0.2).with_traffic(growth=1.0, spare=None)
    assert (changed.minimize, changed.maximize, changed.devices, changed.headroom) == (None, "goodput_rps", 4, 0.2)
    assert changed.traffic == Traffic(10, growth=1.0)
    with pytest.raises(SlaError, match="--peak-to-mean says nothing without a traffic"):
        Ask(ask.sla).with_traffic(peak_to_mean=2.0)


def test_a_pick_with_a_file_another_price_and_devices(
    study_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sla.yaml"
    file.write_text("bounds: {ttft_p99: 2.5s, quality_kl: 10ref}\nminimize: cost_usd_per_mtok\ntraffic: {rps: 10}\n")
    words = ["pick", str(study_dir), "--sla-file", str(file), "--json"]
    assert cli.main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["sla"] == "ttft_p99_ms<=2500 quality_kl<=0.015" and plain["capacity"]["traffic"]["mean_rps"] == 10
    assert cli.main([*words, "--price", "0.18", "--utilization", "0.5", "--growth", "1"]) == 0
    dear = json.loads(capsys.readouterr().out)
    before, after = (d["chosen"]["metrics"]["cost_usd_per_mtok"] for d in (plain, dear))
    assert after == pytest.approx(4 * before) and dear["capacity"]["price_usd_per_device_hour"] == 0.18
    assert cli.main([*words, "--devices", "1"]) == cli.EXIT_INFEASIBLE
    assert json.loads(capsys.readouterr().out)["fleet"]["extra_devices"] > 0
