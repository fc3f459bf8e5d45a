"""Sends requests to an ASGI application in this process, without a network connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message

from penstock.serve.http.middleware import INTERNAL_SCOPE_KEY


@dataclass(frozen=True, slots=True)
class InternalResponse:
    """The response to an internal request. Its body arrives in parts."""

    status: int
    headers: Mapping[bytes, bytes]
    """Name in lower case -> value."""
    parts: AsyncIterator[bytes]
    """Yields the parts of the body as they arrive."""

    async def body(self) -> bytes:
        """Return the whole body. Consumes `parts`."""
        return b"".join([part async for part in self.parts])


@asynccontextmanager
async def internal_request(
    app: ASGIApp, path: str, body: Mapping[str, object], headers: Mapping[str, str], *, client: str
) -> AsyncIterator[InternalResponse]:
    """Send a POST request to an application and yield the response when it has started.

    The end of the ``async with`` block cancels the request if the request is still running. If the
    application fails before the response has started, the start of the block raises the error. If it fails
    later, `InternalResponse.parts` raises the error.

    Args:
        app: the application.
        path: the path of the route.
        body: the body, which is sent as JSON.
        headers: additional headers.
        client: the address or id of the client, for fair scheduling.
    """
    request_messages: list[Message] = [
        {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}
    ]
    sent_messages: asyncio.Queue[Message] = asyncio.Queue()

    async def receive() -> Message:
        if request_messages:
            return request_messages.pop()
        # Blocks until cancellation, because an internal client does not disconnect.
        await asyncio.Event().wait()
        raise AssertionError

    all_headers = {"host": "localhost", "content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in all_headers.items()],
        "client": (client, 0),
        "server": ("localhost", 80),
        "state": {},
        INTERNAL_SCOPE_KEY: True,
    }
    task = asyncio.ensure_future(_run(app, scope, receive, sent_messages))

    async def parts() -> AsyncIterator[bytes]:
        has_more = True
        while has_more:
            message = await sent_messages.get()
            if message["type"] != "http.response.body":
                raise await _application_error(task)
            if part := message.get("body"):
                yield part
            has_more = message.get("more_body", False)

    try:
        start = await sent_messages.get()
        if start["type"] != "http.response.start":
            raise await _application_error(task)
        yield InternalResponse(start["status"], dict(start["headers"]), parts())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(app: ASGIApp, scope: Message, receive: object, sent_messages: asyncio.Queue[Message]) -> None:
    try:
        await app(scope, receive, sent_messages.put)  # type: ignore[arg-type]
    finally:
        sent_messages.put_nowait({"type": "ended"})


async def _application_error(task: asyncio.Task[None]) -> BaseException:
    """Return the error of an application that ended before its response was complete."""
    (error,) = await asyncio.gather(task, return_exceptions=True)
    return error if isinstance(error, BaseException) else RuntimeError("the response is incomplete")
