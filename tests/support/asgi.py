"""An ASGI client that records each message, can read slowly, and can disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message

TIMEOUT_SECONDS = 60  # long, because the machine may be busy


class Exchange:
    """One request to an ASGI application.

    While `may_send` is not set, the application waits when it sends a message.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: dict[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        client: tuple[str, int] = ("127.0.0.1", 123),  # the client address of httpx
    ) -> None:
        self.messages: list[Message] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._sent = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
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
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                *((name.encode(), value.encode()) for name, value in (headers or {}).items()),
            ],
            "server": ("server", 80),
            "client": client,
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def status(self) -> int | None:
        """The status code of the response; None before it is sent."""
        return self.messages[0]["status"] if self.messages else None

    @property
    def body(self) -> bytes:
        """The body sent so far."""
        return b"".join(message.get("body", b"") for message in self.messages)

    def disconnect(self) -> None:
        """Close the connection."""
        self._disconnected.set()

    async def wait_until_sent(self, num_messages: int) -> None:
        """Wait until the application has sent ``num_messages`` messages."""
        while len(self.messages) < num_messages:
            self._sent.clear()
            await asyncio.wait_for(self._sent.wait(), TIMEOUT_SECONDS)

    async def wait_until_ended(self) -> None:
        """Wait until the application has handled the request."""
        await asyncio.wait_for(asyncio.shield(self.task), TIMEOUT_SECONDS)

    async def _receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        self.messages.append(message)
        self._sent.set()


async def wait_until(condition: Any) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)
