"""``penstock bench run``: benchmarks of a model in this process."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from penstock.cli.formatting import GroupedCommand
from penstock.cli.options import config_from_flags, config_options, print_settings
from penstock.cli.plotting import check_plot

if TYPE_CHECKING:
    from penstock.bench.workloads import Figure, Sizes
    from penstock.config import PipelineConfig

_WORKLOADS = ("decode", "prefill", "batch", "start", "memory", "step")


@click.command("run", cls=GroupedCommand)
@click.option(
    "--work",
    "workloads",
    type=click.Choice(_WORKLOADS),
    multiple=True,
    help="The workload to measure; may be repeated.  [default: all]",
)
@click.option(
    "--shape", help="Use random weights instead of --model: l110m, l1b, q800m or the path of a config.json."
)
@click.option(
    "--prompt-length",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Prompt length in tokens, for the workloads decode, batch and step.",
)
@click.option("--prefill-length", type=click.IntRange(1), default=1024, show_default=True)
@click.option(
    "--new-tokens",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    help="Output length in tokens, for the workloads decode, batch and step.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Number of prompts of the workload batch.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Measured runs, after one warm-up run.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all runs to this file.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a plot to this PNG file.",
)
@config_options
def command(
    workloads: tuple[str, ...],
    shape: str | None,
    prompt_length: int,
    prefill_length: int,
    new_tokens: int,
    batch: int,
    repeats: int,
    json_path: Path | None,
    plot_path: Path | None,
    print_config: bool,
    **flags: object,
) -> None:
    """Benchmark a model in this process: decode, prefill, batch, start, memory, step.

    Figures are medians of several runs with new prompts, after one warm-up run; the table also shows the
    lowest and the highest value. The machine should be idle.
    """
    config = config_from_flags(flags)
    if print_config:
        print_settings(config.describe())
        return
    if shape is not None and "model_path" in config.sources:
        raise click.UsageError(
            "--shape and --model exclude each other: --shape creates a model with random weights"
        )
    if plot_path is not None:
        check_plot()
    for path in (json_path, plot_path):
        if path is not None:
            path.touch()  # raises before the measurement if the file cannot be written
    from penstock.bench.workloads import Sizes

    sizes = Sizes(prompt_length, prefill_length, new_tokens, batch, repeats)
    chosen_workloads = [workload for workload in _WORKLOADS if not workloads or workload in workloads]
    with TemporaryDirectory(prefix="penstock-") if shape else nullcontext() as folder:
        if shape is not None:
            assert folder is not None
            config = _with_random_weights(config, shape, Path(folder))
        figures, kernels, graph_status = _run_workloads(config, sizes, chosen_workloads)
    model_and_encoding = (shape or config.model.model_path, config.model.encoding)
    _report(figures, model_and_encoding, kernels, graph_status, sizes, json_path, plot_path)


def _with_random_weights(config: PipelineConfig, shape: str, folder: Path) -> PipelineConfig:
    from penstock.bench.random_weights import shape_config, write_random_checkpoint

    write_random_checkpoint(folder, shape_config(shape))
    return replace(config, model=replace(config.model, model_path=str(folder)))


def _run_workloads(
    config: PipelineConfig, sizes: Sizes, workloads: list[str]
) -> tuple[list[Figure], str, str]:
    from penstock.bench.workloads import Bench

    figures: list[Figure] = []
    with Bench(config, sizes) as bench:
        bench.check(workloads)
        for workload in workloads:
            click.echo(f"penstock: measuring {workload}", err=True)
            figures += bench.measure(workload)
        return figures, bench.kernels, bench.graph_status


def _report(
    figures: list[Figure],
    model_and_encoding: tuple[str, str],
    kernels: str,
    graph_status: str,
    sizes: Sizes,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    from rich.console import Console

    from penstock.bench.workload_report import plot_figures, print_figures
    from penstock.cli.environment import describe_environment

    environment = describe_environment()
    machine = f"{environment.threads} threads, {environment.processor}"
    title = f"{', '.join(model_and_encoding)}, kernels {kernels}, {machine}; decoding {graph_status}"
    print_figures(figures, title, Console())
    if json_path is not None:
        report = {
            "model": model_and_encoding[0],
            "encoding": model_and_encoding[1],
            "kernels": kernels,
            "decoding": graph_status,
            "sizes": asdict(sizes),
            "environment": environment.as_dict(),
            "figures": [figure.as_dict() for figure in figures],
        }
        json_path.write_text(json.dumps(report, indent=2))
    if plot_path is not None:
        plot_figures(figures, title, plot_path)
