"""Quality of each numerics fingerprint, with intervals and the noise floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweep.decide.plots import theme
from sweep.decide.plots.bars import bars
from sweep.results.metrics import get_metric

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def quality_figure(table: pd.DataFrame, metric: str = "quality_kl") -> go.Figure:
    """A metric of each format with its 95 % interval, best on top, and the noise floor of the reference.

    table: as decide.quality.quality_table gives it; columns settings, <metric>, <metric>_low, <metric>_high and
    noise_floor_kl are used.
    """
    import plotly.graph_objects as go

    found = get_metric(metric)
    rows = table[table[metric].notna()] if metric in table else table[:0]
    floors = rows["noise_floor_kl"].dropna().tolist() if metric == "quality_kl" else []
    noise_floor = float(floors[0]) if floors else None
    figure = go.Figure()
    floor = "; left of the dashed line is within the noise of the reference itself" if noise_floor else ""
    theme.dress(
        figure,
        f"Quality by format: {found.label.split(' (')[0]}",
        f"one measurement for each numerics fingerprint, bars: 95 % intervals{floor}",
        height=170 + 34 * max(len(rows), 2),
    )
    if rows.empty:
        return theme.note(figure, f"no {metric} was measured")
    names = {metric: "value", f"{metric}_low": "low", f"{metric}_high": "high", "settings": "format"}
    rows = rows.rename(columns=names).sort_values("value", ascending=found.sign < 0)
    known = rows["low"].notna() & rows["high"].notna()
    figure.add_trace(
        go.Scatter(
            x=rows["value"],
            y=[theme.shorten(str(f), 46) for f in rows["format"]],
            mode="markers",
            marker={
                "size": 11,
                "symbol": ["circle" if k else "circle-open" for k in known],
                "color": theme.BLUE,
                "line": {"width": 1.4, "color": theme.INK},
            },
            error_x=bars(
                zip(rows["value"], rows["low"], rows["high"], strict=True), thickness=1.6, width=5, color=theme.INK
            ),
            hovertext=[
                f"<b>{theme.escape(str(f))}</b><br>{found.label}: {v:.4g}" + (f" [{a:.4g}, {b:.4g}]" if k else "")
                for f, v, a, b, k in zip(rows["format"], rows["value"], rows["low"], rows["high"], known, strict=True)
            ],
            hoverinfo="text",
            showlegend=False,
        )
    )
    values = [*rows["value"], *rows["low"].dropna(), *rows["high"].dropna()]
    figure.update_xaxes(**theme.metric_axis(found, [v for v in values if v > 0 or min(values) <= 0]))
    figure.update_yaxes(showgrid=True, ticks="")
    if noise_floor:
        figure.add_vline(x=noise_floor, line={"color": theme.GREY, "dash": "dash", "width": 1.4})
    return figure
