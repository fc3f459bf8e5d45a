"""``penstock batch run --ray``: runs the requests of a file in a pool of Ray Data actors."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from penstock.config import PipelineConfig
from penstock.errors import InputError, PenstockError
from penstock.host.progress import GenerationProgress
from penstock.ray.batch_files import (
    PARQUET_SUFFIX,
    BatchResult,
    Chunk,
    finished_request_ids,
    make_writer,
    pending_chunks,
    pending_row_ids,
    read_chunk,
    row_to_line,
)
from penstock.ray.cluster import import_ray, ray_connection
from penstock.ray.config import RayConfig
from penstock.ray.dataset import map_with_actors
from penstock.ray.local_server import LocalServer
from penstock.serve.batches.batch_dispatch import BatchDispatcher
from penstock.serve.batches.batch_lines import parse_line
from penstock.serve.config import ServeConfig

_MAX_RETRIES = 120
"""Maximum number of times that a line is sent again, half a second apart, while the worker restarts."""


def run_batch(
    requests: Path, output: Path, config: PipelineConfig, serve_config: ServeConfig, ray_config: RayConfig
) -> int:
    """Run the requests of a file that have no result in the output, and write one result for each.

    Only this process writes results. The output gets one result for each id, even if Ray Data computes a
    block twice.

    Args:
        requests: JSON lines, or a parquet file or folder with the columns custom_id, url and body.
        output: a file of JSON lines, or a folder of parquet files if the name ends in ``.parquet``.
        config: the configuration of the model.
        serve_config: the configuration of the server, such as request limits and parsers.
        ray_config: the configuration of the cluster and the actors.

    Returns:
        The exit status: 1 if a request of this run failed, else 0.

    Raises:
        MissingDependencyError: Ray is not installed.
        CheckpointError: the checkpoint of the model is missing or invalid.
        ConfigError: the Ray cluster cannot be reached, or an actor has fewer CPUs than the model needs.
        InputError: the requests cannot be read, or two requests have the same id.
        PenstockError: Ray Data ended without a result for a request. Running the command again continues the
            batch.
    """
    ray = import_ray("penstock batch run --ray")
    config.model.checkpoint  # noqa: B018  # raises here, not in an actor, if the model is missing
    ids_with_results = finished_request_ids(output)
    is_parquet = requests.is_dir() or requests.suffix == PARQUET_SUFFIX
    chunks: list[Chunk] = []
    if is_parquet:
        pending_ids = pending_row_ids(requests, ids_with_results)
    else:
        chunks, pending_ids = pending_chunks(requests, ids_with_results, ray_config.ray_batch_size)
    if ids_with_results:
        click.echo(
            f"penstock: {len(ids_with_results)} requests have results, {len(pending_ids)} requests are left",
            err=True,
        )
    if not pending_ids:
        return 0
    with ray_connection(ray_config, "penstock batch run --ray"):
        if is_parquet:
            rows = ray.data.read_parquet(str(requests.absolute())).map(
                PendingRows(ray.put(ids_with_results) if ids_with_results else None)
            )
            rows = rows.filter(lambda row: row["line_number"] >= 0)
        else:
            items = [{"offsets": chunk.offsets, "line_numbers": chunk.line_numbers} for chunk in chunks]
            rows = ray.data.from_items(items, override_num_blocks=len(items)).flat_map(
                ReadLines(requests.absolute())
            )
        arguments = {"serve_config": replace(serve_config, access_log=False, state_dir=None)}
        results = map_with_actors(rows, LineActor, arguments, config, ray_config)
        return _write_results(results, output, pending_ids)


def _write_results(results: Any, output: Path, pending_ids: set[str]) -> int:
    """Write the results as they arrive. Return the exit status: 1 if a request failed, else 0."""
    begin, num_results, num_failed, num_tokens = time.perf_counter(), 0, 0, 0
    writer = make_writer(output)
    try:
        with GenerationProgress(len(pending_ids)) as progress:
            for batch in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for row in batch.to_pylist():
                    line, result_tokens = row["result"], row["num_tokens"]
                    request_id = msgspec.json.decode(line, type=BatchResult).custom_id
                    if request_id not in pending_ids:
                        continue  # Ray Data computed the block twice
                    pending_ids.remove(request_id)
                    writer.add(line)
                    num_results += 1
                    num_failed += not row["is_success"]
                    num_tokens += result_tokens
                    progress.advance(num_tokens=result_tokens, num_prompts=1)
    finally:
        writer.close()
    seconds = max(time.perf_counter() - begin, 1e-9)
    click.echo(
        f"penstock: {num_results} requests in {seconds:.2f} s, {num_failed} failed: "
        f"{num_results / seconds:,.1f} requests/s, {num_tokens / seconds:,.0f} tokens/s",
        err=True,
    )
    if pending_ids:
        raise PenstockError(
            f"{len(pending_ids)} requests have no result, such as {min(pending_ids)!r}: run the command again"
        )
    return 1 if num_failed else 0


class ReadLines:
    """Callable that reads the lines of a `Chunk` in a Ray Data task.

    Args:
        path: the file, which all nodes can read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the lines of the chunk in ``row`` as rows (`read_chunk`)."""
        return list(read_chunk(self._path, Chunk(list(row["offsets"]), list(row["line_numbers"]))))


class PendingRows:
    """Callable that converts a parquet row to a JSON line in a Ray Data task.

    The ``line_number`` of the result is -1 if the request already has a result, else 0.

    Args:
        result_ids_ref: a Ray object reference to the set of ids that have results; None if no request has a
            result.
    """

    def __init__(self, result_ids_ref: Any) -> None:
        self._result_ids_ref = result_ids_ref
        self._result_ids: set[str] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the ``line`` and the ``line_number`` of a row."""
        if self._result_ids is None:
            self._result_ids = (
                set()
                if self._result_ids_ref is None
                else import_ray("penstock batch run --ray").get(self._result_ids_ref)
            )
        line_number = -1 if row["custom_id"] in self._result_ids else 0
        return {"line": row_to_line(row), "line_number": line_number}


class LineActor:
    """Actor that loads a model and runs lines of a request file through the routes of the server.

    Args:
        config: the configuration of the model.
        serve_config: the configuration of the server, such as request limits and parsers.
    """

    def __init__(self, config: PipelineConfig, serve_config: ServeConfig) -> None:
        self._server = LocalServer(config, serve_config)

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """Run a batch of lines, which is a ``pyarrow.Table``, and yield a table of the results."""
        import pyarrow

        await self._server.start()
        limits = self._server.services.json_limits
        lines = [parse_line(row["line"], row["line_number"], *limits) for row in batch.to_pylist()]
        results: list[tuple[bytes, bool, int]] = []
        dispatcher = BatchDispatcher(
            self._server.app,
            len(lines),
            is_stopping=lambda: False,
            on_result=lambda *result: results.append(result),
            max_retries=_MAX_RETRIES,
        )
        await dispatcher.run(iter(lines))
        names = ("result", "is_success", "num_tokens")
        yield pyarrow.table(
            {name: list(column) for name, column in zip(names, zip(*results, strict=True), strict=True)}
        )


def remove_output(output: Path) -> None:
    """Delete an output file or an output folder.

    Raises:
        InputError: the folder contains a file whose name does not begin with ``part-``.
    """
    if not output.is_dir():
        output.unlink(missing_ok=True)
        return
    foreign_files = [file.name for file in output.iterdir() if not file.name.startswith("part-")]
    if foreign_files:
        raise InputError(
            f"{output} contains {foreign_files[0]!r}, which is not a batch result: choose another folder"
        )
    shutil.rmtree(output)
