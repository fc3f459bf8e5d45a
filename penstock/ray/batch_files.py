"""Reads request files and writes result files of a batch on Ray, as JSON lines or parquet."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.errors import InputError
from penstock.ray.arrow_values import without_nulls
from penstock.serve.batches.batch_lines import finished_ids

PARQUET_SUFFIX = ".parquet"
_ROWS_PER_FILE = 1000
"""Maximum number of results per parquet file."""


class BatchResult(msgspec.Struct):
    """The fields of a result line that Penstock on Ray reads."""

    custom_id: str
    response: dict[str, object] | None = None
    error: dict[str, object] | None = None


# -- Requests --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines of a request file that are read together."""

    offsets: list[int]
    """The byte offset of each line in the file."""
    line_numbers: list[int]
    """The line number of each line, starting at 1."""


def pending_chunks(
    path: Path, ids_with_results: Container[str], chunk_size: int
) -> tuple[list[Chunk], set[str]]:
    """Return chunks of the lines without a result, and the ids of these lines. Skips empty lines.

    Args:
        path: a file of JSON lines.
        ids_with_results: the ids of requests that have results.
        chunk_size: maximum number of lines per chunk.

    Raises:
        InputError: two lines have the same ``custom_id``, or the file cannot be read.
    """
    chunks: list[Chunk] = []
    seen_ids: set[str] = set()
    pending_ids: set[str] = set()
    offset = 0
    try:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                if line.strip():
                    request_id = _request_id(line, line_number)
                    _check_unique(request_id, seen_ids)
                    if request_id not in ids_with_results:
                        pending_ids.add(request_id)
                        if not chunks or len(chunks[-1].line_numbers) == chunk_size:
                            chunks.append(Chunk([], []))
                        chunks[-1].offsets.append(offset)
                        chunks[-1].line_numbers.append(line_number)
                offset += len(line)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    return chunks, pending_ids


def read_chunk(path: Path, chunk: Chunk) -> Iterator[dict[str, object]]:
    """Yield a row for each line of a chunk. The fields of a row are ``line`` (bytes) and ``line_number``."""
    with path.open("rb") as file:
        for offset, line_number in zip(chunk.offsets, chunk.line_numbers, strict=True):
            file.seek(offset)
            yield {"line": file.readline(), "line_number": line_number}


def _request_id(line: bytes, line_number: int) -> str:
    """Return the ``custom_id`` of line N if it is a text of 1 to 512 characters, else ``line-N``."""
    try:
        raw_id = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).get("custom_id")
        request_id = None if raw_id is None else msgspec.json.decode(raw_id)
    except msgspec.DecodeError:
        request_id = None
    if isinstance(request_id, str) and 0 < len(request_id) <= 512:
        return request_id
    return f"line-{line_number}"


def _check_unique(request_id: str, seen_ids: set[str]) -> None:
    if request_id in seen_ids:
        raise InputError(
            f"two requests have the custom_id {request_id[:100]!r}: give each request a different one"
        )
    seen_ids.add(request_id)


def pending_row_ids(path: Path, ids_with_results: Container[str]) -> set[str]:
    """Return the ids of all rows that have no result.

    Args:
        path: a parquet file, or a folder of parquet files.
        ids_with_results: the ids of requests that have results.

    Raises:
        InputError: the folder has no parquet files, a file lacks a required column, two rows have the same
            ``custom_id``, or a row has no ``custom_id``.
    """
    from pyarrow.parquet import ParquetFile

    seen_ids: set[str] = set()
    pending_ids: set[str] = set()
    for file in parquet_files(path):
        source = ParquetFile(file)
        missing_names = [
            name for name in ("custom_id", "url", "body") if name not in source.schema_arrow.names
        ]
        if missing_names:
            raise InputError(f"{file} has no column {missing_names[0]}: custom_id, url and body are required")
        for batch in source.iter_batches(columns=["custom_id"]):
            for request_id in batch.column(0).to_pylist():
                if not isinstance(request_id, str) or not request_id:
                    raise InputError(f"{file} has a row without a custom_id: give each row a custom_id")
                _check_unique(request_id, seen_ids)
                if request_id not in ids_with_results:
                    pending_ids.add(request_id)
    return pending_ids


def row_to_line(row: dict[str, object]) -> bytes:
    """Return a parquet row as a JSON line.

    The column ``body`` is JSON text or a structure. Null members of a structure are left out.
    """
    body = row["body"]
    json_body = msgspec.Raw(body.encode()) if isinstance(body, str) else without_nulls(body)
    return msgspec.json.encode({"custom_id": row["custom_id"], "url": row["url"], "body": json_body})


def parquet_files(path: Path) -> list[Path]:
    """Return ``[path]`` for a file, or the parquet files of a folder in the order of their names.

    Raises:
        InputError: the folder has no parquet files.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(f"*{PARQUET_SUFFIX}"))
    if not files:
        raise InputError(f"{path} has no files *{PARQUET_SUFFIX}")
    return files


# -- Results ---------------------------------------------------------------------------------------------


class ResultWriter(Protocol):
    """Writes results to an output. Keeps the results of earlier runs, so that a new run continues a batch."""

    def add(self, line: bytes) -> None:
        """Add a result, which is a JSON line."""
        ...

    def close(self) -> None:
        """Write the buffered results and close the output."""
        ...


class JsonLinesWriter:
    """Appends results to a file of JSON lines.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def add(self, line: bytes) -> None:
        """Write a result to the file."""
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _file_number(file: Path) -> int:
    """Return the number in the name of a file of `ParquetWriter`; -1 for other names."""
    number = file.stem.removeprefix("part-")
    return int(number) if number.isdecimal() else -1


class ParquetWriter:
    """Writes results to a folder of parquet files. A file gets its final name when it is complete.

    The columns are ``custom_id``, ``status_code``, ``body`` (JSON text) and ``error`` (JSON text or null).

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._rows: list[dict[str, object]] = []
        # The number after the largest existing number: users can have deleted earlier files.
        numbers = [_file_number(file) for file in path.glob(f"part-*{PARQUET_SUFFIX}")]
        self._file_number = max(numbers, default=-1) + 1

    def add(self, line: bytes) -> None:
        """Buffer a result. Write a file when `_ROWS_PER_FILE` results are buffered."""
        result = msgspec.json.decode(line, type=BatchResult)
        response = result.response or {}
        json_values = {"body": response.get("body"), "error": result.error}
        json_texts = {
            name: None if value is None else msgspec.json.encode(value).decode()
            for name, value in json_values.items()
        }
        self._rows.append(
            {"custom_id": result.custom_id, "status_code": response.get("status_code"), **json_texts}
        )
        if len(self._rows) == _ROWS_PER_FILE:
            self._write_file()

    def close(self) -> None:
        """Write the remaining results to a last file."""
        if self._rows:
            self._write_file()

    def _write_file(self) -> None:
        import pyarrow
        from pyarrow.parquet import write_table

        types = {"custom_id": "string", "status_code": "int32", "body": "string", "error": "string"}
        schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in types.items()])
        final_path = self._path / f"part-{self._file_number:06}{PARQUET_SUFFIX}"
        unfinished_path = final_path.with_suffix(".unfinished")
        write_table(pyarrow.Table.from_pylist(self._rows, schema=schema), unfinished_path)
        os.replace(unfinished_path, final_path)
        self._file_number += 1
        self._rows = []


def finished_request_ids(path: Path) -> set[str]:
    """Return the ``custom_id`` of each result in an output; an empty set if the output does not exist.

    Raises:
        InputError: the output does not contain batch results, or a parquet output is not a folder.
    """
    if path.suffix != PARQUET_SUFFIX:
        return finished_ids(path)
    if not path.exists():
        return set()
    if not path.is_dir():
        raise InputError(f"{path} is a file, but a parquet output is a folder: choose another name")
    from pyarrow.parquet import read_table

    request_ids: set[str] = set()
    for file in path.glob(f"part-*{PARQUET_SUFFIX}"):
        request_ids.update(read_table(file, columns=["custom_id"]).column(0).to_pylist())
    return request_ids


def make_writer(path: Path) -> ResultWriter:
    """Return the writer of an output: parquet if the name ends in ``.parquet``, else JSON lines."""
    return ParquetWriter(path) if path.suffix == PARQUET_SUFFIX else JsonLinesWriter(path)
