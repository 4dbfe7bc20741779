"""Operating points with known effects and known noise, for tests of what is concluded from them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import with_intervals

COST, TTFT, KL = "cost_usd_per_mtok", "ttft_p50_ms", "quality_kl"
OBJECTIVES = [COST, TTFT, KL]
LOADS = {2: (2.0, 50.0), 8: (0.8, 120.0), 32: (0.4, 400.0)}  # concurrency: (cost, TTFT) of the defaults


def bare_point(name: str, metrics: dict[str, float], **changes: Any) -> OperatingPoint:
    """A point with these metrics and nothing else: measured once, no spread."""
    fields = {
        "point_id": name, "config_hash": name, "fingerprint": "f", "launch_id": "l",
        "engine": {"model": "m", "args": {}, "env": {}}, "load": {"concurrency": 8}, "load_label": "c8",
        "params": None, "purpose": "trial", "devices": 1, "provenance": "measured", "state": "measured",
        "n_repeats": 1, "metrics": metrics,
    }  # fmt: skip
    return OperatingPoint(**(fields | changes))


def made_point(
    args: Mapping[str, Any],
    concurrency: int,
    metrics: Mapping[str, float],
    *,
    cv: float | None = 0.01,
    repeats: int = 3,
    model: str = "models/base",
    **changes: Any,
) -> OperatingPoint:
    """A measured point. cv: coefficient of variation over its repeats; None: one measurement without any spread."""
    engine = {"model": model, "args": dict(args), "env": {}}
    identity = hashlib.sha256(json.dumps(engine, sort_keys=True).encode()).hexdigest()[:12]
    quality = {name: 0.0001 for name in metrics if name.startswith("quality_")}
    spread = {} if cv is None else {n: cv * v for n, v in metrics.items() if n not in quality}
    fields: dict[str, Any] = {
        "point_id": f"{identity}-c{concurrency}",
        "config_hash": identity,
        "fingerprint": str(metrics.get(KL)),
        "launch_id": f"l-{identity}",
        "engine": engine,
        "load": {"concurrency": concurrency},
        "load_label": f"c{concurrency}",
        "params": dict(args),
        "purpose": "trial" if args else "baseline",
        "devices": 1,
        "provenance": "measured",
        "state": "measured",
        "n_repeats": 1 if cv is None else repeats,
        "metrics": dict(metrics),
        "sd": spread,
        "quality_se": quality,
    }
    return OperatingPoint(**{**fields, **changes})


def made_grid(
    knobs: Mapping[str, Sequence[Any]],
    effect: Callable[[Mapping[str, Any], int], tuple[float, float, float]],
    *,
    cv: float | None = 0.01,
    noise: float = 0.0,
    seed: int = 0,
) -> list[OperatingPoint]:
    """Every combination of the knobs' values (None: left to vLLM) at every load.

    effect(args, concurrency) -> (factor on cost, factor on TTFT, KL). noise: CV of what is really added to a point.
    """
    rng = np.random.default_rng(seed)
    points = []
    for values in itertools.product(*knobs.values()):
        args = {name: value for name, value in zip(knobs, values, strict=True) if value is not None}
        for concurrency, (cost, ttft) in LOADS.items():
            factors = effect(args, concurrency)
            slip = np.exp(rng.normal(0, noise, 2)) if noise else np.ones(2)
            metrics = {COST: cost * factors[0] * slip[0], TTFT: ttft * factors[1] * slip[1], KL: factors[2]}
            points.append(made_point(args, concurrency, metrics, cv=cv))
    return with_intervals(points)
