"""The search space of a study: dimensions in order, conditions, constraints. Knows nothing of samplers or vLLM.

A *params* dict maps dimension name -> label, holding active dimensions only. `settings` turns it into knobs (vLLM
arguments, environment variables, `model`); every decision downstream is made on those.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sweep.config import HardwareConfig, ModelConfig, SpaceConfig
from sweep.errors import ConfigError, did_you_mean
from sweep.space.expressions import Expression, parse
from sweep.space.params import Choice, Label, Param, make_param
from sweep.space.rules import known_invalid, parallel_devices

Params = dict[str, Label]
Suggester = Callable[[Param], Label]

ENUMERATION_LIMIT = 20_000
SAMPLES = 2_000


@dataclass(frozen=True)
class SpaceSize:
    """total: combinations of active dimensions, None where they were not all counted.

    valid: how many can be launched; invalid: first reason -> how many cannot. Of all, or of `sampled` uniform draws.
    """

    total: int | None
    valid: int
    invalid: Mapping[str, int]
    sampled: int | None = None

    @property
    def launchable(self) -> int | None:
        """The number of configurations that can be launched, where it is known exactly."""
        return None if self.sampled else self.valid


@dataclass(frozen=True)
class SearchSpace:
    """params in order: a condition may read only dimensions before it. facts: model.*, hardware.* for expressions."""

    name: str
    params: tuple[Param, ...]
    constraints: tuple[Expression, ...]
    facts: Mapping[str, Any]
    model: ModelConfig
    hardware: HardwareConfig

    def suggest(self, suggester: Suggester) -> Params:
        """Walk the dimensions, asking for each active one. The result may still violate constraints."""
        chosen: Params = {}
        for param in self.params:
            if param.when is None or param.when.holds(self._values(chosen)):
                chosen[param.name] = suggester(param)
        return chosen

    def settings(self, params: Mapping[str, Label]) -> dict[str, Any]:
        """Knob -> value of everything these params set; None means left to vLLM's default."""
        settings: dict[str, Any] = {}
        for param in self.params:
            if param.name in params:
                settings.update(param.setting(params[param.name]))
        return settings

    def violations(self, params: Mapping[str, Label]) -> list[str]:
        """Why this configuration is not launched: its constraints that fail, and what is known not to run."""
        values = self._values(params)
        failed = [f"violates: {c.text}" for c in self.constraints if c.holds(values) is False]
        return failed + known_invalid(self.settings(params), self.model, self.hardware)

    def sample(self, rng: np.random.Generator) -> Params:
        """One uniform draw of the labels, constraints not regarded."""

        def draw(param: Param) -> Label:
            if isinstance(param, Choice):
                return param.labels[int(rng.integers(len(param.labels)))]
            if param.log:
                return float(np.exp(rng.uniform(np.log(param.low), np.log(param.high))))
            return float(rng.uniform(param.low, param.high))

        return self.suggest(draw)

    def enumerate(self) -> Iterator[Params]:
        """Every combination in declared order, valid or not. Raises ConfigError for a continuous dimension."""
        for param in self.params:
            if not isinstance(param, Choice):
                raise ConfigError(f"space.params.{param.name} is continuous and cannot be enumerated", "give it a step")
        yield from self._walk({}, 0, _all_labels)

    def size(self, limit: int = ENUMERATION_LIMIT) -> SpaceSize:
        """Count by enumeration; beyond limit, or with a continuous dimension, judge `SAMPLES` uniform draws instead."""
        finite = all(isinstance(p, Choice) for p in self.params)
        members = list(itertools.islice(self.enumerate(), limit + 1)) if finite else []
        sampled = not finite or len(members) > limit
        if sampled:
            rng = np.random.default_rng(0)
            members = [self.sample(rng) for _ in range(SAMPLES)]
        reasons = [self.violations(params) for params in members]
        return SpaceSize(
            total=None if sampled else len(members),
            valid=sum(not r for r in reasons),
            invalid=dict(Counter(r[0] for r in reasons if r)),
            sampled=len(members) if sampled else None,
        )

    def baseline(self) -> tuple[Params | None, dict[str, Any]]:
        """vLLM's defaults on the fewest devices that hold the model: (params or None, settings).

        params is None where the space does not contain them (a range always sets its knob).
        """
        paths = [p for p in self._walk({}, 0, _default_labels) if not self.violations(p)]
        if paths and all(isinstance(p, Choice) for p in self.params):
            params = min(paths, key=lambda p: parallel_devices(self.settings(p)))
            return params, self.settings(params)
        sizes = [2**i for i in range(self.hardware.devices.bit_length())]
        fits = (t for t in sizes if not known_invalid({"tensor_parallel_size": t}, self.model, self.hardware))
        size = next(fits, 1)
        return None, ({"tensor_parallel_size": size} if size > 1 else {})

    @property
    def fingerprint(self) -> str:
        """Identity of the space: a study is never continued over another one."""
        shape = [_shape(param) for param in self.params]
        text = json.dumps([shape, [c.text for c in self.constraints]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _values(self, params: Mapping[str, Label]) -> dict[str, Any]:
        parallel = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")}
        settings = {k: v for k, v in self.settings(params).items() if not (k in parallel and v is None)}
        return {**self.facts, **parallel, **params, **settings}

    def _walk(self, chosen: Params, index: int, labels: Callable[[Choice], list[Label]]) -> Iterator[Params]:
        if index == len(self.params):
            yield dict(chosen)
            return
        param = self.params[index]
        if param.when is not None and not param.when.holds(self._values(chosen)):
            yield from self._walk(chosen, index + 1, labels)
        elif isinstance(param, Choice):
            for label in labels(param):
                yield from self._walk({**chosen, param.name: label}, index + 1, labels)


def _shape(param: Param) -> list[Any]:
    when = param.when.text if param.when else None
    if isinstance(param, Choice):
        return [param.name, when, list(param.labels), [dict(s) for s in param.settings]]
    return [param.name, when, param.low, param.high, param.log]


def _all_labels(param: Choice) -> list[Label]:
    return list(param.labels)


def _default_labels(param: Choice) -> list[Label]:
    """Labels that change nothing about the engine but on how many devices it runs."""
    pairs = zip(param.labels, param.settings, strict=True)
    return [label for label, s in pairs if all(v is None or k.endswith("_parallel_size") for k, v in s.items())]


def make_search_space(config: SpaceConfig, model: ModelConfig, hardware: HardwareConfig) -> SearchSpace:
    """Build and check a space. Raises ConfigError for unknown names in conditions, or a condition that looks ahead."""
    facts = {f"model.{k}": v for k, v in asdict(model).items() if not isinstance(v, dict)}
    facts |= {f"model.args.{k}": v for k, v in model.args.items()}
    facts |= {f"hardware.{k}": v for k, v in asdict(hardware).items()}
    params = tuple(make_param(name, p) for name, p in config.params.items())
    known = set(facts) | {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
    for param in params:
        if param.when is not None:
            _check_names(param.when, known, f"space.params.{param.name}.when")
        known.add(param.name)
        if isinstance(param, Choice):
            known.update(knob for setting in param.settings for knob in setting)
    constraints = tuple(parse(text) for text in config.constraints)
    for constraint in constraints:
        _check_names(constraint, known, "space.constraints")
    return SearchSpace(config.name, params, constraints, facts, model, hardware)


def _check_names(expression: Expression, known: set[str], where: str) -> None:
    for name in sorted(expression.names - known):
        if name.startswith("model.args."):
            continue  # an argument that this model leaves to vLLM: unknown, so the constraint is not applied
        raise ConfigError(
            f"{where}: '{name}' in \"{expression.text}\" is neither a parameter before it nor a fact",
            did_you_mean(name, known),
        )
