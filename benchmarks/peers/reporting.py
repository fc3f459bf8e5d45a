"""Output of comparisons: a Markdown table, to be edited for docs/performance.md, and a plot of ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
"""The content of a file that ``python -m benchmarks.peers run --json`` wrote."""

_HEADER = "| model | encoding | work | Penstock | peer | ratio | pairs | machine |"
_RULE = "|---|---|---|---:|---|---:|---:|---|"


def markdown_table(reports: Sequence[Report]) -> str:
    """Return a Markdown table with one row per measured value of each workload.

    The values of Penstock and of the peer are medians over the pairs of runs. The ratio is the median of the
    ratios of the pairs; the lowest and the highest ratio are in parentheses. The column ``machine`` has the
    median memory bandwidth and FLOP/s of the machine, measured before each pair.
    """
    lines = [_HEADER, _RULE]
    for report in reports:
        peer = f"{report['peer']} {report['peer_version']} {report['peer_encoding']}"
        for row in report["rows"]:
            figure = f"{row['work']} {row['of']}".strip()
            direction = ", less is better" if row["less_is_better"] else ""
            cells = [
                report["shape"],
                report["encoding"],
                f"{figure}{direction}",
                f"{format_number(row['median_ours'])} {row['unit']}".strip(),
                f"{format_number(row['median_theirs'])}, {peer}",
                f"**{row['ratio']:.2f}** ({row['lowest']:.2f} to {row['highest']:.2f})",
                str(len(row["ours"])),
                f"{row['gb_s']:.0f} GB/s, {row['tflop_s']:.2f} TFLOP/s",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_number(value: float) -> str:
    """Format a positive value: an integer from 100 on, else at most three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw the ratio of each figure as a bar, the range of the pairs' ratios, and a line at ratio 1.

    If a smaller value is better, the ratio is inverted. A longer bar is always better for Penstock.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [
        (f"{report['shape']} {report['encoding']}, {row['work']} {row['of']}".strip(), report, row)
        for report in reports
        for row in report["rows"]
    ]
    figure = Figure(figsize=(9, 1.5 + 0.32 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)  # this canvas needs no display
    axes = figure.subplots()
    for y, (_, _, row) in enumerate(bars):
        median, lowest, highest = ratios_where_more_is_better(row)
        color = "tab:blue" if median >= 1 else "tab:orange"
        axes.barh(y, median, color=color, alpha=0.8)
        axes.plot([lowest, highest], [y, y], color="black", linewidth=1)
    axes.axvline(1, color="black", linestyle=":")
    labels = [f"{name} / {report['peer']} {report['peer_encoding']}" for name, report, _ in bars]
    axes.set_yticks(range(len(bars)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ratio Penstock / peer: median and range of the pairs")
    figure.savefig(path, dpi=120)


def ratios_where_more_is_better(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the median, lowest and highest ratio of a row, inverted if less is better."""
    if row["less_is_better"]:
        return 1 / row["ratio"], 1 / row["highest"], 1 / row["lowest"]
    return row["ratio"], row["lowest"], row["highest"]
