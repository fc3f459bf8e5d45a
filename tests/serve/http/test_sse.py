"""Server-sent events: framing, errors, and disconnected clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UnavailableError
from penstock.serve.http.sse import DONE, EventStream, EventTemplate, event


@given(st.text())
def test_an_event_template_gives_the_bytes_of_an_event(text: str) -> None:
    template = EventTemplate({"a": [1, {"text": EventTemplate.PLACEHOLDER}], "b": None})
    assert template.with_value(text) == event({"a": [1, {"text": text}], "b": None})
    assert b"\n" not in template.with_value(text)[:-2]


@given(st.text(st.sampled_from('a\\"\x0b\x0c\x1c\x85\u2028\u2029\u2014é')))
async def test_clients_that_split_at_unicode_line_ends_read_events(text: str) -> None:
    async def yield_events() -> AsyncGenerator[bytes, None]:
        yield event({"text": text})
        yield b"data: " + json.dumps([text, text], ensure_ascii=False).encode() + b"\n\n"

    client = AsgiClient()
    await client.run(client.stream(yield_events()))
    first_line, empty_line, second_line, *_ = client.body.decode().splitlines()
    assert json.loads(first_line.removeprefix("data: ")) == {"text": text}
    assert empty_line == ""
    assert json.loads(second_line.removeprefix("data: ")) == [text, text]


class AsgiClient:
    """An ASGI client that receives a response and can disconnect."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.disconnected = asyncio.Event()
        self.reports: list[Any] = []

    def stream(self, chunks: AsyncGenerator[bytes, None]) -> EventStream:
        return EventStream(
            chunks, on_error=self.reports.append, on_disconnect=lambda: self.reports.append("disconnect")
        )

    async def run(self, stream: EventStream) -> None:
        await stream({"type": "http"}, self._receive, self._send)

    async def _receive(self) -> Any:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def test_a_stream_sends_events_in_order() -> None:
    async def yield_events() -> AsyncGenerator[bytes, None]:
        yield event({"a": 1})
        yield DONE

    client = AsgiClient()
    await client.run(client.stream(yield_events()))
    start, *bodies = client.messages
    assert start["status"] == 200
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b"content-length" not in headers
    assert client.body == b'data: {"a":1}\n\ndata: [DONE]\n\n'
    assert [body["more_body"] for body in bodies] == [True, True, False]
    assert client.reports == []


@pytest.mark.parametrize("error", [UnavailableError("gone"), ZeroDivisionError("a secret")])
async def test_an_error_is_the_last_event(error: Exception) -> None:
    async def yield_events() -> AsyncGenerator[bytes, None]:
        yield event({"a": 1})
        raise error

    client = AsgiClient()
    await client.run(client.stream(yield_events()))
    first_event, error_event, remainder = client.body.decode().split("\n\n")
    assert (first_event, remainder) == ('data: {"a":1}', "")
    assert json.loads(error_event.removeprefix("data: "))["error"].keys() == {
        "message",
        "type",
        "param",
        "code",
    }
    assert "secret" not in error_event
    assert client.reports == [error]
    assert client.messages[-1]["more_body"] is False


async def test_a_disconnect_closes_the_generator() -> None:
    ended_event = asyncio.Event()

    async def yield_events() -> AsyncGenerator[bytes, None]:
        try:
            yield b": x\n\n"
            await asyncio.Event().wait()
        finally:
            ended_event.set()

    client = AsgiClient()
    running_task = asyncio.ensure_future(client.run(client.stream(yield_events())))
    while len(client.messages) < 2:
        await asyncio.sleep(0)
    client.disconnected.set()
    await asyncio.wait_for(running_task, 60)
    assert ended_event.is_set()
    assert client.reports == ["disconnect"]


async def test_a_cancelled_stream_closes_its_generator() -> None:
    ended_event = asyncio.Event()

    async def yield_events() -> AsyncGenerator[bytes, None]:
        try:
            yield b": x\n\n"
            await asyncio.Event().wait()
        finally:
            ended_event.set()

    client = AsgiClient()
    running_task = asyncio.ensure_future(client.run(client.stream(yield_events())))
    while len(client.messages) < 2:
        await asyncio.sleep(0)
    running_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running_task
    assert ended_event.is_set()


async def test_a_broken_connection_counts_as_a_disconnect() -> None:
    async def yield_events() -> AsyncGenerator[bytes, None]:
        while True:
            yield b": x\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    client = AsgiClient()
    stream = client.stream(yield_events())
    await asyncio.wait_for(stream({"type": "http"}, client._receive, send), 60)
    assert client.reports == ["disconnect"]


async def test_an_oserror_of_the_generator_becomes_an_error_event() -> None:
    async def yield_events() -> AsyncGenerator[bytes, None]:
        yield event("first")
        raise error

    error = OSError("no space left on device")
    client = AsgiClient()
    await asyncio.wait_for(client.run(client.stream(yield_events())), 60)
    assert client.reports == [error]
    first_event, error_event, _ = client.body.split(b"\n\n")
    assert first_event == b'data: "first"'
    assert "error" in json.loads(error_event.removeprefix(b"data: "))
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_connection_that_is_broken_at_the_start_counts_as_a_disconnect() -> None:
    async def yield_events() -> AsyncGenerator[bytes, None]:
        yield event("not read")

    async def send(message: Any) -> None:
        raise OSError("broken pipe")

    client = AsgiClient()
    await asyncio.wait_for(client.stream(yield_events())({"type": "http"}, client._receive, send), 60)
    assert client.reports == ["disconnect"]
