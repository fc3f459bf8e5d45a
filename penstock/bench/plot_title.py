"""Titles of plots, wrapped to the width of the figure."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def wrap_title(figure: Figure, title: str) -> None:
    """Set the title of a figure, wrapped to its width."""
    text = figure.suptitle(title)
    room = 0.96 * figure.bbox.width
    for width in range(len(title), 7, -1):
        text.set_text("\n".join(wrap(title, width, break_on_hyphens=False)))
        if text.get_window_extent().width <= room:
            return
