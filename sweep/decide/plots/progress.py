"""What the night bought: the front's hypervolume over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweep.decide.plots import theme

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def progress_figure(frame: pd.DataFrame | None, text: str = "") -> go.Figure:
    """Share of the final hypervolume over device-hours, one step for each point that moved the front.

    frame: columns device_s, share, gain, point_id, as explain.progress gives it; None while nothing is measured.
    text: one sentence, for instance what is probably left.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    theme.dress(figure, "Progress of the front", text, height=420)
    if frame is None or frame.empty:
        return theme.note(figure, "nothing measured yet")
    hours = frame["device_s"] / 3600
    figure.add_trace(
        go.Scatter(
            x=hours,
            y=frame["share"],
            mode="lines",
            line={"shape": "hv", "color": theme.BLUE, "width": 2},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    moved = frame[frame["gain"] > 0]
    figure.add_trace(
        go.Scatter(
            x=moved["device_s"] / 3600,
            y=moved["share"],
            mode="markers",
            marker={"symbol": "diamond", "size": 8, "color": theme.ORANGE, "line": {"width": 1, "color": theme.INK}},
            name="a point that moved the front",
            customdata=list(moved["point_id"]),
            hovertext=[
                f"<b>{theme.escape(p)}</b><br>after {h:.3g} device-hours<br>{share:.1%} of the final hypervolume"
                for p, h, share in zip(moved["point_id"], moved["device_s"] / 3600, moved["share"], strict=True)
            ],
            hoverinfo="text",
        )
    )
    figure.update_xaxes(title_text="Device-hours spent", rangemode="tozero")
    low = float(frame["share"].min())
    figure.update_yaxes(
        title_text="Share of the final hypervolume",
        range=[max(0, 1.25 * low - 0.25), 1 + 0.04 * (1 - low)],
        tickformat=".4~%",
    )
    figure.update_layout(legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 0.04, "yanchor": "bottom"})
    return figure
