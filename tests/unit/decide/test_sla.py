"""SLA texts: what is understood, and one clear line for everything that is not."""

from __future__ import annotations

import pytest

from sweep.decide.sla import Bound, parse_sla
from sweep.errors import SlaError


@pytest.mark.parametrize(
    "text",
    [
        "ttft_p99_ms<=500 itl_p99_ms<=50 quality_kl<=0.02",
        "ttft_p99_ms<=500,itl_p99_ms<=50,quality_kl<=0.02",
        " ttft_p99_ms <= 500 ; itl_p99_ms <= 50 ; quality_kl <= 2e-2 ; ",
        "ttft_p99<=0.5s itl_p99<=50ms quality_kl<=0.02",
        "ttft_p99_ms<=500000us itl_p99_ms≤50 quality_kl<=.02",
        "ttft_p99_ms <= 500 ms, itl_p99_ms <= 50 ms, quality_kl<=0.02 nats/token",
    ],
)
def test_spellings_of_one_sla(text):
    assert parse_sla(text).bounds == (
        Bound("ttft_p99_ms", "<=", 500.0),
        Bound("itl_p99_ms", "<=", 50.0),
        Bound("quality_kl", "<=", 0.02),
    )


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("quality_top1_agreement>=98%", Bound("quality_top1_agreement", ">=", 0.98)),
        ("quality_top1_agreement > 0.5", Bound("quality_top1_agreement", ">", 0.5)),
        ("goodput>=3 rps", Bound("goodput_rps", ">=", 3.0)),
        ("cost<1.5$", Bound("cost_usd_per_mtok", "<", 1.5)),
        ("output_throughput>=100 tok/s", Bound("output_throughput_tok_s", ">=", 100.0)),
        ("startup_s<=90000ms", Bound("startup_s", "<=", 90.0)),
        ("preemptions<=0", Bound("preemptions", "<=", 0.0)),
    ],
)
def test_units_and_short_names(text, bound):
    assert parse_sla(text).bounds == (bound,)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "empty", "ttft_p99_ms<=500"),
        (" , ", "empty", "ttft_p99_ms<=500"),
        ("tftt_p99_ms<=3", "unknown metric 'tftt_p99_ms'", "did you mean 'ttft_p99_ms'"),
        ("ttft<=500ms", "unknown metric 'ttft'", "ttft_p99_ms"),
        ("ttft_p99_ms<=5%", "has no unit '%'", "ms"),
        ("ttft_p99_ms<=5 tok/s", "has no unit 'tok/s'", "ms"),
        ("quality_kl<=2ms", "has no unit 'ms'", "nats/token"),
        ("ttft_p99<=500", "has no unit", "ttft_p99_ms<=500"),
        ("ttft_p99_s<=0.5", "measured in ms", "ttft_p99_ms"),
        ("ttft_p99_ms>=500", "better when lower", "ttft_p99_ms<=500"),
        ("ttft_p99_ms>500", "better when lower", "ttft_p99_ms<=500"),
        ("goodput_rps<=3", "better when higher", "goodput_rps>=3"),
        ("ttft_p99_ms=500", "uses '='", "ttft_p99_ms<=500"),
        ("quality_top1_agreement>=98", "fraction", "98%"),
        ("ttft_p99_ms<=1,000", "not understood from '000'", "thousands"),
        ("ttft_p99_ms<=fast", "not understood", "metric<=number"),
        ("ttft_p99_ms<=nan", "not understood", "metric<=number"),
        ("ttft_p99_ms", "not understood", "metric<=number"),
        ("500>=ttft_p99_ms", "not understood", "metric<=number"),
        ("ttft_p99_ms<=500 ttft_p99<=0.3s", "twice", "tighter"),
        ("ttft_p99_ms<=500itl_p99_ms<=50", "not understood", "metric<=number"),
    ],
)
def test_mistakes_name_the_text_and_the_fix(text, message, hint):
    with pytest.raises(SlaError) as error:
        parse_sla(text)
    assert message in error.value.message
    assert hint in error.value.hint
    assert "\n" not in error.value.message


def test_every_metric_can_be_bounded_by_its_own_name_and_printed_back():
    from sweep.results.metrics import METRICS

    for m in METRICS.values():
        op = "<=" if m.direction == "minimize" else ">="
        sla = parse_sla(f"{m.name}{op}0.123456789")
        assert sla.bounds == (Bound(m.name, op, 0.123456789),)
        assert parse_sla(str(sla)) == sla


def test_relative_miss():
    assert Bound("ttft_p99_ms", "<=", 500.0).relative_miss(450.0) == 0.0
    assert Bound("ttft_p99_ms", "<=", 500.0).relative_miss(600.0) == pytest.approx(0.2)
    assert Bound("goodput_rps", ">=", 4.0).relative_miss(3.0) == pytest.approx(0.25)
    assert Bound("preemptions", "<=", 0.0).relative_miss(7.0) == 1.0
    assert not Bound("ttft_p99_ms", "<", 500.0).meets(500.0)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("ttft_p99.interactive<=0.5s", Bound("ttft_p99_ms.interactive", "<=", 500.0)),
        ("goodput_rps.batch>=2", Bound("goodput_rps.batch", ">=", 2.0)),
        ("quality_kl<=3ref", Bound("quality_kl", "<=", 3.0, of_reference=True)),
        ("quality_top1_agreement>=99.5%ref", Bound("quality_top1_agreement", ">=", 0.995, of_reference=True)),
    ],
)
def test_classes_and_multiples_of_the_reference(text, bound):
    sla = parse_sla(text)
    assert sla.bounds == (bound,)
    assert parse_sla(str(sla)) == sla


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("ttft_p99_ms<=2ref", "only a quality has a reference", "in ms"),
        ("quality_kl.interactive<=0.1", "has no classes", "quality_kl"),
        ("tftt_p99_ms.interactive<=1", "unknown metric 'tftt_p99_ms'", "ttft_p99_ms"),
        ("ttft_p99_ms.9x<=1", "has no classes", "ttft_p99_ms"),
    ],
)
def test_mistakes_with_classes_and_references(text, message, hint):
    with pytest.raises(SlaError) as error:
        parse_sla(text)
    assert message in error.value.message and hint in error.value.hint


def test_a_multiple_becomes_a_number_of_the_study():
    from sweep.results.points import OperatingPoint

    fields = {"config_hash": "a", "fingerprint": "f", "launch_id": "l", "engine": {"model": "m"}, "load": {},
              "load_label": "c1", "params": None, "devices": 1, "provenance": "measured",
              "state": "measured"}  # fmt: skip
    trial = OperatingPoint(point_id="t", purpose="trial", metrics={"quality_kl": 0.5}, **fields)
    defaults = OperatingPoint(point_id="b", purpose="baseline", metrics={"quality_kl": 0.0015}, **fields)
    sla = parse_sla("quality_kl<=3ref ttft_p99_ms<=5")
    assert str(sla.resolved([trial, defaults])) == "quality_kl<=0.0045 ttft_p99_ms<=5"
    with pytest.raises(SlaError, match="relative to the reference, whose quality_kl was not measured"):
        sla.resolved([trial])
