"""Files of embeddings: one ``.npy`` array, JSON lines, or Parquet."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, TypeAlias, cast

import click
import numpy as np
import numpy.typing as npt

from penstock.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from penstock.pipelines.core import EmbeddingsResponse

Row: TypeAlias = "npt.NDArray[np.floating] | dict[str, npt.NDArray[np.generic]]"
"""The output of one text: an array, or the two arrays of a sparse embedding."""

FORMATS = ("npy", "jsonl", "parquet")
FIELD_NAMES = {"dense": "embedding", "scores": "scores", "multi_vector": "multi_vector", "sparse": "sparse"}
"""Output kind -> the name of its field in the file."""


def chosen_format(output: Path | None, requested_format: str | None) -> str:
    """Return the requested format, else the format of the output file's suffix, else JSON lines.

    Raises:
        click.UsageError: the suffix names no format, or a binary format would go to a terminal.
    """
    output_format = requested_format
    if output_format is None and output is not None:
        output_format = output.suffix.removeprefix(".")
        if output_format not in FORMATS:
            suffixes = ", ".join(f".{name}" for name in FORMATS)
            raise click.UsageError(f"--output {output} ends in none of {suffixes}: give --format")
    if output_format is None:
        output_format = "jsonl"
    if output_format != "jsonl" and output is None and sys.stdout.isatty():
        raise click.UsageError(f"the format {output_format} is binary: give --output FILE")
    return output_format


def check_format(file_format: str, kind: str) -> None:
    """Check that a format can store outputs of this kind and that its package is installed.

    Raises:
        InputError: the format is ``npy``, which stores one array, and outputs of this kind differ in length.
        MissingDependencyError: pyarrow is not installed.
    """
    if file_format == "npy" and kind in ("sparse", "multi_vector"):
        raise InputError(f"npy stores one array, but {kind} outputs differ in length: use jsonl or parquet")
    if file_format == "parquet":
        _pyarrow()


def write_outputs(
    output: Path | None,
    file_format: str,
    kind: str,
    texts: Sequence[str],
    responses: Sequence[EmbeddingsResponse],
) -> None:
    """Write one row for each text, in order, to a file or to standard output."""
    rows = [_output_arrays(kind, response) for response in responses]
    with _open_output(output) as file:
        if file_format == "npy":
            np.save(file, np.stack(cast("Sequence[npt.NDArray[np.floating]]", rows)))
        elif file_format == "jsonl":
            for index, row in enumerate(rows):
                line = json.dumps({"index": index, FIELD_NAMES[kind]: _as_lists(row)}, ensure_ascii=False)
                file.write(line.encode() + b"\n")
        else:
            _write_parquet(file, kind, texts, rows)


def _output_arrays(kind: str, response: EmbeddingsResponse) -> Row:
    if kind == "sparse":
        assert response.sparse is not None
        return {"token_ids": response.sparse.token_ids, "weights": response.sparse.weights}
    row: Row = response.embeddings if kind == "dense" else getattr(response, kind)
    return row


def _as_lists(row: Row) -> object:
    return {name: value.tolist() for name, value in row.items()} if isinstance(row, dict) else row.tolist()


def _write_parquet(file: IO[bytes], kind: str, texts: Sequence[str], rows: Sequence[Row]) -> None:
    pyarrow = _pyarrow()
    floats = pyarrow.list_(pyarrow.float32())
    types = {
        "multi_vector": pyarrow.list_(floats),
        "sparse": pyarrow.struct([("token_ids", pyarrow.list_(pyarrow.int32())), ("weights", floats)]),
    }
    values = pyarrow.array([_as_lists(row) for row in rows], type=types.get(kind, floats))
    table = pyarrow.table(
        {"text": pyarrow.array(list(texts), type=pyarrow.string()), FIELD_NAMES[kind]: values}
    )
    from pyarrow import parquet

    parquet.write_table(table, file)


def _pyarrow() -> ModuleType:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "parquet", "the format parquet") from error
    module: ModuleType = pyarrow
    return module


@contextmanager
def _open_output(output: Path | None) -> Iterator[IO[bytes]]:
    if output is None:
        yield sys.stdout.buffer
        return
    with output.open("wb") as file:
        yield file
