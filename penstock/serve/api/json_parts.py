"""JSON documents in parts, so that encoding a long response does not block the event loop.

A response with many log probabilities takes seconds to encode. The functions here yield its JSON in parts of
bounded cost. `gather` and `spread` let the event loop run after each `SLICE_SECONDS` of work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SLICE_SECONDS = 0.001
"""Encoding time after which the event loop runs. Encoding one part takes about this long at most."""
MESSAGE_BYTES = 256 * 1024
"""Approximate maximum size of one ASGI body message."""

encode = msgspec.json.Encoder().encode
Parts = Iterator[bytes]


def with_members(first_members: Mapping[str, object], **members: Iterable[bytes]) -> Parts:
    """Yield the JSON of an object: ``first_members``, which are not empty, then further members in parts.

    >>> b"".join(with_members({"a": 1}, b=[b"[2,", b"3]"], c=[b"null"]))
    b'{"a":1,"b":[2,3],"c":null}'
    """
    yield encode(first_members)[:-1]
    for name, value in members.items():
        yield b",%b:" % encode(name)
        yield from value
    yield b"}"


def array(items: Iterable[Iterable[bytes]]) -> Parts:
    """Yield the JSON of an array; the items are given in parts.

    >>> b"".join(array([[b"1"], [b"[2,", b"3]"]]))
    b'[1,[2,3]]'
    """
    yield b"["
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
    yield b"]"


def event_parts(data: Iterable[bytes]) -> Parts:
    """Yield one server-sent event; its data are given in parts."""
    yield b"data: "
    yield from data
    yield b"\n\n"


class EncodingTurns:
    """Lets one long response at a time encode a slice, so that the event loop runs after each slice."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def pause(self) -> None:
        """Yield to the event loop and to other responses that wait for their next slice."""
        async with self._lock:
            await asyncio.sleep(0)


async def gather(parts: Iterable[bytes], turns: EncodingTurns) -> list[bytes]:
    """Return all parts. Yields to the event loop after each `SLICE_SECONDS` of encoding."""
    return [part async for part in spread(parts, turns)]


async def spread(parts: Iterable[bytes], turns: EncodingTurns) -> AsyncGenerator[bytes, None]:
    """Yield the parts. Yields to the event loop after each `SLICE_SECONDS` of encoding."""
    begin = time.perf_counter()
    for part in parts:
        if part:
            yield part
        if time.perf_counter() - begin >= SLICE_SECONDS:
            await turns.pause()
            begin = time.perf_counter()


def json_response(value: object) -> Response:
    """Return a short JSON document."""
    return Response(encode(value), media_type="application/json")


class JsonResponse(Response):
    """A JSON document; a long one is sent in several messages.

    Args:
        parts: the document.
    """

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        # Not Response.__init__, which needs the whole body as one bytes object.
        self.status_code = 200
        self.background = None
        self.body = b""
        self._parts = parts
        self.init_headers({"content-length": str(sum(map(len, parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the document."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        message: list[bytes] = []
        size = 0
        for part in self._parts:
            message.append(part)
            size += len(part)
            if size >= MESSAGE_BYTES:
                await send({"type": "http.response.body", "body": b"".join(message), "more_body": True})
                await asyncio.sleep(0)  # send() yields to the event loop only if the client reads slowly
                message, size = [], 0
        await send({"type": "http.response.body", "body": b"".join(message), "more_body": False})
