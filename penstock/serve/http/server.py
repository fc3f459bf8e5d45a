"""The uvicorn server. It runs in the caller's event loop and installs no signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec

import uvicorn
from fastapi import FastAPI

from penstock.serve.config import ServeConfig
from penstock.serve.http.connection import Connection, H11Connection

DRAIN_TIMEOUT = 2
"""Maximum number of seconds to wait at shutdown until connections have closed and requests have ended."""


class HttpServer(uvicorn.Server):
    """Serve an application on a socket.

    Args:
        app: the application.
        config: the configuration. ``body_timeout`` is also the limit for the headers of a request.
    """

    def __init__(self, app: FastAPI, config: ServeConfig) -> None:
        class Protocol(connection_class()):  # type: ignore[misc]
            request_start_timeout = config.body_timeout

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
                timeout_graceful_shutdown=DRAIN_TIMEOUT,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers. The caller handles signals."""
        yield

    @asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve while the ``with`` block runs, then close the connections.

        After the block, waits up to `DRAIN_TIMEOUT` seconds for active requests. Does not wait if the block
        raises.
        """
        serve_task = asyncio.create_task(self.serve(sockets=[listener]))
        try:
            yield
        except BaseException:
            self.force_exit = True
            raise
        finally:
            self.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serve_task


def connection_class() -> type[Connection]:
    """Return the connection class of httptools if it is installed, else the class of h11."""
    if find_spec("httptools") is None:
        return H11Connection
    from penstock.serve.http.fast_connection import HttpToolsConnection

    return HttpToolsConnection
