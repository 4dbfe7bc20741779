"""What hours are expected to buy: more hours find more, an order by the estimate finds it sooner."""

from __future__ import annotations

import numpy as np
import pytest

from sweep.estimate.preview import Candidate
from sweep.study.forecast import forecast


def table(n: int, seed: int = 0) -> dict[str, Candidate]:
    """n configurations whose cost and latency trade off, most of them far from the front."""
    rng = np.random.default_rng(seed)
    where, behind = rng.uniform(0, 2, n), rng.exponential(1.0, n)
    return {str(i): Candidate(2, 600.0, ((float(np.exp(w + b)), float(np.exp(2 - w + b))),))
            for i, (w, b) in enumerate(zip(where, behind, strict=True))}  # fmt: skip


def test_more_hours_find_more_and_the_estimate_finds_it_sooner() -> None:
    rows = forecast(table(400), devices=8, hours=(1.0, 4.0, 1000.0))
    assert [r.launches for r in rows] == [24, 96, 400]
    for kind in ("at_random", "estimate_first"):
        shares = [getattr(r, kind) for r in rows]
        assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    assert rows[0].estimate_first > rows[0].at_random + 0.05


def test_a_maximized_objective_counts_the_other_way() -> None:
    plain = table(200)
    turned = {k: Candidate(c.devices, c.seconds, tuple((a, -1e3 / b) for a, b in c.values)) for k, c in plain.items()}
    one, other = (forecast(t, 8, hours=(2.0,))[0] for t in (plain, turned))
    assert other.estimate_first == pytest.approx(one.estimate_first, abs=0.03)


def test_nothing_estimated_is_no_forecast() -> None:
    assert forecast({}, 8) == []
