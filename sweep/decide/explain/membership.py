"""How sure the front is: the probability of each point being on it, and the band in which it may lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sweep.decide.wording import engine_text, shared_settings
from sweep.results.front import eligible, front
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint
from sweep.results.uncertainty import Spreads, front_probability, minimized_draws, on_front

if TYPE_CHECKING:
    import pandas as pd

SURE, OPEN = 0.9, 0.1
LEVELS = (0.1, 0.5, 0.9)
_BAND_DRAWS = 256


def membership(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> pd.DataFrame:
    """One row for each point that may be on the front, most probable first, then by the first objective.

    Columns: point_id, load_label, engine (words), on_front (as measured), probability (share of the draws of
    results.uncertainty in which no other point dominates it), and the objectives.
    """
    import pandas as pd

    shared = shared_settings(points)
    kept = {p.point_id for p in front(points, objectives)}
    probability = front_probability(points, objectives)
    rows = [
        {
            "point_id": p.point_id,
            "load_label": p.load_label,
            "engine": engine_text(p, shared),
            "on_front": p.point_id in kept,
            "probability": probability[p.point_id],
            **{name: p.metrics[name] for name in objectives},
        }
        for p in eligible(points, objectives)
    ]
    columns = ["point_id", "load_label", "engine", "on_front", "probability", *objectives]
    frame = pd.DataFrame(rows, columns=pd.Index(columns))
    first = get_metric(objectives[0])
    frame = frame.sort_values(["probability", first.name], ascending=[False, first.direction == "minimize"])
    return frame.reset_index(drop=True)


def unknown_spread(points: Sequence[OperatingPoint], objectives: Sequence[str]) -> list[str]:
    """The objectives of which no eligible point has a known spread: the probabilities take them as exact."""
    spreads, candidates = Spreads(points), eligible(points, objectives)
    return [name for name in objectives if all(spreads.of(p, name) is None for p in candidates)]


def front_band(points: Sequence[OperatingPoint], x: str, y: str, levels: Sequence[float] = LEVELS) -> pd.DataFrame:
    """Where the front of two metrics may lie: corners of its attainment surfaces, in natural units.

    Columns level, x, y, sorted by x within a level. What lies behind the surface of level q is dominated in a share q
    of the draws (the empirical attainment function: Grunert da Fonseca, Fonseca & Hall 2001; computed by moocore).
    So the lowest level is the hopeful edge and the highest the safe one. Empty without a point or without a spread.
    """
    import moocore
    import numpy as np
    import pandas as pd

    candidates = eligible(points, [x, y])
    if not candidates or len(unknown_spread(points, [x, y])) == 2:
        return pd.DataFrame(columns=pd.Index(["level", "x", "y"]))
    signs = np.array([get_metric(x).sign, get_metric(y).sign])
    drawn = minimized_draws(candidates, [x, y], n=_BAND_DRAWS)
    member = on_front(drawn)
    sets = np.repeat(np.arange(len(drawn)), member.sum(axis=1))
    surface = moocore.eaf(drawn[member], sets, percentiles=[100 * level for level in levels])
    frame = pd.DataFrame({"level": surface[:, 2] / 100, "x": surface[:, 0] * signs[0], "y": surface[:, 1] * signs[1]})
    return frame.sort_values(["level", "x"]).reset_index(drop=True)
