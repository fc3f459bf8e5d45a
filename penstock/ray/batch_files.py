"""The files of a batch on Ray: requests as JSON lines or parquet, results as JSON lines or parquet."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import InputError
from penstock.serve.batches.batch_lines import finished_ids

PARQUET = ".parquet"
_ROWS_OF_PART = 1000


class BatchResult(msgspec.Struct):
    """The fields of a result line that are written to files."""

    custom_id: str
    response: dict[str, object] | None = None
    error: dict[str, object] | None = None


# -- Requests --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines of a file that one task reads."""

    offsets: list[int]
    """Their byte offsets in the file."""
    numbers: list[int]
    """Their line numbers, from 1."""


def pending_chunks(path: Path, done: Container[str], size: int) -> tuple[list[Chunk], set[str]]:
    """Return the lines of a file that have no result, in chunks of ``size``, and their ids.

    Raises:
        InputError: two lines have the same ``custom_id``, or the file cannot be read.
    """
    chunks: list[Chunk] = []
    seen: set[str] = set()
    pending: set[str] = set()
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    name = _result_id(line, number)
                    _check_new(name, seen)
                    if name not in done:
                        pending.add(name)
                        if not chunks or len(chunks[-1].numbers) == size:
                            chunks.append(Chunk([], []))
                        chunks[-1].offsets.append(offset)
                        chunks[-1].numbers.append(number)
                offset += len(line)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    return chunks, pending


def read_chunk(path: Path, chunk: Chunk) -> Iterator[dict[str, object]]:
    """Yield the lines of a chunk as rows: ``line`` (bytes) and ``number``."""
    with path.open("rb") as file:
        for offset, number in zip(chunk.offsets, chunk.numbers, strict=True):
            file.seek(offset)
            yield {"line": file.readline(), "number": number}


def _result_id(line: bytes, number: int) -> str:
    """Return the ``custom_id`` of a line, or for a line without one the id of its result."""
    try:
        name = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).get("custom_id")
        found = None if name is None else msgspec.json.decode(name)
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, str) and 0 < len(found) <= 512 else f"line-{number}"


def _check_new(name: str, seen: set[str]) -> None:
    if name in seen:
        raise InputError(f"two requests have the custom_id {name[:100]!r}: give each its own")
    seen.add(name)


def pending_rows(path: Path, done: Container[str]) -> set[str]:
    """Return the ids of all rows without a result, of a parquet file or a folder of parquet files.

    Raises:
        InputError: two rows have the same ``custom_id``, or a row has no ``custom_id``.
    """
    from pyarrow.parquet import ParquetFile

    seen: set[str] = set()
    pending: set[str] = set()
    for file in parquet_files(path):
        source = ParquetFile(file)
        missing = [name for name in ("custom_id", "url", "body") if name not in source.schema_arrow.names]
        if missing:
            raise InputError(f"{file} has no column {missing[0]}: it needs custom_id, url and body")
        for batch in source.iter_batches(columns=["custom_id"]):
            for name in batch.column(0).to_pylist():
                if not isinstance(name, str) or not name:
                    raise InputError(f"{file} has a row without a custom_id: give each its own")
                _check_new(name, seen)
                if name not in done:
                    pending.add(name)
    return pending


def row_to_line(row: dict[str, object]) -> bytes:
    """Return the JSON line of a parquet row: ``body`` is JSON text or a structure, without null members."""
    body = row["body"]
    given = msgspec.Raw(body.encode()) if isinstance(body, str) else _without_nulls(body)
    return msgspec.json.encode({"custom_id": row["custom_id"], "url": row["url"], "body": given})


def _without_nulls(value: object) -> object:
    """Return a structure without null members, which parquet adds to rows with different members."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def parquet_files(path: Path) -> list[Path]:
    """Return a parquet file, or the parquet files of a folder in order.

    Raises:
        InputError: the folder has no parquet files.
    """
    if not path.is_dir():
        return [path]
    found = sorted(path.glob(f"*{PARQUET}"))
    if not found:
        raise InputError(f"{path} has no files *{PARQUET}")
    return found


# -- Results ---------------------------------------------------------------------------------------------


class ResultWriter(Protocol):
    """Writes results. Results of earlier runs are kept, so that a run can continue."""

    def add(self, line: bytes) -> None:
        """Write the line of a result."""
        ...

    def close(self) -> None:
        """Write the remaining results."""
        ...


class JsonLines:
    """Appends results to a file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def add(self, line: bytes) -> None:
        """Write the line of a result."""
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ParquetParts:
    """Writes results to a folder of parquet files, which appear when they are complete.

    The columns are ``custom_id``, ``status_code``, ``body`` (JSON text) and ``error`` (JSON text or null).

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._rows: list[dict[str, object]] = []
        self._number = len(list(path.glob(f"part-*{PARQUET}")))

    def add(self, line: bytes) -> None:
        """Buffer a result; write a file when the buffer is full."""
        result = msgspec.json.decode(line, type=BatchResult)
        response = result.response or {}
        text = {
            "body": response.get("body"),
            "error": result.error,
        }
        encoded = {
            name: None if value is None else msgspec.json.encode(value).decode()
            for name, value in text.items()
        }
        self._rows.append(
            {"custom_id": result.custom_id, "status_code": response.get("status_code"), **encoded}
        )
        if len(self._rows) == _ROWS_OF_PART:
            self._write()

    def close(self) -> None:
        """Write the last file."""
        if self._rows:
            self._write()

    def _write(self) -> None:
        import pyarrow
        from pyarrow.parquet import write_table

        names = {"custom_id": "string", "status_code": "int32", "body": "string", "error": "string"}
        schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in names.items()])
        target = self._path / f"part-{self._number:06}{PARQUET}"
        unfinished = target.with_suffix(".unfinished")
        write_table(pyarrow.Table.from_pylist(self._rows, schema=schema), unfinished)
        os.replace(unfinished, target)
        self._number += 1
        self._rows = []


def done_ids(path: Path) -> set[str]:
    """Return the ``custom_id`` of each result in an existing output.

    Raises:
        InputError: the output has other contents.
    """
    if path.suffix != PARQUET:
        return finished_ids(path)
    if not path.exists():
        return set()
    if not path.is_dir():
        raise InputError(f"{path} is a file: the parquet output is a folder, choose another name")
    from pyarrow.parquet import read_table

    found: set[str] = set()
    for file in path.glob(f"part-*{PARQUET}"):
        found.update(read_table(file, columns=["custom_id"]).column(0).to_pylist())
    return found


def make_writer(path: Path) -> ResultWriter:
    """Return the writer of an output: parquet for a name that ends in ``.parquet``, else JSON lines."""
    return ParquetParts(path) if path.suffix == PARQUET else JsonLines(path)
