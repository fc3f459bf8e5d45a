"""A server on a socket, which runs in a separate thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support.asgi import wait_until
from support.in_process_server import InProcessServer, run_in_process

from penstock.serve.http.server import HttpServer


@dataclass
class LiveServer:
    """A server that runs in another thread."""

    url: str
    """The URL, with a trailing slash."""
    app_server: InProcessServer
    loop: asyncio.AbstractEventLoop

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait up to 30 seconds until a condition is true. The server's thread evaluates the condition."""
        asyncio.run_coroutine_threadsafe(wait_until(condition), self.loop).result(30)


@contextmanager
def live_server(**options: Any) -> Iterator[LiveServer]:
    """Run a server with options of `run_in_process` until the end of the block."""
    server_future: Future[LiveServer] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(server_future, options)), name="live server")
    thread.start()
    server = server_future.result(60)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.app_server.services.gate.close)
        thread.join(30)
        assert not thread.is_alive()


async def _serve(server_future: Future[LiveServer], options: dict[str, Any]) -> None:
    """Serve until the server's gate is closed."""
    try:
        async with run_in_process(**options) as server:
            app = server.app
            server.services.tokenizer.max_length = server.services.worker.info.max_length
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                listener.listen(128)
                async with HttpServer(app, server.services.config).listening(listener):
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
                    server_future.set_result(LiveServer(url, server, asyncio.get_running_loop()))
                    while not server.services.gate.refusal_reason:
                        await asyncio.sleep(0.02)
    except BaseException as error:
        if not server_future.done():
            server_future.set_exception(error)
        raise
