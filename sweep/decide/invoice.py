"""What each configuration costs once it is in use: at the highest load that keeps the SLA, as used and as charged for.

Formulas and words: sweep.measure.cost. One line for each engine config that keeps the SLA at any measured load, the
cheapest in use first; configs that never keep it have no honest cost and are counted. What is not known is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sweep.config import CostConfig
from sweep.decide.capacity import price_of
from sweep.decide.opened import Study
from sweep.decide.sla import Sla
from sweep.decide.wording import engine_text, number_text, plural, shared_settings
from sweep.errors import ConfigError
from sweep.measure.cost import (
    TokenPrices,
    Usage,
    cost_usd_per_mtok,
    effective_cost_usd_per_mtok,
    highest_load,
    token_prices,
)
from sweep.results.points import OperatingPoint


@dataclass(frozen=True)
class Invoice:
    """Of one engine config. point: the highest load that keeps the SLA. USD per million output tokens unless named.

    cost: at that load, held all day. total: the same per million of all tokens. at_peak: at the cheapest load that was
    measured, whatever its latency: the number that is usually quoted. in_use: what arrives on the invoice.
    """

    point: OperatingPoint
    cost: float | None
    total: float | None
    at_peak: float | None
    in_use: float | None
    prices: TokenPrices | None
    energy_j_per_token: float | None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        named = {f"{name}_usd_per_mtok": getattr(self, name) for name in ("cost", "total", "at_peak", "in_use")}
        return {
            "point_id": self.point.point_id,
            "load_label": self.point.load_label,
            "engine": self.point.engine,
            **named,
            "prices": None if self.prices is None else asdict(self.prices),
            "energy_j_per_token": self.energy_j_per_token,
        }


@dataclass(frozen=True)
class Invoices:
    """Of a study under one SLA. missed: configs that keep it at no measured load."""

    sla: Sla
    terms: CostConfig
    price_usd_per_device_hour: float | None
    lines: Sequence[Invoice]
    missed: int
    shared: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "sla": str(self.sla),
            "terms": asdict(self.terms),
            "price_usd_per_device_hour": self.price_usd_per_device_hour,
            "configs": [line.to_dict() for line in self.lines],
            "configs_that_miss_the_sla": self.missed,
        }

    def text(self) -> str:
        """A table for a terminal."""
        t = self.terms
        head = f"USD per million output tokens at the highest load that keeps {self.sla or 'no bound at all'}"
        used = f"in use: {t.utilization:g} of that load at the peak, peak {t.peak_to_mean:g} x mean"
        starts = f", starts a day of one replica: {t.starts_per_day:g}" if t.starts_per_day else ""
        rows = [["load", "cost", "in use", "quoted", "all tokens", "input", "cached", "output", "J/token", "engine"]]
        for line in self.lines:
            p = line.prices
            prices = (p.input_usd_per_mtok, p.cached_input_usd_per_mtok, p.output_usd_per_mtok) if p else (None,) * 3
            cells = (line.cost, line.in_use, line.at_peak, line.total, *prices, line.energy_j_per_token)
            numbers = ["" if v is None else number_text(v) for v in cells]
            rows.append([line.point.load_label, *numbers, engine_text(line.point, self.shared)])
        rows = _without_empty_columns(rows)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        table = ["  ".join([*(c.rjust(w) for c, w in zip(r, widths, strict=False)), r[-1]]).rstrip() for r in rows]
        notes = [f"({used}{starts}; quoted: at the cheapest load measured, whatever its latency)"]
        if self.price_usd_per_device_hour is None:
            notes.append("no cost: the study has no hardware.price_usd_per_device_hour; give --price")
        if self.missed:
            notes.append(f"{plural(self.missed, 'config')} keep the SLA at no measured load")
        return "\n".join([head, *(table if self.lines else []), *notes])


def invoices(study: Study, sla: Sla, terms: CostConfig, price_usd_per_device_hour: float | None = None) -> Invoices:
    """What every config of a study costs under this SLA. price: None takes the study's own.

    Raises ConfigError for terms that cannot be.
    """
    check_terms(terms)
    price = price_usd_per_device_hour or price_of(study.config)
    points = study.operating_points
    resolved = sla.resolved(points)
    by_config: dict[str, list[OperatingPoint]] = {}
    for point in points:
        if point.state == "measured":
            by_config.setdefault(point.config_hash, []).append(point)
    found = [invoice(of_config, resolved, terms, price) for of_config in by_config.values()]
    lines = sorted((i for i in found if i is not None), key=lambda i: (i.in_use is None, i.in_use or 0.0))
    return Invoices(sla, terms, price, lines, len(found) - len(lines), shared_settings(points))


def invoice(points: Iterable[OperatingPoint], sla: Sla, terms: CostConfig, price: float | None) -> Invoice | None:
    """Of the operating points of one config; None if none keeps the SLA. A bounded metric that is missing is missed."""
    ladder = list(points)
    point = highest_load(ladder, lambda p: _keeps(p, sla))
    if point is None:
        return None
    usage = Usage(terms.utilization, terms.peak_to_mean, terms.starts_per_day)
    startup_s = point.metrics.get("startup_s")
    cost = _cost(point, price, "output_throughput_tok_s")
    quoted = [c for p in ladder if (c := _cost(p, price, "output_throughput_tok_s")) is not None]
    return Invoice(
        point=point,
        cost=cost,
        total=_cost(point, price, "total_throughput_tok_s"),
        at_peak=min(quoted, default=None),
        in_use=effective_cost_usd_per_mtok(cost, usage, startup_s),
        prices=_prices(point, price, terms, usage.factor(startup_s)),
        energy_j_per_token=point.metrics.get("energy_j_per_token"),
    )


def terms_of(config: Mapping[str, Any], **said: float | None) -> CostConfig:
    """The `cost` group of a study's resolved config, with what is said here instead; None says nothing."""
    return CostConfig(**{**config.get("cost", {}), **{k: v for k, v in said.items() if v is not None}})


def check_terms(terms: CostConfig) -> None:
    """Raises ConfigError naming the field, its value and the fix."""
    rules = (
        ("utilization", 0 < terms.utilization <= 1, "give a share above 0 and at most 1"),
        ("peak_to_mean", terms.peak_to_mean >= 1, "give 1 or more"),
        ("starts_per_day", terms.starts_per_day >= 0, "give 0 or more"),
        ("margin", terms.margin > -1, "give more than -1, for example 0.3 for 30 %"),
        ("input_price_ratio", (terms.input_price_ratio or 0) >= 0, "give 0 or more, for example 0.25"),
        ("cached_input_price_ratio", (terms.cached_input_price_ratio or 0) >= 0, "give 0 or more, for example 0.025"),
    )
    for name, holds, fix in rules:
        if not holds:
            raise ConfigError(f"cost.{name}={getattr(terms, name):g} cannot be", fix)


def _keeps(point: OperatingPoint, sla: Sla) -> bool:
    return all(b.metric in point.metrics and b.meets(point.metrics[b.metric]) for b in sla.bounds)


def _cost(point: OperatingPoint, price: float | None, throughput: str) -> float | None:
    return None if price is None else cost_usd_per_mtok(price, point.devices, point.metrics.get(throughput))


def _prices(point: OperatingPoint, price: float | None, terms: CostConfig, factor: float | None) -> TokenPrices | None:
    """Prices of the three kinds of tokens as the deployment is used; None unless the user gave a ratio."""
    total, output = (point.metrics.get(f"{kind}_throughput_tok_s") for kind in ("total", "output"))
    if price is None or factor is None or total is None or output is None or terms.input_price_ratio is None:
        return None
    cached = terms.cached_input_price_ratio
    return token_prices(
        price * point.devices * factor,
        total - output,
        output,
        point.metrics.get("prefix_cache_hit_rate", 0.0),
        input_ratio=terms.input_price_ratio,
        cached_ratio=terms.input_price_ratio if cached is None else cached,
        margin=terms.margin,
    )


def _without_empty_columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    kept = [i for i in range(len(rows[0])) if len(rows) == 1 or any(row[i] for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]
