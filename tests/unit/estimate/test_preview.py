"""What `sweep plan` says of the estimated front."""

from __future__ import annotations

import pytest

from sweep import compose
from sweep.config import HardwareConfig
from sweep.estimate import preview as module
from sweep.estimate.kernels import is_available
from sweep.estimate.preview import Preview, unavailable
from sweep.space.search_space import make_search_space
from sweep.study.plan import estimated_front

needs_tables = pytest.mark.skipif(not is_available(), reason="the estimate extra is not installed")


def planned(*overrides: str) -> Preview | str:
    config = compose.load_config(["model=llama33_70b", "hardware=h100x8", "search_space=dense", *overrides])
    return estimated_front(config, make_search_space(config.space, config.model, config.hardware))


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_available", lambda: False)
    assert planned() == "not available: pip install 'sweep-llm[estimate]'"


@needs_tables
def test_without_data_for_the_hardware_it_says_so() -> None:
    assert unavailable(HardwareConfig(name="cpu", device="cpu")) == "not available: no kernel data for hardware cpu"


@needs_tables
def test_the_front_is_a_trade_off_of_the_studys_own_objectives() -> None:
    found = planned("objectives=interactive", "space.params.parallel.choices=[[2,1],[4,1],[8,1]]")
    assert isinstance(found, Preview)
    assert found.objectives == ("cost_usd_per_mtok", "itl_p99_ms")
    assert 2 <= len(found.rows) <= min(8, found.front_size)
    costs, times = [row.cost_usd_per_mtok for row in found.rows], [row.tpot_ms for row in found.rows]
    assert costs == sorted(costs) and times == sorted(times, reverse=True)  # type: ignore[type-var]
    assert found.rows[0].load in found.text() and found.rows[0].engine in found.text()


@needs_tables
def test_unknown_and_infeasible_configs_are_counted_with_reasons() -> None:
    tight = "space.params.parallel.choices=[[2,1]]", "+engine.args.gpu_memory_utilization=0.85"
    found = planned(*tight, "+space.params.weights.bundles.awq={quantization: awq}")
    assert isinstance(found, Preview) and found.unknown == {"no data for quantization=awq": found.configs // 3}
    assert found.would_not_start == found.configs // 3 and "33% would run out of memory" in found.text()
