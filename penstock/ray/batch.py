"""``penstock batch run --ray``: runs a file of requests in a pool of actors with Ray Data."""

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
    PARQUET,
    BatchResult,
    Chunk,
    done_ids,
    make_writer,
    pending_chunks,
    pending_rows,
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

_MAX_ATTEMPTS = 120
"""Maximum number of attempts for a line while the worker process of its actor is being restarted. Attempts
are half a second apart.
"""


def run_batch(
    requests: Path, output: Path, config: PipelineConfig, serve_config: ServeConfig, ray_config: RayConfig
) -> int:
    """Run the requests of a file that have no result yet, and write one result for each.

    Only this process writes results. It writes one result for each id, even if Ray Data computes a block
    twice.

    Args:
        requests: JSON lines, or a parquet file or folder with the columns custom_id, url and body.
        output: a file of JSON lines, or a folder of parquet files if the name ends in ``.parquet``.
        config: the configuration of the model.
        serve_config: the server's limits on requests, and its parsers.
        ray_config: the cluster and the actors.

    Returns:
        The exit status: 1 if a request failed, else 0.

    Raises:
        MissingDependencyError: Ray is not installed.
        InputError: the requests cannot be read, or two have the same id.
        PenstockError: a request has no result; running the command again continues.
    """
    ray = import_ray("penstock batch run --ray")
    config.model.checkpoint  # noqa: B018  # a model that is missing is reported here
    done = done_ids(output)
    is_parquet = requests.is_dir() or requests.suffix == PARQUET
    chunks: list[Chunk] = []
    if is_parquet:
        pending = pending_rows(requests, done)
    else:
        chunks, pending = pending_chunks(requests, done, ray_config.ray_batch_size)
    if done:
        click.echo(f"penstock: {len(done)} requests have results, {len(pending)} are left", err=True)
    if not pending:
        return 0
    with ray_connection(ray_config, "penstock batch run --ray"):
        if is_parquet:
            rows = ray.data.read_parquet(str(requests.absolute())).map(
                PendingRows(ray.put(done) if done else None)
            )
            rows = rows.filter(lambda row: row["number"] >= 0)
        else:
            items = [{"offsets": chunk.offsets, "numbers": chunk.numbers} for chunk in chunks]
            rows = ray.data.from_items(items, override_num_blocks=len(items)).flat_map(
                ReadLines(requests.absolute())
            )
        arguments = {"serve_config": replace(serve_config, access_log=False, state_dir=None)}
        return _write(map_with_actors(rows, LineActor, arguments, config, ray_config), output, pending)


def _write(results: Any, output: Path, pending: set[str]) -> int:
    """Write the results as they arrive. Return the exit status."""
    begin, num, num_bad, num_tokens = time.perf_counter(), 0, 0, 0
    writer = make_writer(output)
    try:
        with GenerationProgress(len(pending)) as progress:
            for batch in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for row in batch.to_pylist():
                    line, is_good, tokens = row["result"], row["is_good"], row["num_tokens"]
                    name = msgspec.json.decode(line, type=BatchResult).custom_id
                    if name not in pending:
                        continue  # its block was computed twice
                    pending.remove(name)
                    writer.add(line)
                    num, num_bad, num_tokens = num + 1, num_bad + (not is_good), num_tokens + tokens
                    progress.advance(num_tokens=tokens, num_prompts=1)
    finally:
        writer.close()
    seconds = max(time.perf_counter() - begin, 1e-9)
    click.echo(
        f"penstock: {num} requests in {seconds:.2f} s, {num_bad} failed: {num / seconds:,.1f} requests/s, "
        f"{num_tokens / seconds:,.0f} tokens/s",
        err=True,
    )
    if pending:
        raise PenstockError(
            f"{len(pending)} requests have no result, such as {min(pending)!r}: run the command again"
        )
    return 1 if num_bad else 0


class ReadLines:
    """Reads the lines of a `Chunk`, in a task of Ray Data.

    Args:
        path: the file, which all nodes can read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of a chunk."""
        return list(read_chunk(self._path, Chunk(list(row["offsets"]), list(row["numbers"]))))


class PendingRows:
    """Converts a parquet row to a line and its ``number``, which is -1 if the row already has a result.

    Args:
        done: a Ray reference to the set of ids that have results; None if no id has one.
    """

    def __init__(self, done: Any) -> None:
        self._done_ids = done
        self._ids: set[str] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the ``line`` and the ``number`` of a row."""
        if self._ids is None:
            self._ids = (
                set()
                if self._done_ids is None
                else import_ray("penstock batch run --ray").get(self._done_ids)
            )
        number = -1 if row["custom_id"] in self._ids else 0
        return {"line": row_to_line(row), "number": number}


class LineActor:
    """Runs lines of a request file through the routes of the server, with a model in this actor.

    Args:
        config: the configuration of the model.
        serve_config: the server's limits on requests, and its parsers.
    """

    def __init__(self, config: PipelineConfig, serve_config: ServeConfig) -> None:
        self._server = LocalServer(config, serve_config)

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """Run the lines of a batch, a ``pyarrow.Table``, and yield a table of their results."""
        import pyarrow

        await self._server.start()
        limits = self._server.services.json_limits
        lines = [parse_line(row["line"], row["number"], *limits) for row in batch.to_pylist()]
        results: list[tuple[bytes, bool, int]] = []
        dispatcher = BatchDispatcher(
            self._server.app,
            len(lines),
            is_stopping=lambda: False,
            on_result=lambda *one: results.append(one),
            max_attempts=_MAX_ATTEMPTS,
        )
        await dispatcher.run(iter(lines))
        names = ("result", "is_good", "num_tokens")
        yield pyarrow.table(
            {name: list(column) for name, column in zip(names, zip(*results, strict=True), strict=True)}
        )


def remove_output(output: Path) -> None:
    """Delete the results of an output.

    Raises:
        InputError: a folder contains files that are not parts of a parquet output.
    """
    if not output.is_dir():
        output.unlink(missing_ok=True)
        return
    others = [file.name for file in output.iterdir() if not file.name.startswith("part-")]
    if others:
        raise InputError(f"{output} has {others[0]!r}, which is no part of an output: choose another folder")
    shutil.rmtree(output)
