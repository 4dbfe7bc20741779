"""What a pick answers: the chosen point with its reasons, or the nearest miss, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from sweep.decide.capacity import Capacity
from sweep.decide.certainty import METHOD, NO_SPREAD, Demand
from sweep.decide.fleet import Fleet
from sweep.decide.rival import Rival
from sweep.decide.sla import Bound, Sla
from sweep.decide.verdict import Verdict
from sweep.decide.wording import engine_text, load_text, plural, point_value_text, value_text
from sweep.engine.engine_args import EngineConfig
from sweep.results.metrics import Metric
from sweep.results.points import OperatingPoint


@dataclass(frozen=True)
class BoundReport:
    """One bound at the chosen point. relaxed: the best point without it, None if that gains nothing.

    probability: that the true value keeps the bound as stated; None where no spread is known. evidence: what it rests
    on, in words.
    """

    bound: Bound
    value: float
    relaxed: OperatingPoint | None
    probability: float | None
    evidence: str

    @property
    def headroom(self) -> float:
        """How far the measured value stays inside the bound, as a fraction of the bound."""
        return abs(self.bound.value - self.value) / abs(self.bound.value) if self.bound.value else 0.0


@dataclass(frozen=True, repr=False)
class PickResult:
    """The chosen point and the reasons. rival: the runner-up, the best feasible point of another engine config.

    clear_winner: whether the rival is hardly better in truth; None where no spread tells. all_bounds: a lower limit on
    the probability that all bounds hold. capacity: what the traffic asked about needs; None if none was. verdicts: what
    `sweep verify` found at this point, newest first, held against these bounds.
    """

    feasible: ClassVar[bool] = True
    target: Metric
    sla: Sla
    chosen: OperatingPoint
    rival: Rival | None
    clear_winner: bool | None
    why: tuple[str, ...]
    bounds: tuple[BoundReport, ...]
    all_bounds: float | None
    ties: tuple[OperatingPoint, ...]
    n_feasible: int
    n_measured: int
    shared: Mapping[str, Any]
    demand: Demand
    capacity: Capacity | None
    verdicts: tuple[Verdict, ...] = ()

    @property
    def runner_up(self) -> OperatingPoint | None:
        """The best feasible point of another engine config."""
        return None if self.rival is None else self.rival.point

    @property
    def command(self) -> str:
        """The exact `vllm serve` line of the chosen point."""
        return EngineConfig.from_dict(self.chosen.engine).serve_command()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "feasible": True,
            "target": self.target.name,
            "direction": self.target.direction,
            "sla": str(self.sla),
            **asdict(self.demand),
            "chosen": point_dict(self.chosen),
            "runner_up": {**point_dict(self.rival.point), **self.rival.to_dict()} if self.rival else None,
            "clear_winner": self.clear_winner,
            "why": list(self.why),
            "bounds": [
                {
                    "metric": b.bound.metric,
                    "op": b.bound.op,
                    "bound": b.bound.value,
                    "value": b.value,
                    "probability": b.probability,
                    "evidence": b.evidence,
                    "headroom": b.headroom,
                    "binding": b.relaxed is not None,
                    "target_without_it": b.relaxed.metrics[self.target.name] if b.relaxed else None,
                    "point_without_it": b.relaxed.point_id if b.relaxed else None,
                }
                for b in self.bounds
            ],
            "all_bounds_probability_at_least": self.all_bounds,
            "ties": [p.point_id for p in self.ties],
            "n_feasible": self.n_feasible,
            "n_measured": self.n_measured,
            "capacity": self.capacity.to_dict() if self.capacity else None,
            "verifications": [v.to_dict() for v in self.verdicts],
            "command": self.command,
        }

    def text(self) -> str:
        """For a terminal, without colour."""
        lines = [*_point_lines("Pick", self.chosen, self.target, self.sla, self.shared), "", "Why"]
        lines += [f"  - {sentence}" for sentence in self.why]
        if self.bounds:
            lines += ["", "What each bound costs"]
            lines += [f"  {_bound_text(b, self.target, self.chosen, self.shared)}" for b in self.bounds]
        if self.all_bounds is not None and len(self.bounds) > 1:
            lines.append(f"  all of them hold with probability {_chance(self.all_bounds)} or more")
        if any(b.probability is not None for b in self.bounds):
            lines.append(f"  (probabilities: {METHOD})")
        lines += ["", "Verified", *(f"  {line}" for line in self._verified_lines())]
        if self.capacity is not None:
            lines += ["", "For the traffic", *(f"  {line}" for line in self.capacity.text_lines())]
        if self.rival is not None:
            lines += ["", *_point_lines("Runner-up", self.rival.point, self.target, self.sla, self.shared)]
            lines += [f"  - {line}" for line in self.rival.text_lines(self.target)]
            if self.clear_winner is False:
                lines.append("  - no clear winner: repeat both before choosing by this difference")
        return "\n".join([*lines, "", "Run it", f"  {self.command}"])

    def _verified_lines(self) -> list[str]:
        if not self.verdicts:
            return [
                f"not yet: sweep verify STUDY --point {self.chosen.point_id} launches it fresh and checks each bound"
            ]
        return self.verdicts[0].text_lines()

    def __repr__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class Miss:
    """One bound at the nearest point. relative: miss / bound, 0 if met. best: the best value at any point.

    kept: whether it is met with the headroom and confidence asked for, which relative includes where it can be had.
    """

    bound: Bound
    value: float
    relative: float
    best: float
    kept: bool
    probability: float | None


@dataclass(frozen=True)
class Relaxation:
    """A bound, what it would have to become for `point`, and the change as a fraction of the bound."""

    bound: Bound
    to: Bound
    relative: float
    point: OperatingPoint


@dataclass(frozen=True, repr=False)
class Infeasible:
    """No measured point meets the SLA. nearest: the point whose largest relative miss is smallest; others_near follow.

    unsure: points whose measured values meet it, but not with the headroom or confidence asked for. relaxations:
    the smallest of each bound alone, where one is enough. joint_relaxation: of all bounds the nearest point misses.
    fleet: the fewest devices whose replicas would do together; None where replicas do not help. devices: how many there
    are, if some points meet every bound and only devices are missing.
    """

    feasible: ClassVar[bool] = False
    target: Metric
    sla: Sla
    nearest: OperatingPoint
    misses: tuple[Miss, ...]
    enough_to_drop: tuple[Bound, ...]
    n_candidates: int
    n_measured: int
    shared: Mapping[str, Any]
    demand: Demand
    unsure: tuple[OperatingPoint, ...]
    n_without_spread: int
    relaxations: tuple[Relaxation, ...]
    joint_relaxation: tuple[Relaxation, ...]
    others_near: tuple[OperatingPoint, ...] = ()
    fleet: Fleet | None = None
    devices: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "feasible": False,
            "target": self.target.name,
            "direction": self.target.direction,
            "sla": str(self.sla),
            **asdict(self.demand),
            "nearest": point_dict(self.nearest),
            "others_near": [point_dict(p) for p in self.others_near],
            "misses": [
                {
                    "metric": m.bound.metric,
                    "op": m.bound.op,
                    "bound": m.bound.value,
                    "value": m.value,
                    "relative_miss": m.relative,
                    "best_of_any_point": m.best,
                    "kept": m.kept,
                    "probability": m.probability,
                }
                for m in self.misses
            ],
            "enough_to_drop": [str(b) for b in self.enough_to_drop],
            "relaxations": [_relaxation_dict(r) for r in self.relaxations],
            "joint_relaxation": [_relaxation_dict(r) for r in self.joint_relaxation],
            "devices_available": self.devices,
            "fleet": self.fleet.to_dict() if self.fleet else None,
            "meet_it_as_measured": [p.point_id for p in self.unsure],
            "n_without_spread": self.n_without_spread,
            "n_candidates": self.n_candidates,
            "n_measured": self.n_measured,
        }

    def text(self) -> str:
        """For a terminal, without colour."""
        asked = f"{self.sla} with {self.demand}" if str(self.demand) else str(self.sla)
        on = f" on {plural(self.devices, 'device')}" if self.devices is not None else ""
        lines = [f"Infeasible: of {plural(self.n_candidates, 'measured point')} none meets {asked}{on}"]
        if self.n_measured > self.n_candidates:
            lacking = plural(self.n_measured - self.n_candidates, "more point")
            lines.append(f"({lacking} took no part: a metric asked for was not measured there)")
        if self.unsure:
            lines.append(f"({plural(len(self.unsure), 'point')} would as measured, but not with {self.demand})")
        if self.n_without_spread:
            lines.append(f"({plural(self.n_without_spread, 'point')} could not be judged: {NO_SPREAD}; repeat them)")
        lines.append("")
        lines += [
            *_point_lines("Nearest", self.nearest, self.target, self.sla, self.shared),
            "",
            "Bounds there",
        ]
        for m in self.misses:
            best = value_text(m.bound.metric, m.best)
            value = point_value_text(self.nearest, m.bound.metric)
            lines.append(f"  {m.bound}: {self._state_text(m)} ({value}; best of any point {best})")
        if self.others_near:
            lines += ["", "Next nearest"]
            lines += [f"  {p.point_id}: {self._bounds_at(p)}" for p in self.others_near]
        if self.enough_to_drop:
            lines += ["", f"Dropping one of these is enough: {', '.join(map(str, self.enough_to_drop))}"]
        return "\n".join([*lines, *self._relaxation_lines(), "", *self._fleet_lines()])

    def _bounds_at(self, point: OperatingPoint) -> str:
        """Each bound at this point, and the target."""
        parts = [
            f"{b.metric} {point_value_text(point, b.metric)}"
            + (f" ({_percent(miss)} off)" if (miss := b.relative_miss(point.metrics[b.metric])) else "")
            for b in self.sla.bounds
        ]
        return ", ".join([*parts, self._reached(point)])

    def _fleet_lines(self) -> list[str]:
        if self.fleet is None:
            missed = ", ".join(str(m.bound) for m in self.misses if not m.kept)
            return [f"More devices do not help: replicas leave {missed} as it is at each load that was measured."]
        return [f"More devices: {self.fleet.text()} ({self._reached(self.fleet.point)})"]

    def _state_text(self, miss: Miss) -> str:
        if miss.kept:
            return "met"
        if miss.bound.meets(miss.value):
            unsure = self.demand.confidence is not None
            return f"met as measured, but not with {self.demand}" + (f" ({_sure_text(miss)})" if unsure else "")
        return f"missed by {_percent(miss.relative)}"

    def _relaxation_lines(self) -> list[str]:
        if not self.relaxations and not self.joint_relaxation:
            return []
        lines = ["", "Smallest relaxation that lets a point through"]
        for r in self.relaxations:
            lines.append(f"  {r.bound} -> {r.to} ({_percent(r.relative)} looser): {self._reached(r.point)}")
        alone = {r.bound for r in self.relaxations}
        lines += [f"  {bound}: loosening it alone is not enough" for bound in self.sla.bounds if bound not in alone]
        if len(self.joint_relaxation) > 1:
            together = " ".join(str(r.to) for r in self.joint_relaxation)
            most = max(r.relative for r in self.joint_relaxation)
            lines.append(f"  together: {together} (at most {_percent(most)} looser): {self._reached(self.nearest)}")
        return lines

    def _reached(self, point: OperatingPoint) -> str:
        value = point_value_text(point, self.target.name)
        return f"{engine_text(point, self.shared)} at {point.load_label}, {self.target.name} {value}"

    def __repr__(self) -> str:
        return self.text()


def point_dict(point: OperatingPoint) -> dict[str, Any]:
    """One operating point as plain JSON values, with its `vllm serve` line."""
    return {
        "point_id": point.point_id,
        "config_hash": point.config_hash,
        "engine": dict(point.engine),
        "load": dict(point.load),
        "load_label": point.load_label,
        "devices": point.devices,
        "n_repeats": point.n_repeats,
        "metrics": dict(point.metrics),
        "sd": dict(point.sd),
        "command": EngineConfig.from_dict(point.engine).serve_command(),
    }


def _point_lines(title: str, point: OperatingPoint, target: Metric, sla: Sla, shared: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([target.name, *(b.metric for b in sla.bounds), "output_throughput_tok_s"])
    width = max(len(name) for name in names)
    return [
        f"{title}: {point.point_id}",
        f"  engine  {engine_text(point, shared)}",
        f"  load    {point.load_label}: {load_text(point.load)} on {plural(point.devices, 'device')}",
        *(f"  {name:<{width}}  {point_value_text(point, name)}" for name in names),
    ]


def _bound_text(report: BoundReport, target: Metric, chosen: OperatingPoint, shared: Mapping[str, Any]) -> str:
    bound = report.bound
    here = (
        f"{bound}: here {point_value_text(chosen, bound.metric)}, {_percent(report.headroom)} to spare, "
        f"{_sure_text(report)}"
    )
    if report.relaxed is None:
        return f"{here}; costs nothing, dropping it would change nothing"
    change = "lower" if target.direction == "minimize" else "raise"
    there = report.relaxed
    return (
        f"{here}; dropping this bound would {change} {target.name} "
        f"from {point_value_text(chosen, target.name)} to {point_value_text(there, target.name)} "
        f"({engine_text(there, shared)} at {there.load_label}, {bound.metric} {point_value_text(there, bound.metric)})"
    )


def _sure_text(bound: BoundReport | Miss) -> str:
    if bound.probability is None:
        return NO_SPREAD
    evidence = f" ({bound.evidence})" if isinstance(bound, BoundReport) else ""
    return f"holds with probability {_chance(bound.probability)}{evidence}"


def _chance(p: float) -> str:
    return "> 0.999" if p > 0.999 else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _relaxation_dict(relaxation: Relaxation) -> dict[str, Any]:
    return {
        "bound": str(relaxation.bound),
        "to": str(relaxation.to),
        "relative": relaxation.relative,
        "point_id": relaxation.point.point_id,
    }


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if 0 < fraction < 0.1 else f"{100 * fraction:.0f} %"
