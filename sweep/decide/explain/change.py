"""How much a metric changes from one point to another, and whether that is more than noise.

Latencies, rates and costs change by a factor: the change is the ratio after / before, averaged over pairs on the log
scale, so that halving and doubling cancel. Quality and fractions change by a difference. The standard error of one
pair joins those of its two points (results.uncertainty); pairs of the same two configs at several loads share their
launches and count as one. From three pairs of configs on, the spread between the pairs counts where it is larger: it
holds the noise and how differently the change works in different surroundings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from sweep.decide.wording import number_text
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import Spreads, t_cdf, t_quantile

Points = tuple[OperatingPoint, OperatingPoint]


@dataclass(frozen=True)
class Change:
    """metric: what changes. relative: value is a ratio (1: none), else a difference in the metric's unit (0: none).

    interval: around value at the confidence asked for; None where a spread is unknown. pairs: of configs.
    """

    metric: str
    relative: bool
    value: float
    interval: tuple[float, float] | None
    pairs: int

    @property
    def none(self) -> float:
        """The value that means no change."""
        return 1.0 if self.relative else 0.0

    @property
    def beyond_noise(self) -> bool:
        """Whether no change lies outside the interval; False also where noise is unknown."""
        return self.interval is not None and not self.interval[0] <= self.none <= self.interval[1]

    @property
    def worse(self) -> bool:
        """Whether the change is for the worse, whatever the noise."""
        return get_metric(self.metric).sign * (self.value - self.none) > 0

    def within(self, margin: float) -> bool:
        """Whether the whole interval lies within this fraction of no change (for a difference: covers none)."""
        if self.interval is None:
            return False
        if not self.relative:
            return not self.beyond_noise
        return 1 / (1 + margin) <= self.interval[0] and self.interval[1] <= 1 + margin

    @property
    def text(self) -> str:
        """ "ttft_p99_ms -12 % (-14 to -10)"; a difference in the metric's unit."""
        if self.relative:
            numbers = [percent_text(v - 1) for v in (self.value, *(self.interval or ()))]
        else:
            numbers = [f"{'+' if v > 0 else ''}{number_text(v)}" for v in (self.value, *(self.interval or ()))]
        unit = " %" if self.relative else ""
        around = f" ({numbers[1]} to {numbers[2]})" if self.interval is not None else " (noise unknown)"
        return f"{self.metric} {numbers[0]}{unit}{around}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "beyond_noise": self.beyond_noise, "worse": self.worse}


def percent_text(fraction: float) -> str:
    """A signed percentage without its sign for per cent: "+3.1", "-42", "+0"."""
    value = round(100 * fraction, 1)
    return "+0" if value == 0 else f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.1f}"


def changes(
    pairs: Sequence[Points], metrics: Sequence[str], spreads: Spreads, *, confidence: float = 0.95
) -> dict[str, Change]:
    """The mean change of each metric over pairs (before, after); metrics that no pair has are absent."""
    found = {name: change(pairs, name, spreads, confidence=confidence) for name in metrics}
    return {name: value for name, value in found.items() if value is not None}


def change(
    pairs: Sequence[Points], metric: str, spreads: Spreads | Mapping[str, Spreads], *, confidence: float = 0.95
) -> Change | None:
    """The mean change of a metric over pairs (before, after). spreads: of the study, or of each side.

    None if no pair has the metric on both sides.
    """
    having = [(a, b) for a, b in pairs if metric in a.metrics and metric in b.metrics]
    if not having:
        return None
    relative = is_relative(metric) and all(p.metrics[metric] > 0 for pair in having for p in pair)
    before, after = (spreads["before"], spreads["after"]) if isinstance(spreads, Mapping) else (spreads, spreads)
    groups: dict[tuple[str, str], list[Step]] = {}
    for a, b in having:
        found = step(a, b, metric, before, after, relative=relative)
        groups.setdefault((a.config_hash, b.config_hash), []).append(found)
    value, interval = mean_step(list(groups.values())).estimate(confidence, logarithm=relative)
    return Change(metric, relative, value, interval, len(groups))


def is_relative(metric: str) -> bool:
    """Whether a metric's changes are told as ratios: all but quality and fractions."""
    return not metric.startswith("quality_") and get_metric(metric).unit != "fraction"


@dataclass(frozen=True)
class Step:
    """A change of one pair on its own scale, with its standard error; None: unknown. degrees: None for a normal."""

    value: float
    error: float | None
    degrees: int | None

    @property
    def p_value(self) -> float | None:
        """Two-sided, of no change; None where noise is unknown."""
        if self.error is None:
            return None
        if self.error == 0:
            return float(self.value == 0)
        return 2 * (1 - t_cdf(abs(self.value) / self.error, self.degrees))

    def estimate(self, confidence: float, *, logarithm: bool) -> tuple[float, tuple[float, float] | None]:
        """(value, interval), as factors where the scale is logarithmic."""
        scale = _factor if logarithm else float
        if self.error is None:
            return scale(self.value), None
        reach = t_quantile((1 + confidence) / 2, self.degrees) * self.error
        return scale(self.value), (scale(self.value - reach), scale(self.value + reach))


def step(a: OperatingPoint, b: OperatingPoint, metric: str, before: Spreads, after: Spreads, *, relative: bool) -> Step:
    """The change from a to b, on the log scale if relative. before, after: the spreads of the studies of a and b."""
    u, v = a.metrics[metric], b.metrics[metric]
    value = math.log(v / u) if relative else v - u
    if metric.startswith("quality_") and a.fingerprint == b.fingerprint and before is after:
        return Step(value, 0.0, None)  # one measurement serves both
    first, second = before.of(a, metric), after.of(b, metric)
    if first is None or second is None:
        return Step(value, None, None)
    scale = (u, v) if relative else (1.0, 1.0)
    error = math.hypot(first.standard_error / scale[0], second.standard_error / scale[1])
    return Step(value, error, fewest([first.degrees, second.degrees]))


def mean_step(groups: Sequence[Sequence[Step]]) -> Step:
    """The mean over groups of steps. Steps of one group (the same configs at several loads) share their noise."""
    steps = [_together(group) for group in groups]
    n, values = len(steps), [s.value for s in steps]
    errors = [s.error for s in steps if s.error is not None]
    error = math.hypot(*errors) / n if len(errors) == n else None
    if n >= 3:
        between = stdev(values) / math.sqrt(n)
        if error is None or between > error:
            return Step(fmean(values), between, n - 1)
    return Step(fmean(values), error, fewest(s.degrees for s in steps))


def _together(steps: Sequence[Step]) -> Step:
    errors = [s.error for s in steps if s.error is not None]
    error = fmean(errors) if len(errors) == len(steps) else None
    return Step(fmean(s.value for s in steps), error, fewest(s.degrees for s in steps))


def fewest(degrees: Iterable[int | None]) -> int | None:
    """Degrees of freedom of the least known part; None: all are as good as known."""
    return min((d for d in degrees if d is not None), default=None)


def _factor(logarithm: float) -> float:
    return math.exp(max(-500.0, min(500.0, logarithm)))
