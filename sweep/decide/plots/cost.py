"""From the headline price of a token to the one on the invoice: a waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from sweep.decide.plots import theme
from sweep.decide.wording import number_text
from sweep.measure.cost import Usage
from sweep.results.points import OperatingPoint

if TYPE_CHECKING:
    import plotly.graph_objects as go


_COST = "cost_usd_per_mtok"


def cost_steps(
    points: Sequence[OperatingPoint], point: OperatingPoint, usage: Usage
) -> tuple[list[tuple[str, float]], list[str]]:
    """Cost of one operating point step by step, for cost_figure, and the steps of which nothing is known.

    From the config's cheapest measured load to the point's own, then what `usage` adds (formula: measure/cost.py).
    """
    of_config = [p for p in points if p.config_hash == point.config_hash and p.provenance == point.provenance]
    costs = [p.metrics[_COST] for p in of_config if _COST in p.metrics]
    if _COST not in point.metrics:
        return [], []
    cost, startup_s = point.metrics[_COST], point.metrics.get("startup_s")
    steps = [("price ÷, throughput, at peak load", min(costs)), (f"at the, picked load, {point.load_label}", cost)]
    missing = []
    so_far = Usage()
    for stated, name, change in (
        (usage.utilization != 1, f"{usage.utilization:.0%} used, at the peak", {"utilization": usage.utilization}),
        (usage.peak_to_mean != 1, f"peak is, {usage.peak_to_mean:g} × mean", {"peak_to_mean": usage.peak_to_mean}),
        (
            usage.starts_per_day != 0,
            f"{usage.starts_per_day:g} starts, a day",
            {"starts_per_day": usage.starts_per_day},
        ),
    ):
        so_far = replace(so_far, **change)
        factor = so_far.factor(startup_s)
        if stated and factor is not None:
            steps.append((name, cost * factor))
        else:
            missing.append(next(iter(change)).replace("_", " "))
    return steps, missing


def cost_figure(steps: Sequence[tuple[str, float]], subtitle: str = "", missing: Sequence[str] = ()) -> go.Figure:
    """Waterfall of USD per million output tokens.

    steps: (what is now taken into account, cost so far), as cost_steps gives them; each bar is what a step adds. Commas
    break the lines of a name. missing: steps of which nothing is known; they are named, not drawn.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    unknown = f"; not stated in the config: {', '.join(missing)}" if missing else ""
    theme.dress(figure, "What a million output tokens really cost", subtitle + unknown, height=440)
    if not steps:
        return theme.note(figure, "no price or no throughput is known")
    costs = [cost for _, cost in steps]
    changes = [costs[0], *(b - a for a, b in pairwise(costs))]
    texts = [
        number_text(changes[0]),
        *(f"{'+' if c >= 0 else '−'}{number_text(float(f'{abs(c):.3g}'))}" for c in changes[1:]),
    ]
    names = [theme.escape(name).replace(", ", "<br>") for name, _ in steps]
    figure.add_trace(
        go.Waterfall(
            x=[*names, "<b>on the invoice</b>"] if len(steps) > 1 else names,
            y=[*changes, costs[-1]] if len(steps) > 1 else changes,
            measure=["absolute", *["relative"] * (len(steps) - 1), *(["total"] if len(steps) > 1 else [])],
            text=[*texts, f"<b>{number_text(costs[-1])}</b>"] if len(steps) > 1 else texts,
            textposition="outside",
            cliponaxis=False,
            increasing={"marker": {"color": theme.ORANGE, "line": {"color": theme.INK, "width": 1}}},
            decreasing={"marker": {"color": theme.GREEN, "line": {"color": theme.INK, "width": 1}}},
            totals={"marker": {"color": theme.BLUE, "line": {"color": theme.INK, "width": 1}}},
            connector={"line": {"color": "#999", "width": 1, "dash": "dot"}},
            hoverinfo="skip",
        )
    )
    figure.update_xaxes(tickangle=0, tickfont={"size": 11})
    figure.update_yaxes(title_text="USD per million output tokens", range=[0, 1.15 * max(costs)])
    return figure
