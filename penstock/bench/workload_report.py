"""Reports of `penstock bench run`: a table for the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.bench.plot_title import wrap_title
from penstock.bench.workloads import WORKLOADS, Figure
from penstock.errors import MissingDependencyError


def print_figures(figures: Sequence[Figure], title: str, console: Console) -> None:
    """Print one row for each figure, and the description of each workload."""
    table = Table("work", "of", title=title, title_justify="left")
    for name in ("median", "lowest", "highest", "unit"):
        table.add_column(name, justify="left" if name == "unit" else "right")
    for figure in figures:
        values = (figure.median, min(figure.runs), max(figure.runs))
        table.add_row(figure.workload, figure.quantity, *map(_format_value, values), figure.unit)
    console.print(table)
    for workload in dict.fromkeys(figure.workload for figure in figures):
        console.print(f"{workload}: {WORKLOADS[workload]}", markup=False, highlight=False, style="dim")


def plot_figures(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Write a PNG file with a plot of all runs and of the medians.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "bench", "--plot") from error
    workloads = list(dict.fromkeys(figure.workload for figure in figures))
    picture = Picture(figsize=(3.2 * len(workloads) + 1, 4), layout="constrained")
    FigureCanvasAgg(picture)  # renders without a display
    wrap_title(picture, title)
    for column, workload in enumerate(workloads, 1):
        axes = picture.add_subplot(1, len(workloads), column)
        work_figures = [figure for figure in figures if figure.workload == workload]
        axes.bar(
            [figure.quantity for figure in work_figures],
            [figure.median for figure in work_figures],
            alpha=0.5,
        )
        for figure in work_figures:
            axes.scatter([figure.quantity] * len(figure.runs), figure.runs, s=9, color="black")
        axes.set(title=workload, ylabel=work_figures[0].unit)
        axes.tick_params(axis="x", labelrotation=20)
    picture.savefig(path, format="png", dpi=120)


def _format_value(value: float) -> str:
    """Return a value as text: a whole number if it is at least 100, otherwise three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
