"""``penstock batch run``: run a file of requests without a server."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.formatting import GroupedCommand
from penstock.cli.options import (
    config_options,
    configs_from_flags,
    print_settings,
    ray_options,
    take_ray_config,
)
from penstock.cli.serve import check_packages
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.ray.config import RayConfig
    from penstock.serve.config import ServeConfig

_NUM_CONCURRENT_BATCHES = 2
"""Number of batches per worker whose requests are submitted concurrently. One batch runs and one waits."""


@click.group("batch")
def command() -> None:
    """Run files of requests, in the format of OpenAI's Batch API."""


@command.command("run", cls=GroupedCommand)
@click.argument("requests", type=click.Path(exists=True, path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The file for the results. Requests whose results are already in this file are skipped. With "
    "--ray, a name that ends in .parquet is a folder of parquet files.",
)
@click.option("--overwrite", is_flag=True, help="Delete the results that are already in the file.")
@ray_options
@config_options
def run(requests: Path, output: Path, overwrite: bool, print_config: bool, **flags: object) -> int:
    """Run the requests in the file REQUESTS and write each result when its request has ended.

    A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. Results are
    written in the order in which the requests end. After an interruption, run the same command to continue.
    The exit status is 1 if a line failed.

    With --ray the requests run in several actors of a Ray cluster. REQUESTS is then a file that all nodes can
    read, or a parquet file or folder with the columns custom_id, url and body.
    """
    ray_config = take_ray_config(flags)
    pipeline_config, config = configs_from_flags(flags)
    if print_config:
        print_settings([*ray_config.describe(), *pipeline_config.describe()])
        return 0
    check_packages("penstock batch run")
    if output.resolve() == requests.resolve():
        raise InputError("the output is the file of the requests: choose another file")
    if ray_config.ray:
        return _run_on_ray(requests, output, overwrite, pipeline_config, config, ray_config)
    for path in (requests, output):
        if path.is_dir():
            raise InputError(f"{path} is a folder: give a file of JSON lines, or --ray for parquet")
    if overwrite:
        output.unlink(missing_ok=True)
    return asyncio.run(_run(requests, output, pipeline_config, config))


def _run_on_ray(
    requests: Path,
    output: Path,
    overwrite: bool,
    pipeline_config: PipelineConfig,
    config: ServeConfig,
    ray_config: RayConfig,
) -> int:
    """Run the requests in actors of a Ray cluster."""
    from penstock.ray.batch import remove_output, run_batch
    from penstock.ray.cluster import import_ray

    import_ray("penstock batch run --ray")
    if overwrite:
        remove_output(output)
    return run_batch(requests, output, pipeline_config, config, ray_config)


async def _run(requests: Path, output: Path, pipeline_config: PipelineConfig, config: ServeConfig) -> int:
    from dataclasses import replace

    from penstock.assembly import load_tokenizer
    from penstock.engines import make_engine
    from penstock.host.progress import GenerationProgress
    from penstock.serve.app import create_app
    from penstock.serve.batches.batch_dispatch import BatchDispatcher
    from penstock.serve.batches.batch_lines import (
        count_unique_lines,
        finished_ids,
        read_lines,
        remaining_lines,
    )
    from penstock.serve.service_factory import build_services, close_services

    config = replace(config, access_log=False, state_dir=None)
    pipeline_config.model.checkpoint  # noqa: B018  # finds or downloads the checkpoint once for both processes
    tokenizer = load_tokenizer(pipeline_config)
    worker = make_engine(pipeline_config)
    services = build_services(config, pipeline_config, worker, tokenizer)
    lines = partial(read_lines, requests, *services.json_limits)
    ids_with_results = finished_ids(output)
    num_remaining = count_unique_lines(remaining_lines(lines(), ids_with_results))
    if ids_with_results:
        click.echo(
            f"penstock: {len(ids_with_results)} lines have results, {num_remaining} lines are left", err=True
        )
    counts = {"succeeded": 0, "failed": 0, "tokens": 0}
    try:
        if num_remaining:
            await worker.start()
            tokenizer.max_length = worker.info.max_length
            services.gate.open()
            begin = time.perf_counter()
            with output.open("ab") as file, GenerationProgress(num_remaining) as progress:

                def write_result(line: bytes, has_succeeded: bool, num_tokens: int) -> None:
                    file.write(line + b"\n")
                    file.flush()
                    counts["succeeded" if has_succeeded else "failed"] += 1
                    counts["tokens"] += num_tokens
                    progress.advance(num_tokens=num_tokens, num_prompts=1)

                runner = BatchDispatcher(
                    create_app(services),
                    _NUM_CONCURRENT_BATCHES * worker.info.max_batch_size * pipeline_config.data_parallel_size,
                    is_stopping=lambda: False,
                    on_result=write_result,
                )
                await runner.run(remaining_lines(lines(), ids_with_results))
            seconds = max(time.perf_counter() - begin, 1e-9)
            num_lines = counts["succeeded"] + counts["failed"]
            click.echo(
                f"penstock: {num_lines} lines in {seconds:.2f} s, {counts['failed']} failed: "
                f"{num_lines / seconds:,.1f} lines/s, {counts['tokens'] / seconds:,.0f} tokens/s",
                err=True,
            )
    except asyncio.CancelledError:
        num_lines = counts["succeeded"] + counts["failed"]
        click.echo(f"penstock: stopped after {num_lines} lines; to continue, run the same command", err=True)
        raise
    finally:
        await worker.stop(0)
        await close_services(services)
    return 1 if counts["failed"] else 0
