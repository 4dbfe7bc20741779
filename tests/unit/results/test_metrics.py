from __future__ import annotations

import pytest

from sweep.errors import ConfigError
from sweep.results.metrics import METRICS, PER_CLASS, get_metric


def test_a_metric_of_one_class_is_one_too() -> None:
    metric = get_metric("ttft_p99_ms.interactive")
    assert (metric.name, metric.unit, metric.direction) == ("ttft_p99_ms.interactive", "ms", "minimize")
    assert "interactive" in metric.label and "interactive" in metric.description
    assert "goodput_rps.batch" in METRICS and METRICS.get("goodput_rps.batch") is not None


def test_every_per_class_metric_is_one_of_all() -> None:
    assert set(PER_CLASS) < set(METRICS)
    assert all(METRICS[f"{name}.chat"].direction == METRICS[name].direction for name in PER_CLASS)


@pytest.mark.parametrize("name", ["cost_usd_per_mtok.chat", "goodput_rps.", "goodput_rps.a.b", "goodput.chat", ".chat"])
def test_what_has_no_classes_is_no_metric_of_one(name: str) -> None:
    assert name not in METRICS
    with pytest.raises(ConfigError, match="unknown metric"):
        get_metric(name)


def test_iteration_gives_whole_metrics_only() -> None:
    assert len(METRICS) == len(list(METRICS)) and not [name for name in METRICS if "." in name]
