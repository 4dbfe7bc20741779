"""Records into Optuna and Optuna's suggestions out: the only module that knows Optuna's states and distributions.

Optuna's storage is an opinion rebuilt from records.jsonl, never the truth. What "does not run" means to a sampler
depends on the sampler (FAIL teaches none of them anything), so it is told in one place, with all constraints set in
one fixed order: samplers read them by position.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from sweep.decide.sla import Bound
from sweep.results.metrics import get_metric
from sweep.space.params import Choice, Label, Param
from sweep.space.search_space import Params, SearchSpace

LOAD = "load"
_RUNS = "runs"
_LOSS = "loss of "
# These models are fitted on complete trials only, so an infeasible trial needs (neutral) values to be seen at all.
_COMPLETE_ONLY = {"nsga2", "gp"}


@dataclass(frozen=True)
class Outcome:
    """What is known of an operating point. values: one per objective, in natural units, or None when it has none.

    infeasible: it deterministically does not run. Neither values nor infeasible: nothing was learnt. losses: metric
    with a non-inferiority margin -> how far the largest plausible loss is beyond it, as a fraction; 0 or less: within.
    """

    values: tuple[float, ...] | None
    infeasible: bool
    metrics: Mapping[str, float | None]
    attributes: Mapping[str, Any]
    losses: Mapping[str, float] = field(default_factory=dict)


# Told of a trial whose point needs no measurement or will not get one.
UNSETTLED = Outcome(None, False, {}, {"state": "unsettled"})


class OptunaMirror:
    """An Optuna study that mirrors the records. objectives: metric names; bounds: constraints on metrics.

    margins: metrics with a non-inferiority margin, further constraints.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: SearchSpace,
        load_labels: Sequence[str],
        objectives: Sequence[str],
        bounds: Sequence[Bound],
        sampler_kind: str,
        margins: Sequence[str] = (),
    ) -> None:
        self.study = study
        self.space = space
        self.load_labels = tuple(load_labels)
        self.objectives = tuple(objectives)
        self.bounds = tuple(bounds)
        self.margins = tuple(margins)
        self._complete_only = sampler_kind in _COMPLETE_ONLY
        self._feasible_values: list[tuple[float, ...]] = []

    def ask(self) -> tuple[optuna.Trial, Params, str]:
        """A running trial, the knobs it proposes and the load label at which it proposes them."""
        trial = self.study.ask()

        params = self.space.suggest(lambda param: _suggest(trial, param))
        load = trial.suggest_categorical(LOAD, self.load_labels)
        return trial, params, load

    def tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        """Finish an asked trial."""
        state, values, constraints = self._verdict(outcome)
        for key, value in constraints.items():
            trial.set_constraint(key, value)
        for key, attribute in outcome.attributes.items():
            trial.set_user_attr(key, attribute)
        self.study.tell(trial, values, state=state)

    def add(self, params: Mapping[str, Label], load_label: str, outcome: Outcome) -> None:
        """Tell an operating point nobody asked for: the rest of a ladder, or a record of an earlier run."""
        self.add_all([(params, load_label, outcome)])

    def add_all(self, points: Sequence[tuple[Mapping[str, Label], str, Outcome]]) -> None:
        """Rebuild from records, in order. A load beyond the ladder is no value of its dimension: it is not told."""
        self.study.add_trials([self._frozen(*point) for point in points if point[1] in self.load_labels])

    def reject(self, trial: optuna.Trial, reasons: Sequence[str]) -> None:
        """Tell that a rule forbids this configuration: it was never launched."""
        self.tell(trial, Outcome(None, True, {}, {"rejected": "; ".join(reasons)}))

    def _frozen(self, params: Mapping[str, Label], load_label: str, outcome: Outcome) -> optuna.trial.FrozenTrial:
        state, values, constraints = self._verdict(outcome)
        encoded: dict[str, Any] = {LOAD: load_label}
        distributions: dict[str, BaseDistribution] = {LOAD: CategoricalDistribution(self.load_labels)}
        for param in self.space.params:
            if param.name in params:
                key, distributions[key] = _distribution(param)
                encoded[key] = _encode(param, params[param.name])
        return optuna.trial.create_trial(
            state=state,
            values=values,
            params=encoded,
            distributions=distributions,
            constraints=constraints,
            user_attrs=dict(outcome.attributes),
        )

    def _verdict(self, outcome: Outcome) -> tuple[TrialState, list[float] | None, dict[str, float]]:
        """The one mapping from what happened to Optuna's words."""
        if outcome.values is not None:
            measured = {b: outcome.metrics.get(b.metric) for b in self.bounds}
            misses = {f"{b}": b.relative_miss(v) for b, v in measured.items() if v is not None}
            misses |= {f"{_LOSS}{name}": outcome.losses[name] for name in self.margins if name in outcome.losses}
            if len(misses) == len(self.bounds) + len(self.margins):
                self._feasible_values.append(outcome.values)
                return TrialState.COMPLETE, list(outcome.values), {_RUNS: 0.0, **misses}
        if not outcome.infeasible:
            return TrialState.FAIL, None, {}
        constraints = {_RUNS: 1.0, **{f"{b}": 1.0 for b in self.bounds}, **{f"{_LOSS}{m}": 1.0 for m in self.margins}}
        if self._complete_only and self._feasible_values:
            neutral = [median(column) for column in zip(*self._feasible_values, strict=True)]
            return TrialState.COMPLETE, neutral, constraints
        return TrialState.PRUNED, None, constraints


def create_study(
    storage: optuna.storages.BaseStorage | str,
    name: str,
    objectives: Sequence[str],
    sampler: optuna.samplers.BaseSampler,
) -> optuna.Study:
    """A new, empty multi-objective study; one of the same name is replaced, since records can rebuild it."""
    if name in optuna.study.get_all_study_names(storage):
        optuna.delete_study(study_name=name, storage=storage)
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        sampler=sampler,
        directions=[get_metric(o).direction for o in objectives],
    )
    with warnings.catch_warnings():  # the method has been experimental since Optuna 3.2
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(objectives))
    return study


def _distribution(param: Param) -> tuple[str, BaseDistribution]:
    """Optuna's name and distribution of a dimension. A geometric scale becomes its index: even in the logarithm."""
    if not isinstance(param, Choice):
        return param.name, FloatDistribution(param.low, param.high, log=param.log)
    if param.ordered:
        return f"{param.name}.index", IntDistribution(0, len(param.labels) - 1)
    return param.name, CategoricalDistribution(param.labels)


def _encode(param: Param, label: Label) -> Any:
    return param.labels.index(label) if isinstance(param, Choice) and param.ordered else label


def _suggest(trial: optuna.Trial, param: Param) -> Label:
    key, distribution = _distribution(param)
    if isinstance(distribution, FloatDistribution):
        return trial.suggest_float(key, distribution.low, distribution.high, log=distribution.log)
    assert isinstance(param, Choice)
    if isinstance(distribution, IntDistribution):
        return param.labels[trial.suggest_int(key, distribution.low, distribution.high)]
    label: Label = trial.suggest_categorical(key, param.labels)
    return label
