"""How numbers, loads and engine configs are said to a person, the same in terminal, figures and report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint, cell, settings


def number_text(value: float) -> str:
    """Four significant digits, thousands grouped: 0.4123, 56.2, 1,203."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def value_text(name: str, value: float | None, sd: float | None = None) -> str:
    """A metric's value with unit and, where repeated, its standard deviation: "512 ± 9 ms"."""
    if value is None:
        return "not measured"
    unit = get_metric(name).unit
    if unit == "fraction":
        value, sd, unit = 100 * value, None if sd is None else 100 * sd, "%"
    spread = "" if sd is None else f" ± {sd:.2g}"
    return f"{number_text(value)}{spread} {unit}"


def point_value_text(point: OperatingPoint, name: str) -> str:
    """value_text of one metric of one point."""
    return value_text(name, point.metrics.get(name), point.sd.get(name))


def load_text(load: Mapping[str, Any]) -> str:
    """In words: "8 concurrent requests" or "2 requests/s" with its burstiness where arrivals are not Poisson."""
    concurrency, rate = load.get("concurrency"), load.get("request_rate_rps")
    if rate is None:
        return "1 request at a time" if concurrency == 1 else f"{concurrency} concurrent requests"
    burstiness = load.get("burstiness", 1.0)
    bursts = "" if burstiness in (None, 1.0) else f", burstiness {number_text(burstiness)}"
    limit = "" if concurrency is None else f", at most {concurrency} concurrent"
    return f"{number_text(rate)} requests/s{bursts}{limit}"


def shared_settings(points: Iterable[OperatingPoint]) -> dict[str, Any]:
    """Settings that every point has with the same value: what need not be said for each of them."""
    shared: dict[str, Any] | None = None
    for point in points:
        own = settings(point.engine)
        shared = own if shared is None else {k: v for k, v in shared.items() if k in own and own[k] == v}
    return shared or {}


def engine_items(engine: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
    """Settings that are not in shared as "name=value", in a fixed order."""
    return setting_items({k: v for k, v in settings(engine).items() if k not in shared})


def setting_items(values: Mapping[str, Any]) -> list[str]:
    """Settings as "name=value", the prefixes args. and env. left out."""
    items = []
    for name, value in values.items():
        short, value = name.removeprefix("args.").removeprefix("env."), cell(value)
        items.append(f"{short}={value if isinstance(value, str) else json.dumps(value)}")
    return items


def engine_text(point: OperatingPoint, shared: Mapping[str, Any]) -> str:
    """One line that tells this point's engine config from the others of its study."""
    if items := engine_items(point.engine, shared):
        return " ".join(items)
    return "vLLM's defaults" if point.purpose == "baseline" else "no arguments of its own"


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 point", "3 points", "2 launches"."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count} {noun}{ending}"
