"""`wrap_title`: sets the title of a plot."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def wrap_title(figure: Figure, title: str) -> None:
    """Set the title of a figure, with line breaks so that the title fits into the width of the figure."""
    text = figure.suptitle(title)
    max_width = 0.96 * figure.bbox.width
    for width in range(len(title), 7, -1):
        text.set_text("\n".join(wrap(title, width, break_on_hyphens=False)))
        if text.get_window_extent().width <= max_width:
            return
