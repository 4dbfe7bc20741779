"""What a person asks of a pick, as a YAML file that can be kept beside the service it is for:

bounds:                       # or one text: "ttft_p99<=0.5s quality_kl<=3ref"
  ttft_p99: 0.5s              # the side that is better is understood; "<=0.5s" says it
  quality_kl: 3ref
classes:                      # bounds on one request class of the workload
  interactive: {ttft_p99: 500ms, itl_p99: 50ms}
minimize: cost_usd_per_mtok   # or maximize
headroom: 0.1
confidence: 0.9
traffic: {rps: 30, peak_to_mean: 2, growth: 1.2, spare: 1}
devices: 16                   # that there are, for this traffic
price_usd_per_device_hour: 2.5
utilization: 0.6
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from sweep.decide.capacity import Traffic
from sweep.decide.sla import Sla, find_metric, parse_sla
from sweep.errors import SlaError, did_you_mean

_EXAMPLE = "for example: bounds: {ttft_p99_ms: 500, quality_kl: 0.02}"
_TRAFFIC = {"rps": "mean_rps", "peak_to_mean": "peak_to_mean", "growth": "growth", "spare": "spare"}
_NUMBERS = ("headroom", "confidence", "devices", "price_usd_per_device_hour", "utilization")


@dataclass(frozen=True)
class Ask:
    """Bounds and target of a pick, and all else that decides it. None: not said. Fields as in opened.Study.pick."""

    sla: Sla
    minimize: str | None = None
    maximize: str | None = None
    headroom: float | None = None
    confidence: float | None = None
    traffic: Traffic | None = None
    devices: int | None = None
    price_usd_per_device_hour: float | None = None
    utilization: float | None = None

    def but(self, **said: Any) -> Ask:
        """The same with what is said here instead; None says nothing. One target replaces the other."""
        changes = {name: value for name, value in said.items() if value is not None}
        for one, other in (("minimize", "maximize"), ("maximize", "minimize")):
            if one in changes:
                changes.setdefault(other, None)
        return replace(self, **changes)

    def with_traffic(self, **said: float | None) -> Ask:
        """The same with fields of its Traffic said anew. Raises SlaError if there is no traffic to change."""
        changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        if not changes:
            return self
        if self.traffic is None and "mean_rps" not in changes:
            name = next(iter(changes)).replace("_", "-")
            raise SlaError(f"--{name} says nothing without a traffic", "add --traffic-rps")
        traffic = Traffic(**changes) if self.traffic is None else replace(self.traffic, **changes)
        return replace(self, traffic=traffic)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of opened.Study.pick."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"headroom": self.headroom or 0.0}


def read_ask(path: str | Path) -> Ask:
    """Read such a file. Raises SlaError naming the file, the field and the fix."""
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SlaError(f"cannot read the SLA file '{path}': {error}", "name an existing YAML file") from error
    except yaml.YAMLError as error:
        raise SlaError(f"{path} is no YAML: {' '.join(str(error).split())}", _EXAMPLE) from error
    try:
        return ask_of(data)
    except SlaError as error:
        raise SlaError(f"{path}: {error.message}", error.hint) from error


def ask_of(data: Any) -> Ask:
    """The same from plain data: a mapping as above, or one SLA text."""
    if isinstance(data, str):
        return Ask(parse_sla(data))
    if not isinstance(data, Mapping):
        raise SlaError("an SLA file holds a mapping", _EXAMPLE)
    known = ["bounds", "classes", *(f.name for f in fields(Ask) if f.name != "sla")]
    for name in data:
        if name not in known:
            raise SlaError(f"'{name}' is unknown", did_you_mean(str(name), known))
    texts = [*_texts(data.get("bounds"), ""), *_class_texts(data.get("classes") or {})]
    if not texts:
        raise SlaError("no bounds are given", _EXAMPLE)
    numbers = {name: _number(name, data[name]) for name in _NUMBERS if data.get(name) is not None}
    if "devices" in numbers:
        numbers["devices"] = int(numbers["devices"])
    traffic = None if data.get("traffic") is None else _traffic(data["traffic"])
    target = {name: str(data[name]) for name in ("minimize", "maximize") if data.get(name) is not None}
    return Ask(parse_sla(" ; ".join(texts))).but(traffic=traffic, **target, **numbers)


def _texts(bounds: Any, request_class: str) -> Iterator[str]:
    """Bounds as SLA texts: a text as it is, a list item by item, a mapping name by name."""
    if isinstance(bounds, str) and not request_class:
        yield bounds
    elif isinstance(bounds, list) and all(isinstance(b, str) for b in bounds) and not request_class:
        yield from bounds
    elif isinstance(bounds, Mapping):
        for name, value in bounds.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise SlaError(f"bound {name} is {value!r}", f"give a number with its unit, {_EXAMPLE}")
            full = f"{name}.{request_class}" if request_class else str(name)
            better = "<=" if find_metric(full, f"{full}: {value}").direction == "minimize" else ">="
            said = str(value).strip()
            yield f"{full}{said}" if said[:1] in "<>=≤≥" else f"{full}{better}{said}"
    elif bounds is not None:
        raise SlaError(f"bounds are {bounds!r}", _EXAMPLE)


def _class_texts(classes: Any) -> Iterator[str]:
    if not isinstance(classes, Mapping):
        raise SlaError(f"classes are {classes!r}", "for example: classes: {interactive: {ttft_p99_ms: 500}}")
    for name, bounds in classes.items():
        if not isinstance(bounds, Mapping):
            raise SlaError(f"class {name} has {bounds!r}", "for example: interactive: {ttft_p99_ms: 500}")
        yield from _texts(bounds, str(name))


def _traffic(data: Any) -> Traffic:
    if isinstance(data, int | float) and not isinstance(data, bool):
        return Traffic(float(data))
    if not isinstance(data, Mapping) or "rps" not in data:
        raise SlaError(f"traffic is {data!r}", "for example: traffic: {rps: 30, peak_to_mean: 2}")
    for name in data:
        if name not in _TRAFFIC:
            raise SlaError(f"traffic.{name} is unknown", did_you_mean(str(name), _TRAFFIC))
    values = {_TRAFFIC[name]: _number(f"traffic.{name}", value) for name, value in data.items()}
    if "spare" in values:
        values["spare"] = int(values["spare"])
    return Traffic(**values)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SlaError(f"{name} is {value!r}", "give a number")
    return value
