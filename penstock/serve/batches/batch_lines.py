"""Parses request lines and builds result lines in the format of OpenAI's Batch API."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from uuid import uuid4

import msgspec

from penstock.errors import InputError
from penstock.serve.http.json_process import InvalidJsonError, TooManyValuesError, decode
from penstock.serve.http.sse import escape_line_ends

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""The routes that the requests of a batch may use."""
PRIORITY_OFFSET = -1_000_000
"""Value added to the priority of each request of a batch, so that requests outside batches run first."""


@dataclass(frozen=True)
class BatchRequest:
    """The request in a valid line."""

    custom_id: str
    url: str
    body: dict[str, object]


@dataclass(frozen=True)
class InvalidLine:
    """A line that is not a valid request of the batch."""

    custom_id: str
    code: str
    message: str

    @property
    def result(self) -> dict[str, object]:
        """The result of the line in the format of the Batch API."""
        error = {"code": self.code, "message": self.message}
        return {"id": new_id(), "custom_id": self.custom_id, "response": None, "error": error}


def read_lines(path: Path, max_values: int, max_items: int) -> Iterator[BatchRequest | InvalidLine]:
    """Yield the parsed lines of a file. Empty lines are skipped.

    Args:
        path: the file.
        max_values: maximum number of objects, arrays and keys in a line.
        max_items: maximum number of commas between array elements and between object members in a line.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                if line.strip():
                    yield parse_line(line, line_number, max_values, max_items)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def parse_line(line: bytes, line_number: int, max_values: int, max_items: int) -> BatchRequest | InvalidLine:
    """Return the request in a line with `PRIORITY_OFFSET` added to its priority, or an `InvalidLine`.

    A line without a valid ``custom_id`` gets the id ``line-NUMBER``.
    """
    custom_id = f"line-{line_number}"
    try:
        request = decode(line, max_values, max_items)
    except (InvalidJsonError, TooManyValuesError) as error:
        return InvalidLine(custom_id, "invalid_json", f"line {line_number}: {error}")
    if not isinstance(request, dict):
        return InvalidLine(custom_id, "invalid_request", f"line {line_number} is not a JSON object")
    custom_id = request.get("custom_id") or custom_id
    if not isinstance(custom_id, str) or len(custom_id) > 512:
        return InvalidLine(
            f"line-{line_number}",
            "invalid_request",
            f"line {line_number}: custom_id must be a text of at most 512 characters",
        )
    unknown_fields = sorted(request.keys() - {"custom_id", "method", "url", "body"})
    url, body = request.get("url"), request.get("body")
    problem = None
    if unknown_fields:
        problem = f"unknown field {unknown_fields[0][:100]!r}"
    elif request.get("method", "POST") != "POST":
        problem = "method must be POST"
    elif url not in ENDPOINTS:
        problem = f"url is {str(url)[:100]!r}: use one of {', '.join(ENDPOINTS)}"
    elif not isinstance(body, dict):
        problem = "body must be an object"
    elif body.get("stream") or body.get("background"):
        problem = "stream and background are not available in a batch"
    elif type(body.get("priority", 0)) not in (int, NoneType):  # a bool is an int
        problem = "body.priority must be a whole number"
    if problem is not None:
        return InvalidLine(custom_id, "invalid_request", f"line {line_number}: {problem}")
    assert isinstance(body, dict)
    priority = PRIORITY_OFFSET + (body.get("priority") or 0)
    return BatchRequest(custom_id, str(url), {**body, "priority": priority})


def result_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the result line for the response to a request."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    result = {"id": new_id(), "custom_id": custom_id, "response": response, "error": None}
    return escape_line_ends(msgspec.json.encode(result))


def new_id() -> str:
    """Return a new random id for a result."""
    return f"batch_req_{uuid4().hex}"


def finished_ids(path: Path) -> set[str]:
    """Return the ``custom_id`` of each result in a file; empty if the file does not exist.

    Removes an incomplete last line from the file.

    Raises:
        InputError: the file has a line that is not a result.
    """
    if not path.exists():
        return set()
    custom_ids: set[str] = set()
    with path.open("r+b") as file:
        end = 0
        for line_number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                custom_ids.add(msgspec.json.decode(line, type=_Result).custom_id)
            except msgspec.DecodeError:
                raise InputError(
                    f"{path}:{line_number} is not the result of a batch: choose another file"
                ) from None
            end += len(line)
        file.truncate(end)
    return custom_ids


class _Result(msgspec.Struct):
    custom_id: str


def count_unique_lines(lines: Iterator[BatchRequest | InvalidLine]) -> int:
    """Return the number of lines, which must have different ``custom_id``s.

    Raises:
        InputError: two lines have the same ``custom_id``.
    """
    seen_ids: set[str] = set()
    for line in lines:
        if line.custom_id in seen_ids:
            raise InputError(
                f"two lines have the custom_id {line.custom_id[:100]!r}: give each line a different one"
            )
        seen_ids.add(line.custom_id)
    return len(seen_ids)


def remaining_lines(
    lines: Iterator[BatchRequest | InvalidLine], finished_ids: Container[str]
) -> Iterator[BatchRequest | InvalidLine]:
    """Yield the lines whose ``custom_id`` is not in ``finished_ids``."""
    return (line for line in lines if line.custom_id not in finished_ids)
