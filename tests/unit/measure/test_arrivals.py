from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.errors import ConfigError
from sweep.measure.arrivals import Load, arrivals_s, build_ladder, warmup_arrivals_s

rates = st.floats(0.1, 500)


@given(rates, st.floats(0.5, 3.0), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_arrivals_have_the_rate_and_the_variation_asked(rate: float, cv: float, seed: int) -> None:
    (load,) = build_ladder({"request_rate_rps": [rate], "cv": cv}, None)
    n = 20_000
    for times in (f(load, n, np.random.default_rng(seed)) for f in (arrivals_s, warmup_arrivals_s)):
        gaps = np.diff(times, prepend=0.0)
        assert gaps.min() >= 0
        assert gaps.mean() == pytest.approx(1 / rate, rel=6 * cv / n**0.5)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15)


@given(rates, rates, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_ramp_goes_from_one_rate_to_the_other(first: float, last: float, seed: int) -> None:
    n = 20_000
    times = arrivals_s(Load(None, last, ramp_from_rps=first), n, np.random.default_rng(seed))
    assert (np.diff(times) >= 0).all()
    duration_s = 2 * n / (first + last)
    assert times[-1] == pytest.approx(duration_s, abs=6 * n**0.5 / last)
    for share in (0.25, 0.5, 0.75):  # requests until then: the area under the line
        expected = (first * share + (last - first) * share**2 / 2) * duration_s
        assert np.searchsorted(times, share * duration_s) == pytest.approx(expected, abs=6 * n**0.5)
    warmup = warmup_arrivals_s(Load(None, last, ramp_from_rps=first), n, np.random.default_rng(seed))
    assert warmup[-1] == pytest.approx(n / first, rel=0.05)


LADDER: dict[str, Any] = {"concurrency": [1, 8, 8, 4], "request_rate_rps": [1, 2], "rate_scale": [0.5, 1, 2]}


def test_the_ladder_is_busiest_first_and_knows_the_rates_of_a_trace() -> None:
    ladder = build_ladder(LADDER, trace_rate_rps=3.0)
    assert [load.label for load in ladder] == ["c8", "c4", "c1", "r2", "r1", "x2", "x1", "x0.5"]
    assert [load.request_rate_rps for load in ladder if load.rate_scale] == [6.0, 3.0, 1.5]


def test_labels_are_distinct_and_loads_survive_a_dict() -> None:
    loads = [
        Load(8), Load(None, 2), Load(None, 0.5), Load(None, 2.0, 0.25), Load(None, 8.0, 1.0, 1.0),
        Load(None, 8.0, 1.3**-2, 1.0), Load(None, 2.8, rate_scale=0.5),
    ]  # fmt: skip
    assert [load.label for load in loads] == ["c8", "r2", "r0.5", "r2cv2", "r1to8", "r1to8cv1.3", "x0.5"]
    assert [Load.from_dict(load.to_dict()) for load in loads] == loads


@pytest.mark.parametrize(
    ("loads", "named", "fix"),
    [
        ({"concurrency": [0]}, "workload.loads.concurrency=0", "at least 1"),
        ({"request_rate_rps": [-1.0]}, "workload.loads.request_rate_rps=-1.0", "above 0"),
        ({"request_rate_rps": [2.0], "burstiness": 0}, "workload.loads.burstiness=0", "Poisson"),
        ({"request_rate_rps": [2.0], "cv": 0}, "workload.loads.cv=0", "Poisson"),
        ({"request_rate_rps": [2.0], "cv": 2.0, "burstiness": 0.5}, "workload.loads.cv=2.0", "not both"),
        ({"request_rate_rps": [2.0], "ramp_from_rps": 0}, "workload.loads.ramp_from_rps=0", "above 0"),
        ({"rate_scale": [0.5, -1]}, "workload.loads.rate_scale=-1", "above 0"),
        ({"rates": [2.0]}, "workload.loads.rates", "request_rate_rps"),
    ],
)
def test_mistakes_name_field_value_and_fix(loads: dict[str, Any], named: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_ladder(loads, trace_rate_rps=1.0)
    assert named in error.value.message and fix in (error.value.hint or "")


def test_scaling_a_trace_needs_a_trace() -> None:
    with pytest.raises(ConfigError, match="needs a trace with arrival times") as error:
        build_ladder({"rate_scale": [1]}, None)
    assert "workload.trace.file=" in (error.value.hint or "")


def test_a_load_is_closed_or_open_never_both() -> None:
    for concurrency, rate in ((None, None), (3, 2.0)):
        with pytest.raises(ConfigError, match="exactly one"):
            Load(concurrency, rate)
