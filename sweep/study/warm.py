"""What earlier studies say about where to begin: another model, GPU or vLLM, but often the same knobs that matter.

An earlier study gives an order, never a value: its front is launched first, and what failed there for a reason that is
the configuration's own is asked last. Nothing of it becomes a point of this study. Configurations are matched by what
they set, so spaces need not be the same: a knob that the earlier study did not have stays at vLLM's default.

What a failure there says here:

* transient (a port, a time-out, a lost device) or a proof that failed: nothing.
* out_of_memory: only for the same model on the same device. What another one holds is another question.
* same model, device and vLLM: it will fail again. Strong, but another build or driver may still run it.
* anything else differs: a hint. Upgrades are made to mend failures.

So no sampler leaves a configuration out for it. Optuna's samplers and a grid ask for it last, whatever the version: an
order is all they can take, and a grid walks its whole space in any case. sampler=sweep learns from all of it, successes
too, what is likely to run: strong evidence as its own launches, a hint with half their strength (search.feasibility).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.config import SweepConfig
from sweep.decide.opened import Study, open_study
from sweep.results.front import eligible, minimized, nondominated
from sweep.results.metrics import METRICS
from sweep.results.points import OperatingPoint
from sweep.results.records import RECORDS_FILE, LaunchRecord
from sweep.space.params import Choice, Label, Param
from sweep.space.search_space import Params, SearchSpace

_ABSENT = (None, 1)
# Failures that follow from what was asked for, wherever it is asked.
_OF_THE_DEVICE = "out_of_memory"
_LASTING = ("invalid_argument", "unsupported", "died_at_startup", "first_request_failed", "engine_died")


class _Inexpressible(Exception):
    """The space has no member with these settings."""


@dataclass(frozen=True)
class Hint:
    """A member of this study's space that an earlier study measured or failed to.

    weight: 1 for its first front, 1/2 for the front behind it and so on, 0 for a failure. why: with the study's name.
    cause: of the failure, or None. same: whether model, device and vLLM were those of the study to come.
    """

    params: Params
    weight: float
    why: str
    cause: str | None = None
    same: bool = False


@dataclass(frozen=True)
class Here:
    """What earlier studies are compared with. vllm_version: that will be launched; None where none will, or unknown."""

    config: SweepConfig
    vllm_version: str | None = None

    def same_device(self, study: Study) -> bool:
        """Whether that was the same model, with the same arguments, on the same device."""
        model, hardware = study.config.get("model", {}), study.config.get("hardware", {})
        there = model.get("path"), dict(model.get("args") or {}), hardware.get("name"), hardware.get("memory_gib")
        own, node = self.config.model, self.config.hardware
        return there == (own.path, dict(own.args), node.name, node.memory_gib)

    def same(self, study: Study) -> bool:
        """The same, served by the same vLLM."""
        if not self.same_device(study) or study.config.get("engine", {}).get("kind") != self.config.engine.kind:
            return False
        return self.config.engine.kind != "vllm" or _versions(study) == [self.vllm_version]


def warm_prior(
    studies: Sequence[Study], space: SearchSpace, objectives: Sequence[str] = (), here: Here | None = None
) -> list[Hint]:
    """Every configuration of earlier studies that this space contains, the best first, each once.

    objectives: of the study to come; of each earlier study, those it measured count (its own where it measured none).
    here: the study to come; None: another one.
    """
    hints: dict[tuple[tuple[str, Label], ...], Hint] = {}
    for study in studies:
        for hint in _hints(study, space, objectives, here):
            key = tuple(hint.params.items())
            if key not in hints or hint.weight > hints[key].weight:
                hints[key] = hint
    return sorted(hints.values(), key=lambda hint: -hint.weight)


def open_earlier(folders: Iterable[str]) -> list[Study]:
    """The studies of a config's warm_start. Raises StudyError for a folder that is none."""
    return [open_study(Path(folder).expanduser()) for folder in folders]


def provenance(studies: Sequence[Study], hints: Sequence[Hint]) -> list[dict[str, Any]]:
    """What study.json says of where the order came from."""
    return [
        {
            "study": study.name,
            "path": str(study.path),
            "records_sha256": hashlib.sha256((study.path / RECORDS_FILE).read_bytes()).hexdigest(),
            "model": study.config.get("model", {}).get("path"),
            "hardware": study.config.get("hardware", {}).get("name"),
            "vllm_version": ", ".join(_versions(study)) or None,
            "hints": sum(hint.cause is None and _names(hint, study) for hint in hints),
            "failures": sum(hint.cause is not None and _names(hint, study) for hint in hints),
        }
        for study in studies
    ]


def summary(hints: Sequence[Hint]) -> str:
    """One line for the log: what is done with the hints."""
    first, failed = sum(h.weight == 1.0 for h in hints), [h for h in hints if h.cause is not None]
    strong = sum(h.same for h in failed)
    text = f"warm start: {first} configurations of earlier fronts come first, {len(failed)} that failed there last"
    strength = f" ({strong} with this model, device and vLLM, {len(failed) - strong} with another)"
    return text + strength if failed else text


def _versions(study: Study) -> list[str]:
    """Of vLLM, as its launches told."""
    return sorted({r.vllm_version for r in study.records if isinstance(r, LaunchRecord) and r.vllm_version})


def _names(hint: Hint, study: Study) -> bool:
    return hint.why.endswith(f"of {study.name}")


def _hints(study: Study, space: SearchSpace, objectives: Sequence[str], here: Here | None) -> list[Hint]:
    same = here is not None and here.same(study)
    lasting = (*_LASTING, *([_OF_THE_DEVICE] if here is not None and here.same_device(study) else []))
    points = study.operating_points
    names = [name for name in objectives if _measured(points, name)] or list(study.objectives)
    best = _layers(points, names)
    found = []
    for config_hash, group in _by_config(points).items():
        causes = {p.cause for p in group if p.state == "failed"}
        layer = best.get(config_hash)
        if layer is None and not (causes and all(p.state == "failed" for p in group)):
            continue
        try:
            params = _params_of(group[0], space, study.config)
        except _Inexpressible:
            continue
        if layer is not None:
            place = "on the front" if layer == 0 else f"{layer} behind the front"
            found.append(Hint(params, 1.0 / (1 + layer), f"warm start: {place} of {study.name}", None, same))
        elif (cause := next((c for c in sorted(filter(None, causes)) if c in lasting), None)) is not None:
            found.append(Hint(params, 0.0, f"warm start: failed ({cause}) in all points of {study.name}", cause, same))
    return found


def _measured(points: Sequence[OperatingPoint], name: str) -> bool:
    return name in METRICS and any(name in p.metrics for p in points)


def _by_config(points: Sequence[OperatingPoint]) -> dict[str, list[OperatingPoint]]:
    groups: dict[str, list[OperatingPoint]] = {}
    for p in points:
        groups.setdefault(p.config_hash, []).append(p)
    return groups


def _layers(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> dict[str, int]:
    """config_hash -> how many fronts have to be taken away until one of its points is on the next."""
    left = eligible(points, objectives)
    layers: dict[str, int] = {}
    layer = 0
    while left:
        kept = nondominated(minimized(left, objectives))
        for p, on_front in zip(left, kept, strict=True):
            if on_front:
                layers.setdefault(p.config_hash, layer)
        left = [p for p, on_front in zip(left, kept, strict=True) if not on_front and p.config_hash not in layers]
        layer += 1
    return layers


def _params_of(point: OperatingPoint, space: SearchSpace, earlier: Mapping[str, Any]) -> Params:
    """The member of the space with the settings of this point. Raises _Inexpressible where there is none."""
    model = earlier.get("model", {})
    given = {**point.engine.get("args", {}), **point.engine.get("env", {})}
    if point.engine["model"] != model.get("path"):
        given["model"] = point.engine["model"]
    params = space.suggest(lambda param: _label_of(param, given))
    knobs = {knob for param in space.params if param.name in params for knob in param.setting(params[param.name])}
    fixed = {*model.get("args", {}), *model.get("env", {})}
    fixed |= {*earlier.get("engine", {}).get("args", {}), *earlier.get("engine", {}).get("env", {})}
    unset = [name for name, value in given.items() if value is not None and name not in knobs | fixed]
    if unset or space.violations(params):
        raise _Inexpressible
    return params


def _label_of(param: Param, given: Mapping[str, Any]) -> Label:
    if not isinstance(param, Choice):
        value = given.get(param.name)
        if isinstance(value, int | float) and param.low <= value <= param.high:
            return float(value)
        raise _Inexpressible
    for label, setting in zip(param.labels, param.settings, strict=True):
        every = {knob for other in param.settings for knob in other}
        if all(_same(knob, setting.get(knob), given.get(knob)) for knob in every):
            return label
    raise _Inexpressible


def _same(knob: str, a: object, b: object) -> bool:
    """One device in a direction is vLLM's default, said or not."""
    if knob.endswith("_parallel_size"):
        return a == b or (a in _ABSENT and b in _ABSENT)
    return a == b if not knob.isupper() or a is None or b is None else str(a) == str(b)
