"""The estimated front of a search space, for `sweep plan`: where it is worth looking, before any GPU is paid for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sweep.config import HardwareConfig
from sweep.engine.engine_args import EngineConfig
from sweep.estimate.kernels import INSTALL, PACKAGE, SYSTEMS, VERSION, is_available
from sweep.estimate.knobs import hardware_base
from sweep.estimate.steady import Estimate, Lengths, Unknown, estimate
from sweep.measure.cost import cost_usd_per_mtok
from sweep.measure.workload import Load
from sweep.results.metrics import get_metric

_ROWS = 8
_DEFAULT_OBJECTIVES = ("cost_usd_per_mtok", "ttft_mean_ms")
# Any statistic of a metric is ranked by its estimated mean: the first prefix that matches.
_VALUES: Sequence[tuple[str, Callable[[_Context], float | None]]] = (
    ("cost_usd_per_mtok", lambda c: cost_usd_per_mtok(c.price, c.devices, c.point.output_throughput_tok_s)),
    ("ttft", lambda c: c.point.ttft_ms),
    ("tpot", lambda c: c.point.tpot_ms),
    ("itl", lambda c: c.point.tpot_ms),
    ("user_throughput", lambda c: 1e3 / c.point.tpot_ms if c.point.tpot_ms else None),
    ("output_throughput_per_device", lambda c: (c.point.output_throughput_tok_s or 0.0) / c.devices),
    ("output_throughput", lambda c: c.point.output_throughput_tok_s),
)


@dataclass(frozen=True)
class LaunchTimes:
    """What the seconds of a launch are made of."""

    start_and_stop_s: float = 0.0
    requests: int = 0
    max_load_s: float = 0.0

    def load_s(self, output_tok_s: float | None, lengths: Lengths) -> float:
        """Of one load, by the estimated throughput."""
        if not output_tok_s:
            return self.max_load_s
        return min(self.max_load_s, self.requests * lengths.output_tokens / output_tok_s)


@dataclass(frozen=True)
class _Context:
    point: Estimate
    devices: int
    price: float


@dataclass(frozen=True)
class Row:
    """One estimated operating point: means, at steady state."""

    engine: str
    load: str
    cost_usd_per_mtok: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    output_throughput_tok_s: float | None


@dataclass(frozen=True)
class Candidate:
    """A configuration that would start. seconds: of a launch. values: a row of signed objectives for each load."""

    devices: int
    seconds: float
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Preview:
    """configs: engine configs looked at; of them would_not_start, too_close to call, unknown (reason -> how many).

    rows: spread over the front of `objectives` (those of the study that can be estimated), front_size points long.
    candidates: name -> every configuration with all of the objectives, lower is better.
    """

    configs: int
    would_not_start: int
    too_close: int
    unknown: Mapping[str, int]
    objectives: tuple[str, ...]
    front_size: int
    rows: tuple[Row, ...]
    candidates: Mapping[str, Candidate] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(replace(self, candidates={}))

    def text(self) -> str:
        """For people."""
        share = f"{self.would_not_start / self.configs:.0%}" if self.configs else "none"
        lines = [
            f"estimate      {self.configs:,} configurations by measured kernels ({PACKAGE} {VERSION}), no measurement:"
            f" {share} would run out of memory at start, {self.too_close:,} are too close to call",
            *(f"              {count:,} unknown: {reason}" for reason, count in self.unknown.items()),
        ]
        if self.rows:
            head = ("USD/Mtok", "TTFT ms", "TPOT ms", "tok/s", "load", "engine (estimated front, means)")
            cells = [head, *(_cells(row) for row in self.rows)]
            widths = [max(len(row[i]) for row in cells) for i in range(len(head) - 1)]
            for row in cells:
                numbers = "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=False))
                lines.append(f"              {numbers}  {row[-1]}")
            what = " and ".join(self.objectives)
            lines.append(f"              {len(self.rows)} of {self.front_size} estimated front points of {what}")
        return "\n".join(lines)


def unavailable(hardware: HardwareConfig) -> str | None:
    """Why nothing can be estimated here, or None."""
    if not is_available():
        return f"not available: {INSTALL}"
    if hardware_base(hardware.name) not in SYSTEMS or hardware.memory_gib is None:
        return f"not available: no kernel data for hardware {hardware.name}"
    return None


def preview(
    engines: Mapping[str, tuple[EngineConfig, int]],
    hardware: HardwareConfig,
    lengths: Lengths,
    loads: Sequence[Load],
    objectives: Sequence[str],
    launch: LaunchTimes | None = None,
) -> Preview:
    """Estimate every engine config under every load. engines: name for people -> (config, devices)."""
    times = launch or LaunchTimes()
    chosen = tuple(name for name in objectives if _value_of(name) is not None)
    chosen = chosen if len(chosen) > 1 else _DEFAULT_OBJECTIVES
    verdicts: Counter[bool | None] = Counter()
    unknown: Counter[str] = Counter()
    points: list[Row] = []
    values: list[list[float]] = []
    candidates: dict[str, Candidate] = {}
    simplest_first = sorted(engines.items(), key=lambda item: len(item[1][0].args))  # of equals, the first is shown
    for name, (engine, devices) in simplest_first:
        found: Estimate | Unknown | None = None
        seconds, before = times.start_and_stop_s, len(values)
        for load in loads:
            found = estimate(engine, hardware, lengths, load)
            if isinstance(found, Unknown) or found.fits is False:
                break
            seconds += times.load_s(found.output_throughput_tok_s, lengths)
            context = _Context(found, devices, hardware.price_usd_per_device_hour)
            row = [_signed(objective, context) for objective in chosen]
            if None not in row:
                values.append([v for v in row if v is not None])
                cost = cost_usd_per_mtok(context.price, devices, found.output_throughput_tok_s)
                points.append(Row(name, load.label, cost, found.ttft_ms, found.tpot_ms, found.output_throughput_tok_s))
        if len(values) > before:
            candidates[name] = Candidate(devices, seconds, tuple(tuple(row) for row in values[before:]))
        if isinstance(found, Unknown):
            unknown[found.reason] += 1
        elif found is not None:
            verdicts[found.fits] += 1
    front = _front(values)
    shown = sorted({front[round(i * (len(front) - 1) / max(_ROWS - 1, 1))] for i in range(_ROWS)}) if front else []
    order = {index: place for place, index in enumerate(front)}
    return Preview(
        configs=len(engines),
        would_not_start=verdicts[False],
        too_close=verdicts[None],
        unknown=dict(unknown.most_common()),
        objectives=chosen,
        front_size=len(front),
        rows=tuple(points[i] for i in sorted(shown, key=order.__getitem__)),
        candidates=candidates,
    )


def _front(values: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the non-dominated rows (lower is better), best in the first column first."""
    import moocore
    import numpy as np

    if not values:
        return []
    keep = moocore.is_nondominated(np.asarray(values, dtype=float))  # of equal rows, the first
    return sorted((i for i, kept in enumerate(keep) if kept), key=lambda i: tuple(values[i]))


def estimated_objective(objective: str, point: Estimate, devices: int, price: float) -> float | None:
    """The value of a metric at an estimated point, natural units; None if not estimated. price: USD per device-hour."""
    value_of = _value_of(objective)
    return None if value_of is None or point.tpot_ms is None else value_of(_Context(point, devices, price))


def _value_of(objective: str) -> Callable[[_Context], float | None] | None:
    return next((value for prefix, value in _VALUES if objective.startswith(prefix)), None)


def _signed(objective: str, context: _Context) -> float | None:
    value_of = _value_of(objective)
    value = None if value_of is None else value_of(context)
    return None if value is None else get_metric(objective).sign * value


def _cells(row: Row) -> tuple[str, ...]:
    numbers = (row.cost_usd_per_mtok, row.ttft_ms, row.tpot_ms, row.output_throughput_tok_s)
    texts = ["-" if n is None else f"{n:,.0f}" if n >= 1000 else f"{n:.3g}" for n in numbers]
    return (*texts, row.load, row.engine)
