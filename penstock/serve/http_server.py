"""uvicorn, run inside somebody else's event loop and without a will of its own about signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from penstock.serve.config import ServeConfig
from penstock.serve.problems import RequestProblem, problem_of

if TYPE_CHECKING or find_spec("httptools") is None:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _UvicornProtocol
else:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _UvicornProtocol

_LAST_WORDS = 2
"""Seconds that connections have to close by themselves at the end."""


class HttpServer(uvicorn.Server):
    """Serves an application on a socket.

    Args:
        app: the application.
        config: for the time that idle connections are kept, and that a first request may take to begin.
    """

    def __init__(self, app: FastAPI, config: ServeConfig) -> None:
        class Protocol(_Protocol):
            seconds_to_begin = config.body_timeout

        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=max(1, round(config.keep_alive)),
                timeout_graceful_shutdown=_LAST_WORDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the business of whoever runs the server."""
        yield

    @asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serves while the block runs; then connections are closed, in good order unless in haste."""
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        try:
            yield
        except BaseException:
            self.force_exit = True
            raise
        finally:
            self.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serving


class _Protocol(_UvicornProtocol):
    """One connection."""

    seconds_to_begin: float
    _begins: asyncio.TimerHandle | None = None
    """Closes the connection unless a request begins before."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        cycle: Any = self.cycle  # the last request that has begun; whatever uvicorn says, None at first
        super().data_received(data)
        if self.cycle is not cycle:
            self._stop_waiting()
        elif self._begins is None and cycle.response_complete:  # a part of the next one's headers
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()  # or the timer would hold what is gone
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        loop = asyncio.get_running_loop()
        self._begins = loop.call_later(self.seconds_to_begin, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._begins is not None:
            self._begins.cancel()
            self._begins = None

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no HTTP, in the shape of all other errors."""
        body = problem_of(RequestProblem(400, "the request is not valid HTTP", code="invalid_http")).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
