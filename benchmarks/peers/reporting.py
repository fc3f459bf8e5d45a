"""What a comparison found, for people: a Markdown table as docs/performance.md has it, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]

_HEAD = "| model | encoding | work | Penstock | peer | ratio | pairs | machine |"
_RULE = "|---|---|---|---:|---|---:|---:|---|"


def table_of(reports: Sequence[Report]) -> str:
    """A Markdown table, a row for each figure; the best ratio of a column's peers is left to the reader.

    Figures are medians, and so is the ratio: of the pairs' own ratios, with the lowest and the highest.
    Beside each stand the GB/s and the TFLOP/s that the machine gave before the pairs, medians too.
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
    """Three digits and more, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draws the ratios of all figures, the spread of their pairs and the line of equals.

    Where less is better the ratio is turned round: to the right is always better for Penstock.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [
        (f"{report['shape']} {report['encoding']}, {row['work']} {row['of']}".strip(), report, row)
        for report in reports
        for row in report["rows"]
    ]
    figure = Figure(figsize=(9, 1.5 + 0.32 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen
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
    axes.set_xlabel("Penstock's figure by the peer's: median of pairs, lowest to highest")
    figure.savefig(path, dpi=120)


def better_to_the_right(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """The ratio, its lowest and its highest, such that more is better."""
    if row["less_is_better"]:
        return 1 / row["ratio"], 1 / row["highest"], 1 / row["lowest"]
    return row["ratio"], row["lowest"], row["highest"]
