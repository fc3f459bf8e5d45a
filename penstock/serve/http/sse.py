"""Server-sent events: their encoding and the streaming response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.serve.http.problems import Problem, problem_of

PING = b": ping\n\n"
"""A comment that keeps proxies and clients from closing an idle connection."""
DONE = b"data: [DONE]\n\n"
"""The last event of a complete stream of OpenAI's completions and chat completions."""

_encode = msgspec.json.Encoder().encode


_LINE_END_ESCAPES = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
"""Pairs of a Unicode line end in UTF-8 and its JSON escape."""


def escape_line_ends(data: bytes) -> bytes:
    """Return JSON with escapes for the non-ASCII characters at which ``str.splitlines`` splits.

    JSON strings may contain these characters. Clients that split a stream with ``splitlines``, such as
    Ollama's, would get incomplete lines.
    """
    for end, escape in _LINE_END_ESCAPES:
        data = data.replace(end, escape)
    return data


def event(data: object) -> bytes:
    """Return an event with an object as its data."""
    return b"data: " + _encode(data) + b"\n\n"


def named_event(data: dict[str, object]) -> bytes:
    """Return an event whose name is the ``type`` of its data."""
    return b"event: %b\ndata: %b\n\n" % (str(data["type"]).encode(), _encode(data))


class OpenAIStream:
    """The ping and error events of OpenAI's completions and chat completions streams."""

    media_type = "text/event-stream"

    def ping(self) -> bytes:
        """Return a comment that keeps the connection open while the stream has no events."""
        return PING

    def error(self, problem: Problem) -> bytes:
        """Return the event of an error that ends the stream."""
        return b"data: " + problem.encode() + b"\n\n"


class EventTemplate:
    """An event in which only one value varies. The rest of the event is encoded once.

    >>> template = EventTemplate({"id": "x", "text": EventTemplate.PLACEHOLDER})
    >>> template.with_value("He said \\"1\\"\\n")
    b'data: {"id":"x","text":"He said \\\\"1\\\\"\\\\n"}\\n\\n'
    """

    PLACEHOLDER = "\x00here\x00"
    """Stands for the value. The object must contain this text exactly once."""

    def __init__(self, data: object) -> None:
        self._prefix, self._suffix = event(data).split(_encode(self.PLACEHOLDER))

    def with_value(self, value: object) -> bytes:
        """Return the event with `value` in the place of `PLACEHOLDER`."""
        return b"%b%b%b" % (self._prefix, _encode(value), self._suffix)


class EventStream(Response):
    """A response that sends each chunk of a generator as soon as the chunk is available.

    An error in the generator becomes the last event, by default ``data: {"error": {...}}`` in OpenAI's
    format. When the client disconnects, the generator is closed immediately and releases its resources. An
    `OSError` of the ASGI server's ``send`` counts as a disconnect.

    Args:
        chunks: yields events, parts of events that end at a character boundary, or binary data.
        on_error: called with the error that ended the stream.
        on_disconnect: called when the client has disconnected.
        error_event: encodes the error that ended the stream.
        media_type: the content type of the stream.
        is_text: whether chunks are text, in which Unicode line ends are escaped; False for audio.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        error_event: Callable[[Problem], bytes] | None = None,
        media_type: str = "text/event-stream",
        is_text: bool = True,
        on_error: Callable[[BaseException], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        # Response.__init__ is not called, because a stream has no content to render.
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = media_type
        self._chunks = chunks
        self._is_text = is_text
        self._error_event = error_event or OpenAIStream().error
        self._on_error = on_error
        self._on_disconnect = on_disconnect
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # init_headers has set the length of the empty body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Return at its end, or when the client disconnects."""
        send_task = asyncio.ensure_future(self._send(send))
        disconnect_task = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait((send_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
            if not send_task.done():
                self._on_disconnect()
                send_task.cancel()
                await asyncio.wait((send_task,))
            elif (error := send_task.exception()) is not None:
                raise error
        finally:
            disconnect_task.cancel()
            send_task.cancel()
            await asyncio.wait((send_task, disconnect_task))
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for body in self._bodies():
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            self._on_disconnect()  # some ASGI servers report a disconnected client by an OSError

    async def _bodies(self) -> AsyncIterator[bytes]:
        """Yield the parts of the response body. The last part is the error event if the generator fails."""
        try:
            async for chunk in self._chunks:
                yield escape_line_ends(chunk) if self._is_text else chunk
        except Exception as error:
            self._on_error(error)
            yield escape_line_ends(self._error_event(problem_of(error)))


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected. The caller must have read the request body."""
    while (await receive())["type"] != "http.disconnect":
        pass
