from __future__ import annotations

import pytest

from sweep.measure.cost import cost_usd_per_mtok


def test_one_device_hour_at_1000_tokens_a_second_makes_3_6_million_tokens() -> None:
    assert cost_usd_per_mtok(3.6, 1, 1000.0) == pytest.approx(1.0)
    assert cost_usd_per_mtok(3.6, 8, 1000.0) == pytest.approx(8.0)


def test_no_throughput_has_no_cost() -> None:
    assert cost_usd_per_mtok(3.6, 1, None) is None
    assert cost_usd_per_mtok(3.6, 1, 0.0) is None
