"""Titles of plots fit into the width of the picture."""

from __future__ import annotations

import pytest

from penstock.bench.plot_title import wrap_title

LONG_TITLE = (
    "/models/a-model-with-a-rather-long-name, bfloat16, kernels cpu (avx512), "
    "2 threads, AMD EPYC 9B45 128-Core Processor; decoding replayed"
)


@pytest.mark.parametrize("width_inches", [4.2, 7.4, 11.0])
@pytest.mark.parametrize("title", ["short", LONG_TITLE, "x" * 200])
def test_a_title_is_wrapped_to_the_width_of_the_picture(width_inches: float, title: str) -> None:
    figure_module = pytest.importorskip("matplotlib.figure", reason="needs the extra bench")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_module.Figure(figsize=(width_inches, 4))
    FigureCanvasAgg(figure)
    wrap_title(figure, title)
    (text,) = figure.texts
    assert "".join(text.get_text().split()) == "".join(title.split())
    title_extent = text.get_window_extent()
    assert title_extent.x0 >= 0
    assert title_extent.x1 <= figure.bbox.width
    assert ("\n" in text.get_text()) == (title != "short")
