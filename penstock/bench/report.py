"""Reports of a load test: a table for the terminal, and a plot."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.bench.load import Measurement
from penstock.bench.plot_title import wrap_title
from penstock.bench.summary import PERCENTILES, Summary
from penstock.errors import MissingDependencyError


def print_summary(summary: Summary, console: Console) -> None:
    """Print throughput, latencies and errors."""
    state = "interrupted: " if summary.is_interrupted else ""
    console.print(
        f"{state}{summary.completed} of {summary.requests} requests in {summary.seconds:.2f} s, "
        f"{summary.requests_per_second:.2f} requests/s",
        highlight=False,
    )
    cached = f", {summary.cached_tokens} of them cached" if summary.cached_tokens else ""
    console.print(
        f"tokens in  {summary.prompt_tokens:>9}, {summary.prompt_tokens_per_second:>9.1f} a second{cached}\n"
        f"tokens out {summary.completion_tokens:>9}, "
        f"{summary.completion_tokens_per_second:>9.1f} a second",
        highlight=False,
    )
    if latencies := summary.latencies():
        table = Table("milliseconds")
        for name in ("mean", *(f"p{percent}" for percent in PERCENTILES), "max"):
            table.add_column(name, justify="right")
        for name, latency in latencies.items():
            values = [latency.mean, *latency.percentiles.values(), latency.maximum]
            table.add_row(name, *(f"{1000 * value:.1f}" for value in values))
        console.print(table)
    for kind, count in summary.errors.items():
        detail = summary.error_details[kind]
        suffix = f": {detail}" if detail else ""
        console.print(f"{count} x {kind}{suffix}", markup=False, highlight=False, style="red")


def plot(measurement: Measurement, title: str, path: Path) -> None:
    """Write a PNG file with four plots.

    The plots show the latencies over time, the tokens over time, the distribution of the latencies, and the
    distribution of the gaps between consecutive events.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "bench", "--plot") from error
    successful_outcomes = [outcome for outcome in measurement.outcomes if outcome.error is None]
    failed_outcomes = [outcome for outcome in measurement.outcomes if outcome.error is not None]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)  # a canvas that needs no display
    wrap_title(figure, title)
    request_times, throughput, latencies, event_gaps = figure.subplots(2, 2).flat

    start = measurement.start_time
    request_times.set(title="requests", xlabel="due at, s", ylabel="s")
    request_times.scatter(
        [outcome.scheduled_time - start for outcome in successful_outcomes],
        [outcome.seconds for outcome in successful_outcomes],
        s=9,
        label="end",
    )
    streamed_outcomes = [outcome for outcome in successful_outcomes if outcome.text_times]
    request_times.scatter(
        [outcome.scheduled_time - start for outcome in streamed_outcomes],
        [outcome.text_times[0] - outcome.scheduled_time for outcome in streamed_outcomes],
        s=9,
        label="first token",
    )
    if failed_outcomes:
        points = (
            [outcome.scheduled_time - start for outcome in failed_outcomes],
            [outcome.seconds for outcome in failed_outcomes],
        )
        request_times.scatter(*points, s=20, marker="x", color="red", label="failed")
    request_times.legend()

    ends = sorted((outcome.end_time - start, outcome.completion_tokens) for outcome in successful_outcomes)
    total, token_counts = 0, [(0.0, 0)]
    for end, tokens in ends:
        total += tokens
        token_counts.append((end, total))
    throughput.step([end for end, _ in token_counts], [count for _, count in token_counts], where="post")
    throughput.set(title="tokens of completed responses", xlabel="s", ylabel="tokens")

    _draw_distribution(
        latencies,
        "latency from the due time",
        {
            "first token": [outcome.text_times[0] - outcome.scheduled_time for outcome in streamed_outcomes],
            "end": [outcome.seconds for outcome in successful_outcomes],
        },
    )
    _draw_distribution(
        event_gaps,
        "between two events",
        {"gap": [gap for outcome in streamed_outcomes for gap in outcome.gaps]},
    )
    figure.savefig(path, format="png", dpi=120)


def _draw_distribution(axes: object, title: str, series: dict[str, list[float]]) -> None:
    """Plot the cumulative distribution of each series."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for name, values in series.items():
        if values:
            milliseconds = [1000 * value for value in sorted(values)]
            percentages = [100 * (index + 1) / len(milliseconds) for index in range(len(milliseconds))]
            axes.plot(milliseconds, percentages, label=name)
    axes.set(title=title, xlabel="ms", ylabel="% of values")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
