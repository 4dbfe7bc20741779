"""One dimension of a search space: a finite choice (plain, joint or bundled) or a numeric range."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweep.config import ParamConfig
from sweep.errors import ConfigError, did_you_mean
from sweep.space.expressions import Expression, parse

Label = str | int | float | bool | None


@dataclass(frozen=True)
class Choice:
    """A finite choice. labels[i] is what the sampler and the tables see; settings[i] maps knob -> value.

    A setting of None leaves the argument out, so that vLLM's own default applies. ordered: the labels are numbers
    of one scale, so that neighbours mean something to a sampler.
    """

    name: str
    labels: tuple[Label, ...]
    settings: tuple[Mapping[str, Any], ...]
    when: Expression | None = None
    ordered: bool = False

    def setting(self, label: Label) -> Mapping[str, Any]:
        """The knobs that this label sets. Raises ConfigError for a label that is not a choice."""
        for known, values in zip(self.labels, self.settings, strict=True):
            if known == label and isinstance(known, bool) == isinstance(label, bool):
                return values
        raise ConfigError(f"{self.name}={label!r} is not a choice", f"choices: {list(self.labels)}")


@dataclass(frozen=True)
class Range:
    """A continuous range of one knob, in the knob's own unit; log: uniform in the logarithm."""

    name: str
    low: float
    high: float
    log: bool = False
    when: Expression | None = None

    def setting(self, label: Label) -> Mapping[str, Any]:
        if not isinstance(label, int | float) or not self.low <= label <= self.high:
            raise ConfigError(f"{self.name}={label!r} is out of range", f"range: {self.low} to {self.high}")
        return {self.name: label}


Param = Choice | Range


def make_param(name: str, given: ParamConfig | Mapping[str, Any]) -> Param:
    """Build one dimension from its YAML. Raises ConfigError naming the parameter and what is wrong with it."""
    config = given if isinstance(given, ParamConfig) else _fields(name, given)
    when = parse(config.when) if config.when else None
    kinds = [
        config.choices is not None,
        config.bundles is not None,
        config.low is not None or config.high is not None,
    ]
    if sum(kinds) != 1:
        raise ConfigError(f"space.params.{name} needs exactly one of choices, bundles, or low and high")
    if config.joint is not None and config.choices is None:
        raise ConfigError(f"space.params.{name}.joint needs choices", "choices: [[1, 1], [2, 1]] beside joint: [a, b]")
    if config.bundles is not None:
        return _bundles(name, config.bundles, when)
    if config.choices is not None:
        return _joint(name, config, when) if config.joint else _choices(name, config.choices, when)
    return _range(name, config, when)


def _fields(name: str, given: object) -> ParamConfig:
    """The fields of a dimension, each of its type."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"space.params.{name}={given!r} is not a dimension", "write {choices: [null, 64, 256]}")
    types: dict[str, tuple[type, ...]] = {
        "choices": (list,), "joint": (list,), "bundles": (Mapping,), "when": (str,), "log": (bool,),
        "low": (int, float), "high": (int, float), "step": (int, float),
    }  # fmt: skip
    for key, value in given.items():
        if key not in types:
            raise ConfigError(f"unknown key 'space.params.{name}.{key}'", did_you_mean(str(key), types))
        wrong = not isinstance(value, types[key]) or (isinstance(value, bool) and key != "log")
        if value is not None and wrong:
            expected = " or ".join(t.__name__.lower() for t in types[key])
            raise ConfigError(f"space.params.{name}.{key}={value!r} is no {expected}", "see search_spaces/README.md")
    return ParamConfig(**{str(k): v for k, v in given.items()})


def _label(value: Any) -> Label:
    return value if isinstance(value, str | int | float | bool | None) else json.dumps(value, sort_keys=True)


def _unique(name: str, labels: list[Label]) -> tuple[Label, ...]:
    if not labels:
        raise ConfigError(f"space.params.{name} has no choices", "list at least one value")
    keys = [(type(label).__name__, label) for label in labels]
    if len(set(keys)) != len(keys):
        raise ConfigError(f"space.params.{name} lists a choice twice: {labels}", "every choice once")
    return tuple(labels)


def _choices(name: str, choices: list[Any], when: Expression | None) -> Choice:
    return Choice(name, _unique(name, [_label(c) for c in choices]), tuple({name: c} for c in choices), when)


def _joint(name: str, config: ParamConfig, when: Expression | None) -> Choice:
    knobs, rows = config.joint or [], config.choices or []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(knobs):
            raise ConfigError(
                f"space.params.{name}: {row!r} does not match joint: {knobs}",
                f"give {len(knobs)} values in every choice",
            )
    labels = [",".join(f"{knob}={json.dumps(value)}" for knob, value in zip(knobs, row, strict=True)) for row in rows]
    return Choice(name, _unique(name, list(labels)), tuple(dict(zip(knobs, row, strict=True)) for row in rows), when)


def _bundles(name: str, bundles: dict[str, Any], when: Expression | None) -> Choice:
    for label, settings in bundles.items():
        if not isinstance(settings, dict):
            raise ConfigError(
                f"space.params.{name}.bundles.{label}={settings!r} is not a mapping",
                "map arguments to values: {quantization: fp8, VLLM_SOME_VARIABLE: '1'}; {} changes nothing",
            )
    return Choice(name, _unique(name, list(bundles)), tuple(bundles.values()), when)


def _range(name: str, config: ParamConfig, when: Expression | None) -> Param:
    low, high, step = config.low, config.high, config.step
    if low is None or high is None or not low < high:
        raise ConfigError(f"space.params.{name}: low={low}, high={high} is not a range", "give low < high")
    if config.log and low <= 0:
        raise ConfigError(f"space.params.{name}: a log range cannot start at {low}", "give low > 0")
    integers = isinstance(low, int) and isinstance(high, int)
    if step is None:
        if not integers:
            return Range(name, float(low), float(high), config.log, when)
        step = 2 if config.log else 1
    if step <= (1 if config.log else 0):
        raise ConfigError(
            f"space.params.{name}: step={step} does not advance",
            "a log range multiplies by its step (above 1), a linear one adds it (above 0)",
        )
    if config.log:
        count = math.floor(math.log(high / low) / math.log(step) + 1e-9) + 1
        values: list[Any] = [low * step**i for i in range(count)]
    else:
        count = math.floor((high - low) / step + 1e-9) + 1
        values = [low + step * i for i in range(count)]
    if integers:
        values = sorted({round(v) for v in values})
    return Choice(name, _unique(name, list(values)), tuple({name: v} for v in values), when, ordered=True)
