"""Reads a form with a file (``multipart/form-data``). The package `python_multipart` parses the form."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import IO

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from penstock.serve.http.problems import RequestProblem

_MAX_FIELDS = 16
"""Maximum number of parts of a form, including the file."""
_MAX_FIELD_BYTES = 4096
_MAX_HEADER_BYTES = 4096
"""Maximum number of bytes of a header name, and of a header value, of a part."""


class Form:
    """The fields of a form. The content of the form's file is written to disk while the form arrives.

    Args:
        boundary: the boundary between the parts of the form.
        file: an open file to which the content of the form's file is written.
    """

    def __init__(self, boundary: bytes, file: IO[bytes]) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self.file_size = 0
        """The size of the form's file in bytes."""
        self._file = file
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._num_parts = 0
        self._field: str | None = None  # name of the current field; None inside the file
        self._field_value = b""
        self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_to_header_name,
                "on_header_value": self._add_to_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def write(self, data: bytes) -> None:
        """Parse the next bytes of the body.

        Raises:
            RequestProblem: 400; the form is malformed, a header or a field is too long, or the form has too
                many fields or two files.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RequestProblem(400, f"the form is malformed: {str(error)[:200]}") from None

    def finish(self) -> None:
        """Check that the form is complete. Call it after the last byte.

        Raises:
            RequestProblem: 400; the form is incomplete or has no file.
        """
        if self._num_parts and not self._has_ended:
            raise RequestProblem(400, "the form is malformed: its last part is incomplete")
        if self.file_name is None:
            raise RequestProblem(400, "file is required", param="file", code="missing_required_parameter")

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise RequestProblem(400, f"the form has more than {_MAX_FIELDS} fields")
        self._disposition, self._field_value = b"", b""
        self._header_name, self._header_value = b"", b""

    def _add_to_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name = _checked_length(self._header_name + data[start:end], _MAX_HEADER_BYTES, "header")

    def _add_to_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value = _checked_length(
            self._header_value + data[start:end], _MAX_HEADER_BYTES, "header"
        )

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name, self._header_value = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        self._field = name
        if name == "file":
            if self.file_name is not None:
                raise RequestProblem(400, "the form has two files: send only one", param="file")
            file_name = options.get(b"filename", b"").decode(errors="replace")
            self._field, self.file_name = None, Path(file_name or "file").name[:255]

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._file.write(memoryview(data)[start:end])
            self.file_size += end - start
        else:
            self._field_value = _checked_length(
                self._field_value + data[start:end], _MAX_FIELD_BYTES, "field"
            )

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._field_value.decode(errors="replace")

    def _end(self) -> None:
        self._has_ended = True


async def read_form(request: Request, path: Path, *, max_bytes: int, timeout: float) -> Form:
    """Read a form, write the content of its file to `path` and return the form.

    Raises:
        RequestProblem: 415 if the body is not ``multipart/form-data``, 413 if it is longer than `max_bytes`,
            408 if it does not arrive within `timeout` seconds, 400 if `Form.write` or `Form.finish` refuses
            it.
        ClientDisconnect: the client disconnected before the end of the body.
    """
    media_type, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if media_type != b"multipart/form-data" or not boundary:
        raise RequestProblem(415, "send the file as multipart/form-data, with the fields file and purpose")
    with path.open("wb") as file:
        form = Form(boundary, file)
        try:
            async with asyncio.timeout(timeout):
                await _read(request, form, max_bytes)
        except TimeoutError:
            raise RequestProblem(408, f"the body did not arrive within {timeout:g} seconds") from None
    form.finish()
    return form


async def _read(request: Request, form: Form, max_bytes: int) -> None:
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise RequestProblem(
                413,
                f"the body is longer than {max_bytes} bytes, the limit of this server (--max-file-size)",
                headers={"connection": "close"},
            )
        await asyncio.to_thread(form.write, part)
        if not message.get("more_body", False):
            return


def _checked_length(value: bytes, max_bytes: int, kind: str) -> bytes:
    if len(value) > max_bytes:
        raise RequestProblem(400, f"a {kind} of the form is longer than {max_bytes} bytes")
    return value
