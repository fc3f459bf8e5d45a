"""Reads and decodes JSON request bodies, with limits on size and time.

Routers whose routes have JSON bodies use ``APIRouter(route_class=JsonRoute)``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from penstock.serve.http.json_process import InvalidJsonError, TooManyValuesError, decode
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import LARGE_BODY_BYTES, Services

_MAX_INLINE_BYTES = 64 * 1024
"""Longer bodies are decoded in another process, so that decoding does not block the event loop."""


class JsonRequest(Request):
    """A request with limits on its body and with strict JSON decoding."""

    _body_bytes: bytes | None = None
    _holds_large_body_slot = False

    async def body(self) -> bytes:
        """Return the whole body.

        Raises:
            RequestProblem: 413 if the body is longer than ``max_body_size``, 408 if it does not arrive within
                ``body_timeout``, 415 if its content type is missing or not JSON, or its charset is neither
                UTF-8 nor US-ASCII.
            OverloadedError: 429; the body is large, and too many large bodies are being processed.
            ClientDisconnect: the client closed the connection.
        """
        if self._body_bytes is None:
            self._check_media_type()
            config = Services.of(self).config
            try:
                async with asyncio.timeout(config.body_timeout):
                    self._body_bytes = await self._read(config.max_body_size)
            except TimeoutError:
                raise RequestProblem(
                    408,
                    f"the body did not arrive within {config.body_timeout:g} seconds",
                    headers={"connection": "close"},
                ) from None
        return self._body_bytes

    async def json(self) -> object:
        """Return the decoded body. Raises the exceptions of `body`, too.

        Raises:
            RequestProblem: 400; the body is not strict JSON or has too many values.
            UnavailableError: the process that decodes long bodies has ended or cannot be started.
        """
        body = await self.body()
        services = Services.of(self)
        limits = services.json_limits
        if len(body) <= _MAX_INLINE_BYTES:
            return decode_json(body, *limits)
        with _map_json_errors():
            return await services.decoder_for(len(body)).decode(body, *limits)

    def _check_media_type(self) -> None:
        content_type = self.headers.get("content-type")
        if content_type is None:  # web pages can send such requests to other sites without a CORS preflight
            raise RequestProblem(
                415, "the body must be JSON: send 'Content-Type: application/json', which is missing"
            )
        media_type, _, parameters = content_type.partition(";")
        media_type = media_type.strip().lower()
        if media_type != "application/json" and not (
            media_type.startswith("application/") and media_type.endswith("+json")
        ):
            raise RequestProblem(
                415, f"the body must be JSON: send 'Content-Type: application/json', not {content_type!r}"
            )
        _, has_charset, charset = parameters.lower().partition("charset=")
        if has_charset and charset.strip(" \"'") not in ("utf-8", "utf8", "us-ascii"):
            raise RequestProblem(415, f"the body must be UTF-8, not {charset!r}")

    async def _read(self, max_bytes: int) -> bytes:
        content_length = self.headers.get("content-length", "")
        if content_length.isdecimal() and int(content_length) > max_bytes:
            _raise_too_long(max_bytes)
        parts, num_bytes = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                _raise_too_long(max_bytes)
            if num_bytes > LARGE_BODY_BYTES and not self._holds_large_body_slot:
                Services.of(self).large_bodies.acquire()
                self._holds_large_body_slot = True
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def release(self) -> None:
        """Release the slot for a large body if the request holds one."""
        if self._holds_large_body_slot:
            self._holds_large_body_slot = False
            Services.of(self).large_bodies.release()


class JsonRoute(APIRoute):
    """A route that passes a `JsonRequest` to its handler."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        """Return a function that calls the route's handler with a `JsonRequest`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive, request._send)
            try:
                return await handler(json_request)
            finally:
                json_request.release()

        return handle


def decode_json(body: bytes, max_values: int = sys.maxsize, max_items: int = sys.maxsize) -> object:
    """Decode JSON with the rules of `penstock.serve.http.json_process.decode`.

    Raises:
        RequestProblem: 400; the body is not strict JSON or has too many values.
    """
    with _map_json_errors():
        return decode(body, max_values, max_items)


@contextmanager
def _map_json_errors() -> Iterator[None]:
    try:
        yield
    except InvalidJsonError as error:
        raise RequestProblem(400, str(error), code="invalid_json") from None
    except TooManyValuesError as error:
        raise RequestProblem(
            400,
            f"{error} (--max-json-values): send a smaller body, or text instead of token ids",
            code="too_many_values",
        ) from None


def _raise_too_long(max_bytes: int) -> NoReturn:
    raise RequestProblem(
        413,
        f"the body is longer than {max_bytes} bytes, the limit of this server",
        headers={"connection": "close"},
    )
