"""Encodes JSON documents in parts, so that encoding a long response does not block the event loop.

Encoding a response with many log probabilities takes seconds. The functions of this module yield the JSON of
a response in small parts. `collect_parts` and `with_pauses` run the event loop after each `SLICE_SECONDS` of
encoding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SLICE_SECONDS = 0.001
"""Seconds of encoding after which the event loop runs. Encoding one part should not take longer than this."""
MESSAGE_BYTES = 256 * 1024
"""Size in bytes at which an ASGI body message is sent. A message exceeds this size by less than one part."""

encode = msgspec.json.Encoder().encode
Parts = Iterator[bytes]
"""Consecutive parts of a JSON text in UTF-8."""


def with_members(first_members: Mapping[str, object], **members: Iterable[bytes]) -> Parts:
    """Yield the JSON of an object.

    Args:
        first_members: the first members of the object; at least one.
        **members: the name of each further member -> the parts of its JSON.

    >>> b"".join(with_members({"a": 1}, b=[b"[2,", b"3]"], c=[b"null"]))
    b'{"a":1,"b":[2,3],"c":null}'
    """
    yield encode(first_members)[:-1]
    for name, value in members.items():
        yield b",%b:" % encode(name)
        yield from value
    yield b"}"


def array(items: Iterable[Iterable[bytes]]) -> Parts:
    """Yield the JSON of an array. Each item is an iterable of the parts of its JSON.

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
    """Yield one server-sent event whose data is the concatenation of ``data``."""
    yield b"data: "
    yield from data
    yield b"\n\n"


class EncodingTurns:
    """Makes the encoders of long responses take turns.

    The event loop runs once between two slices of encoding, even if the slices belong to different responses.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def pause(self) -> None:
        """Wait until the responses that paused earlier continue, then yield to the event loop once."""
        async with self._lock:
            await asyncio.sleep(0)


async def collect_parts(parts: Iterable[bytes], turns: EncodingTurns) -> list[bytes]:
    """Return the parts that are not empty. Runs the event loop after each `SLICE_SECONDS` of encoding."""
    return [part async for part in with_pauses(parts, turns)]


async def with_pauses(parts: Iterable[bytes], turns: EncodingTurns) -> AsyncGenerator[bytes, None]:
    """Yield the parts that are not empty. Runs the event loop after each `SLICE_SECONDS` of encoding."""
    begin = time.perf_counter()
    for part in parts:
        if part:
            yield part
        if time.perf_counter() - begin >= SLICE_SECONDS:
            await turns.pause()
            begin = time.perf_counter()


def json_response(value: object) -> Response:
    """Return a response with a short JSON document."""
    return Response(encode(value), media_type="application/json")


class JsonResponse(Response):
    """A response with a JSON document, sent in ASGI messages of about `MESSAGE_BYTES`.

    Args:
        parts: the parts of the document.
    """

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        # Response.__init__ is not called, because it requires the whole body as one bytes object.
        self.status_code = 200
        self.background = None
        self.body = b""
        self._parts = parts
        self.init_headers({"content-length": str(sum(map(len, parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the document."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pending_parts: list[bytes] = []
        num_bytes = 0
        for part in self._parts:
            pending_parts.append(part)
            num_bytes += len(part)
            if num_bytes >= MESSAGE_BYTES:
                body = b"".join(pending_parts)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(0)  # send() yields to the event loop only if the client reads slowly
                pending_parts, num_bytes = [], 0
        await send({"type": "http.response.body", "body": b"".join(pending_parts), "more_body": False})
