"""Server-sent events: how they are framed, and the response that sends them as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.serve.http.problems import problem_of

PING = b": ping\n\n"
"""A comment: it keeps proxies and clients from giving up a connection on which nothing comes."""
DONE = b"data: [DONE]\n\n"
"""What OpenAI sends last, and only after an answer that is whole."""

_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    """One event with an object as its data."""
    return b"data: " + _encode(data) + b"\n\n"


class EventTemplate:
    """An event that is the same each time but for one value, encoded once.

    >>> template = EventTemplate({"id": "x", "text": EventTemplate.HOLE})
    >>> template.with_value("He said \\"1\\"\\n")
    b'data: {"id":"x","text":"He said \\\\"1\\\\"\\\\n"}\\n\\n'
    """

    HOLE = "\x00here\x00"
    """Stands in the object where the value goes. Nothing else in the object may contain it."""

    def __init__(self, data: Any) -> None:
        self._before, self._after = event(data).split(_encode(self.HOLE))

    def with_value(self, value: Any) -> bytes:
        """The event with the value in its place."""
        return b"%b%b%b" % (self._before, _encode(value), self._after)


class EventStream(Response):
    """Sends what a generator makes, each piece as soon as it is there.

    An error in the generator becomes an event ``data: {"error": {...}}`` in OpenAI's shape, after which the
    stream ends without ``[DONE]``: whoever sees that mark has the whole answer. Where the client leaves,
    the generator is closed at once, and so lets go of what it holds.

    Args:
        pieces: whole events.
        on_error: told of an error that ended the stream.
        on_disconnect: told that the client has left.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *,
        on_error: Callable[[BaseException], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        # Response() would compute the length of a body.
        self.status_code = 200
        self.background = None
        self.body = b""
        self._pieces = pieces
        self._on_error = on_error
        self._on_disconnect = on_disconnect
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream; returns at its end or when the client has left."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self._on_disconnect()
                sending.cancel()
                await asyncio.wait((sending,))
            elif (error := sending.exception()) is not None:
                raise error
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.wait((sending, leaving))
            await self._pieces.aclose()

    async def _send(self, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except OSError:
            self._on_disconnect()  # so some servers say that the client has left
            return
        except Exception as error:
            self._on_error(error)
            message = b"data: " + problem_of(error).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
