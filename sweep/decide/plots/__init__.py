"""The figures, in one visual language (theme.py). Each takes points or frames and returns a Plotly figure."""

from sweep.decide.plots.cost import cost_figure
from sweep.decide.plots.failures import failure_figure
from sweep.decide.plots.front import front_figure
from sweep.decide.plots.front3d import front3d_figure
from sweep.decide.plots.hover import Hover, hover_text
from sweep.decide.plots.knobs import knobs_figure
from sweep.decide.plots.latency import latency_figure
from sweep.decide.plots.progress import progress_figure
from sweep.decide.plots.quality import quality_figure
from sweep.decide.plots.techniques import technique_figure, techniques_figure

__all__ = [
    "Hover",
    "cost_figure",
    "failure_figure",
    "front3d_figure",
    "front_figure",
    "hover_text",
    "knobs_figure",
    "latency_figure",
    "progress_figure",
    "quality_figure",
    "technique_figure",
    "techniques_figure",
]
