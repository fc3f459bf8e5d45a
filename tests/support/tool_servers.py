"""Tool servers of the Model Context Protocol that run in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass
class ServedTools:
    """The URL of a running tool server, and its received requests."""

    url: str
    calls: list[tuple[str, object]] = field(default_factory=list)
    """Name and arguments of each call of ``add``, ``fail`` and ``slow``."""
    num_list_requests: int = 0
    """Number of requests for the list of tools."""
    num_sessions: int = 0
    """Number of requests that begin a session."""


class _TokenMiddleware:
    """Middleware that requires a bearer token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            if request.headers.get("authorization") != f"Bearer {self._token}":
                await Response("no token", 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@contextmanager
def tool_server(token: str | None = None) -> Iterator[ServedTools]:
    """Run a server with the tools ``add``, ``fail``, ``slow``, ``long`` and ``get/picture``.

    Args:
        token: the required bearer token; None if no token is required.
    """
    from mcp.server import MCPServer
    from mcp_types import ImageContent, TextContent, ToolAnnotations

    served = ServedTools("")
    server = MCPServer("tools", log_level="CRITICAL")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        served.calls.append(("add", (a, b)))
        return a + b

    @server.tool()
    def fail() -> str:
        """Fail."""
        served.calls.append(("fail", ()))
        raise ValueError("boom")

    @server.tool()
    async def slow() -> str:
        """Wait for 10 minutes."""
        served.calls.append(("slow", ()))
        await asyncio.sleep(600)
        return "done"

    @server.tool()
    def long() -> str:
        """Return 300,000 characters."""
        return "x" * 300_000

    @server.tool(name="get/picture", structured_output=False)
    def picture() -> list[Any]:
        """Return a text and a picture."""
        return [
            TextContent(type="text", text="A dot:"),
            ImageContent(type="image", data="AA==", mime_type="image/png"),
        ]

    app = server.streamable_http_app()

    async def count_requests(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        served.num_list_requests += b'"tools/list"' in body
        served.num_sessions += b'"initialize"' in body or b'"server/discover"' in body
        pending_messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> object:
            return pending_messages.pop() if pending_messages else await receive()

        await app(scope, replay, send)  # type: ignore[arg-type]

    listener = socket.create_server(("127.0.0.1", 0))
    served.url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    with _run_app(count_requests if token is None else _TokenMiddleware(count_requests, token), listener):
        yield served


@contextmanager
def broken_server(answer: Callable[[], Response] = lambda: PlainTextResponse("broken", 500)) -> Iterator[str]:
    """Run a server that sends the same response to every request. Yield its URL."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server has no lifespan"
        await answer()(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    with _run_app(app, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"


@contextmanager
def _run_app(app: ASGIApp, listener: socket.socket) -> Iterator[None]:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
