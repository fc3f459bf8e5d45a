"""Reports of comparisons: the Markdown table of docs/performance.md, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]

_HEAD = "| model | encoding | work | Penstock | peer | ratio | pairs | machine |"
_RULE = "|---|---|---|---:|---|---:|---:|---|"


def table_of(reports: Sequence[Report]) -> str:
    """Return a Markdown table with a row per figure.

    Figures are medians. The ratio is the median of the ratios of the pairs, with the lowest and the highest.
    Each row has the medians of the GB/s and TFLOP/s that the machine reached before the pairs.
    """
    lines = [_HEAD, _RULE]
    for report in reports:
        peer = f"{report['peer']} {report['peer_version']} {report['peer_encoding']}"
        for row in report["rows"]:
            work = f"{row['work']} {row['of']}".strip()
            less = ", less is better" if row["less_is_better"] else ""
            cells = [
                report["shape"],
                report["encoding"],
                f"{work}{less}",
                f"{number(row['median_ours'])} {row['unit']}".strip(),
                f"{number(row['median_theirs'])}, {peer}",
                f"**{row['ratio']:.2f}** ({row['lowest']:.2f} to {row['highest']:.2f})",
                str(len(row["ours"])),
                f"{row['gb_s']:.0f} GB/s, {row['tflop_s']:.2f} TFLOP/s",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Format a value with at least three digits and without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw the ratios of all figures, the spread of their pairs and a line at ratio 1.

    Ratios of figures where less is better are inverted: a longer bar is always better for Penstock.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [
        (f"{report['shape']} {report['encoding']}, {row['work']} {row['of']}".strip(), report, row)
        for report in reports
        for row in report["rows"]
    ]
    figure = Figure(figsize=(9, 1.5 + 0.32 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display
    axes = figure.subplots()
    for place, (_, _, row) in enumerate(bars):
        middle, low, high = better_to_the_right(row)
        color = "tab:blue" if middle >= 1 else "tab:orange"
        axes.barh(place, middle, color=color, alpha=0.8)
        axes.plot([low, high], [place, place], color="black", linewidth=1)
    axes.axvline(1, color="black", linestyle=":")
    labels = [f"{name} / {report['peer']} {report['peer_encoding']}" for name, report, _ in bars]
    axes.set_yticks(range(len(bars)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("Penstock / peer: median of pairs, lowest to highest")
    figure.savefig(path, dpi=120)


def better_to_the_right(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the ratio, its lowest and its highest value, inverted if less is better."""
    if row["less_is_better"]:
        return 1 / row["ratio"], 1 / row["highest"], 1 / row["lowest"]
    return row["ratio"], row["lowest"], row["highest"]
