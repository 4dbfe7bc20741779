"""What decide/explain has to say, as the report's figures and sentences. Each is worked out once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import TYPE_CHECKING

from sweep.decide.explain.cliffs import Cliff, cliffs
from sweep.decide.explain.importance import importance
from sweep.decide.explain.membership import front_band
from sweep.decide.explain.progress import Progress, progress
from sweep.decide.explain.techniques import TechniqueEffect, techniques
from sweep.decide.explain.verdict import against_defaults, against_random
from sweep.decide.opened import Study
from sweep.decide.wording import plural
from sweep.results.front import eligible
from sweep.results.metrics import get_metric

if TYPE_CHECKING:
    import pandas as pd

_MOST_CLIFFS = 8
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Findings:
    """Everything the report says beyond the measurements themselves. verdicts: sentences."""

    bands: dict[tuple[str, str], pd.DataFrame]
    cliffs: list[Cliff]
    techniques: list[TechniqueEffect]
    importance: pd.DataFrame
    progress: Progress | None
    verdicts: list[str]


def findings(study: Study) -> Findings:
    """Work all of it out. Needs measured points and objectives."""
    points, objectives = study.operating_points, study.objectives
    comparable = eligible(points, objectives)  # the staircases join these, so their bands do too
    return Findings(
        bands={pair: front_band(comparable, *pair) for pair in combinations(objectives, 2)},
        cliffs=cliffs(points, objectives),
        techniques=techniques(points, objectives),
        importance=importance(points, objectives),
        progress=progress(study),
        verdicts=[against_defaults(points, objectives).text, against_random(study).text],
    )


def knob_shares(found: Findings) -> dict[str, float]:
    """knob -> its largest share of an objective's variance; the load, which every figure shows anyway, left out."""
    frame = found.importance
    rows = frame[(frame["knob"] != "load") & frame["share"].notna()]
    return {str(k): float(v) for k, v in rows.groupby("knob")["share"].max().items()}


def importance_table(found: Findings) -> str:
    """Share of each objective's variance that a knob explains, the largest first."""
    frame = found.importance[found.importance["share"] >= _LEAST_SHARE]
    cells = "".join(
        f"<tr><td>{escape(get_metric(objective).label)}</td><td><code>{escape(knob)}</code></td>"
        f"<td class='number'>{share:.0%}</td><td class='number'>{'' if math.isnan(p) else f'{p:.3f}'}</td></tr>"
        for objective, knob, share, p in frame.groupby("objective", sort=False)
        .head(6)[["objective", "knob", "share", "p_value"]]
        .itertuples(index=False)
    )
    causes = "".join(
        f"<p class='note'>{escape(get_metric(name).label)}: cannot tell: {escape(cause)}.</p>"
        for name, cause in found.importance.attrs.get("cause", {}).items()
    )
    if not cells:
        return causes
    return (
        "<div class='scroll'><table><thead><tr><th>objective</th><th>knob</th><th class='number'>share of variance</th>"
        f"<th class='number'>p</th></tr></thead><tbody>{cells}</tbody></table></div>{causes}"
    )


def cliff_sentences(found: Findings) -> list[str]:
    """The largest cliffs in words."""
    more = len(found.cliffs) - _MOST_CLIFFS
    told = [escape(c.text) for c in found.cliffs[:_MOST_CLIFFS]]
    return [*told, f"and {plural(more, 'smaller cliff')}"] if more > 0 else told


def cliff_pairs(found: Findings) -> list[tuple[str, str]]:
    """The ends of the largest jumps, for the figure."""
    return [(c.point_id, c.other_id) for c in found.cliffs if c.kind == "jump"][:_MOST_CLIFFS]
