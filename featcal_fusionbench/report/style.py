"""Colours and the look of axes that all figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BLUE", "GREEN", "GRID", "INK", "MUTED", "ORANGE", "PURPLE", "SKY", "clear_axes"]

# From the palette of Okabe and Ito, which is told apart with every common form of colour blindness;
# they also differ in lightness.
ORANGE, BLUE, GREEN, PURPLE, SKY = "#E07B00", "#0060A0", "#009E73", "#CC79A7", "#56B4E9"
INK, MUTED, GRID = "#222222", "#6B6B6B", "#E4E4E4"


def clear_axes(axes: Axes, labelsize: float) -> None:
    """Take everything from an axes but the line below and the labels."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(labelsize=labelsize, colors=INK, length=0, pad=6)
    axes.set_axisbelow(True)
