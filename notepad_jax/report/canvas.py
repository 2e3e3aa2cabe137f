"""What all pictures have in common: their colours, bare axes, and how one becomes a file.

Drawn with matplotlib's Agg canvas on plain `Figure` objects, so nothing global is touched
and no display is needed. Above: `accuracy_plot` and `training_plot`.
"""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from notepad_jax.telemetry.identity import write_whole

BEFORE, AFTER = "#b0602a", "#1f5fa8"  # told apart by people with any colour vision, and in grey
INK, MUTED, GRID = "#22262b", "#7a828c", "#e6e8eb"
DPI = 160


def bare(axes: Axes) -> None:
    """Takes the ink off everything that is not data."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, pad=6)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a PNG, at once or not at all, and the folders above it; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, facecolor="white")
    write_whole(path, drawn.getvalue())
    return path
