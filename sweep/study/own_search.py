"""Our own search (sampler.kind=sweep) in a study: records become its history, its suggestions become launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from sweep.config import SweepConfig
from sweep.estimate import Estimate, Lengths, estimate
from sweep.estimate.preview import estimated_objective, unavailable
from sweep.launch.spec import build_engine, devices_needed
from sweep.measure.workload import Load, WorkloadSpec
from sweep.results.records import LaunchRecord, PointRecord
from sweep.search import Guess, Prior, Search, Suggestion, Tried
from sweep.space.search_space import Params, SearchSpace
from sweep.study.ledger import Ledger

# Whether it is time to stop is worth working out only where a suggestion expects little itself.
_LITTLE = 0.005


class OwnSearch:
    """Asks for one launch after the other. ended: why there is no further one, once there is none."""

    def __init__(self, config: SweepConfig, space: SearchSpace, ladder: Sequence[Load], ledger: Ledger) -> None:
        self.ended: str | None = None
        self._config, self._space, self._ledger = config, space, ledger
        params, settings = space.baseline()  # which the study launches by itself
        self._given = [] if params is None else [(params, build_engine(config, settings).hash, 0)]
        self._search = Search(
            space, ladder, config.objectives.metrics, estimator_prior(config, space), config.sampler.seed,
            devices_of=lambda params: devices_needed(config, build_engine(config, space.settings(params))),
            allowed=self._fits_the_node,
        )  # fmt: skip

    def next(self) -> Suggestion | None:
        """What to launch beside what is under way; None at the end."""
        history = tried(self._ledger)
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

    def _fits_the_node(self, params: Params) -> bool:
        engine = build_engine(self._config, self._space.settings(params))
        return devices_needed(self._config, engine) <= self._config.hardware.devices


def tried(ledger: Ledger) -> list[Tried]:
    """The launches of the ledger that chose among the space, in order. A point that awaits its quality has no value."""
    points: dict[str, list[PointRecord]] = defaultdict(list)
    for record in ledger.records:
        if isinstance(record, PointRecord) and not record.repeat:
            points[record.launch_id].append(record)
    return [
        _tried(ledger, launch, points[launch.launch_id])
        for launch in ledger.launches
        if launch.params is not None and launch.purpose in ("baseline", "trial") and not launch.repeat
    ]


def _tried(ledger: Ledger, launch: LaunchRecord, points: Sequence[PointRecord]) -> Tried:
    outcomes = {p.load_label: ledger.outcome(p.config_hash, p.load_label) for p in points}
    infeasible = bool(points) and all(o is not None and o.infeasible for o in outcomes.values())
    failed = launch.state == "failed" and not launch.transient and not any(p.state == "measured" for p in points)
    return Tried(
        dict(launch.params or {}),
        {label: None if o is None else o.values for label, o in outcomes.items()},
        (launch.cause or "infeasible") if failed or infeasible else None,
        launch.devices,
        launch.startup_s,
        {p.load_label: _seconds(p) for p in points if p.state == "measured"},
    )


def _seconds(point: PointRecord) -> float:
    return (datetime.fromisoformat(point.finished_at) - datetime.fromisoformat(point.started_at)).total_seconds()


def estimator_prior(config: SweepConfig, space: SearchSpace) -> Prior | None:
    """What the kernel data says of this model, hardware and workload; None where it says nothing."""
    lengths = Lengths.of(WorkloadSpec.from_dict(asdict(config.workload)))
    if unavailable(config.hardware) is not None or not isinstance(lengths, Lengths):
        return None
    price, objectives = config.hardware.price_usd_per_device_hour, config.objectives.metrics

    def prior(params: Params, load: Load) -> Guess | None:
        engine = build_engine(config, space.settings(params))
        found = estimate(engine, config.hardware, lengths, load)
        if not isinstance(found, Estimate):
            return None
        devices = devices_needed(config, engine)
        values = tuple(estimated_objective(name, found, devices, price) for name in objectives)
        return Guess(values, found.fits)

    return prior
