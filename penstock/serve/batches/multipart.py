"""Read a form with a file: ``multipart/form-data``."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from mmap import ACCESS_READ, mmap
from pathlib import Path

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.serve.http.problems import RequestProblem

_BOUNDARY = re.compile(r'boundary="?([^";]{1,70})"?', re.IGNORECASE)
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4096
_MAX_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Form:
    """The fields of a form and its file."""

    fields: dict[str, str]
    file_name: str
    size: int
    """Bytes of the file."""


async def read_form(request: Request, path: Path, *, max_bytes: int, timeout: float) -> Form:
    """Read a form; its file is written to `path`.

    Raises:
        RequestProblem: 415 the body is not such a form; 413 it is too long; 408 it arrives too slowly; 400 it
            is malformed or has no file.
    """
    given = request.headers.get("content-type", "")
    boundary = _BOUNDARY.search(given)
    if not given.lower().startswith("multipart/form-data") or boundary is None:
        raise RequestProblem(415, "send the file as multipart/form-data, with the fields file and purpose")
    whole = path.with_suffix(".form")
    try:
        try:
            async with asyncio.timeout(timeout):
                await _store(request, whole, max_bytes)
        except TimeoutError:
            raise RequestProblem(408, f"the body did not arrive within {timeout:g} seconds") from None
        return await asyncio.to_thread(_split, whole, boundary[1].encode(), path)
    finally:
        await asyncio.to_thread(whole.unlink, missing_ok=True)


async def _store(request: Request, path: Path, max_bytes: int) -> None:
    size = 0
    with path.open("wb") as file:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise RequestProblem(
                    413,
                    f"the body is longer than {max_bytes} bytes, the limit of this server (--max-file-size)",
                    headers={"connection": "close"},
                )
            await asyncio.to_thread(file.write, part)
            if not message.get("more_body", False):
                return


def _split(whole: Path, boundary: bytes, path: Path) -> Form:
    """Write the file of a form to `path` and return the rest."""
    if not whole.stat().st_size:
        raise RequestProblem(400, "the form is empty", param="file")
    fields: dict[str, str] = {}
    name = None
    size = 0
    delimiter = b"--" + boundary
    with whole.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        start = data.find(delimiter)
        for _ in range(_MAX_FIELDS):
            begin = start + len(delimiter)
            if start < 0 or data[begin : begin + 2] == b"--":
                break
            head_end = data.find(b"\r\n\r\n", begin, begin + _MAX_HEADER_BYTES)
            start = data.find(b"\r\n" + delimiter, begin)
            if head_end < 0 or start < 0:
                raise RequestProblem(400, "the form is malformed: a part does not end")
            headers = BytesParser(policy=HTTP).parsebytes(data[begin + 2 : head_end + 4])
            options = dict(headers["content-disposition"].params) if headers["content-disposition"] else {}
            body = head_end + 4, start
            start += 2
            if options.get("name") == "file":
                name = Path(options.get("filename") or "file").name[:255]
                size = body[1] - body[0]
                with path.open("wb") as target:
                    target.write(memoryview(data)[body[0] : body[1]])
            elif body[1] - body[0] <= _MAX_FIELD_BYTES:
                fields[options.get("name", "")] = data[body[0] : body[1]].decode(errors="replace")
            else:
                raise RequestProblem(400, "a field of the form is too long")
    if name is None:
        raise RequestProblem(400, "file is required", param="file", code="missing_required_parameter")
    return Form(fields, name, size)
