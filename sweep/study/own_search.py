"""Our own search (sampler.kind=sweep) in a study: records become its history, its suggestions become launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from sweep.config import SweepConfig
from sweep.decide.sla import Bound, parse_sla
from sweep.estimate import Estimate, Lengths, estimate
from sweep.estimate.preview import estimated_objective, unavailable
from sweep.launch.spec import build_engine, devices_needed
from sweep.measure.workload import Load, WorkloadSpec
from sweep.results.metrics import get_metric
from sweep.results.records import LaunchRecord, PointRecord
from sweep.search import Constraint, Evidence, Guess, Prior, Search, Suggestion, Tried
from sweep.space.search_space import Params, SearchSpace
from sweep.study.ledger import Ledger
from sweep.study.tell import Outcome

# Whether it is time to stop is worth working out only where a suggestion expects little itself.
_LITTLE = 0.005
_LOSS = "loss of "


class OwnSearch:
    """Asks for one launch after the other. ended: why there is no further one, once there is none."""

    def __init__(self, config: SweepConfig, space: SearchSpace, ladder: Sequence[Load], ledger: Ledger) -> None:
        self.ended: str | None = None
        self._config, self._space, self._ledger = config, space, ledger
        params, settings = space.baseline()  # which the study launches by itself
        self._given = [] if params is None else [(params, build_engine(config, settings).hash, 0)]
        constraints = constraints_of(config)
        objectives = config.objectives.metrics
        self._further = [c.name for c in constraints if c.name not in objectives]
        self._search = Search(
            space, ladder, objectives, estimator_prior(config, space, [*objectives, *self._further]),
            config.sampler.seed, constraints=constraints, allowed=self._fits_the_node,
            shared={name: self._numerics for name in (*objectives, *self._further) if _of_quality(name)},
            devices_of=lambda params: devices_needed(config, build_engine(config, space.settings(params))),
        )  # fmt: skip

    def learn(self, evidence: Sequence[Evidence]) -> None:
        """What became of configurations in earlier studies: a hint of what will run here."""
        self._search.learn(evidence)

    def next(self) -> Suggestion | None:
        """What to launch beside what is under way; None at the end."""
        history = tried(self._ledger, self._further)
        self._given = [g for g in self._given if self._launches_of(g[1]) <= g[2]]
        suggestion = self._search.ask(history, [params for params, _, _ in self._given])
        expects_little = suggestion is None or (suggestion.gain or 0.0) <= _LITTLE
        if expects_little and (why := self._search.stop(history)) is not None:
            self.ended = why
            return None
        if suggestion is not None:
            config_hash = build_engine(self._config, self._space.settings(suggestion.params)).hash
            self._given.append((suggestion.params, config_hash, self._launches_of(config_hash)))
        return suggestion

    def _launches_of(self, config_hash: str) -> int:
        return sum(launch.config_hash == config_hash for launch in self._ledger.launches)

    def _numerics(self, params: Params) -> str:
        return build_engine(self._config, self._space.settings(params)).fingerprint

    def _fits_the_node(self, params: Params) -> bool:
        engine = build_engine(self._config, self._space.settings(params))
        return devices_needed(self._config, engine) <= self._config.hardware.devices


def _of_quality(metric: str) -> bool:
    return metric.removeprefix(_LOSS).startswith("quality_")


def constraints_of(config: SweepConfig) -> list[Constraint]:
    """The bounds of the study and its non-inferiority margins (a loss beyond its margin, as a share of it, is above 0).

    The same that study.tell passes to Optuna.
    """
    bounds: dict[str, Bound] = {}
    for bound in (b for text in config.constraints.bounds for b in parse_sla(text).bounds):
        known, sign = bounds.get(bound.metric), get_metric(bound.metric).sign
        if known is None or sign * bound.value < sign * known.value:  # the tighter of two
            bounds[bound.metric] = bound
    return [
        *(Constraint(b.metric, b.value, get_metric(b.metric).sign) for b in bounds.values()),
        *(Constraint(f"{_LOSS}{name}", 0.0) for name in config.quality.non_inferiority),
    ]


def tried(ledger: Ledger, further: Sequence[str] = ()) -> list[Tried]:
    """The launches of the ledger that chose among the space, in order. A point that awaits its quality has no value.

    further: what is constrained beside the objectives. A point without one of them was asked for and taught nothing.
    """
    points: dict[str, list[PointRecord]] = defaultdict(list)
    for record in ledger.records:
        if isinstance(record, PointRecord) and not record.repeat:
            points[record.launch_id].append(record)
    return [
        _tried(ledger, launch, points[launch.launch_id], further)
        for launch in ledger.launches
        if launch.params is not None and launch.purpose in ("baseline", "trial") and not launch.repeat
    ]


def _tried(ledger: Ledger, launch: LaunchRecord, points: Sequence[PointRecord], further: Sequence[str]) -> Tried:
    outcomes = {p.load_label: ledger.outcome(p.config_hash, p.load_label) for p in points}
    infeasible = bool(points) and all(o is not None and o.infeasible for o in outcomes.values())
    failed = launch.state == "failed" and not launch.transient and not any(p.state == "measured" for p in points)
    values = {label: None if o is None else _values(o, further) for label, o in outcomes.items()}
    return Tried(
        dict(launch.params or {}),
        values,
        (launch.cause or "infeasible") if failed or infeasible else None,
        launch.devices,
        launch.startup_s,
        {p.load_label: _seconds(p) for p in points if p.state == "measured"},
        [label for label, o in outcomes.items() if o is not None and values[label] is None and _was_measured(o)],
    )


def _was_measured(outcome: Outcome) -> bool:
    return outcome.attributes["state"] in ("measured", "quarantined") and not outcome.infeasible


def _values(outcome: Outcome, further: Sequence[str]) -> tuple[float, ...] | None:
    if outcome.values is None:
        return None
    losses = {f"{_LOSS}{name}": loss for name, loss in outcome.losses.items()}
    values = [losses.get(name, outcome.metrics.get(name)) for name in further]
    known = [v for v in values if v is not None]
    return (*outcome.values, *known) if len(known) == len(values) else None


def _seconds(point: PointRecord) -> float:
    return (datetime.fromisoformat(point.finished_at) - datetime.fromisoformat(point.started_at)).total_seconds()


def estimator_prior(config: SweepConfig, space: SearchSpace, metrics: Sequence[str]) -> Prior | None:
    """What the kernel data says of this model, hardware and workload; None where it says nothing.

    A percentile is taken for the estimated mean: what lies between them is the model's to learn.
    """
    lengths = Lengths.of(WorkloadSpec.from_dict(asdict(config.workload)))
    if unavailable(config.hardware) is not None or not isinstance(lengths, Lengths):
        return None
    price = config.hardware.price_usd_per_device_hour

    def prior(params: Params, load: Load) -> Guess | None:
        engine = build_engine(config, space.settings(params))
        found = estimate(engine, config.hardware, lengths, load)
        if not isinstance(found, Estimate):
            return None
        devices = devices_needed(config, engine)
        values = tuple(estimated_objective(name, found, devices, price) for name in metrics)
        return Guess(values, found.fits)

    return prior
