"""The application and the engine of one model in this process, without HTTP: of an actor or a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message

from penstock.assembly import load_tokenizer
from penstock.config import PipelineConfig
from penstock.engines import make_engine
from penstock.serve.app import create_app
from penstock.serve.batches.batch_dispatch import CLIENT
from penstock.serve.config import ServeConfig
from penstock.serve.http.middleware import INTERNAL
from penstock.serve.service_factory import build_services, close_services
from penstock.worker.engine_client import EngineClient


class LocalServer:
    """The routes of a model, for calls from this process.

    Args:
        config: the configuration of the model.
        serve_config: limits and parsers.
        engine: the engine client, not launched yet; by default a worker process.
    """

    def __init__(
        self, config: PipelineConfig, serve_config: ServeConfig, engine: EngineClient | None = None
    ) -> None:
        self._tokenizer = load_tokenizer(config)
        self.engine: EngineClient = engine or make_engine(
            config,
            max_queue_size=serve_config.max_queue_size,
            hang_limit=serve_config.worker_timeout,
            memory_limit=serve_config.worker_memory_limit,
        )
        """The engine client of the model."""
        self.services = build_services(serve_config, config, self.engine, self._tokenizer)
        """The services of the routes."""
        self.app: ASGIApp = create_app(self.services)
        """The application."""
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model. Calls that run at the same time share the load.

        Raises:
            PenstockError: the model cannot be loaded.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self.engine.start()
        self._tokenizer.max_length = self.engine.info.max_length
        self.services.gate.open()

    async def stop(self) -> None:
        """End the worker and what belongs to it."""
        await self.engine.stop(0)
        await close_services(self.services)


@dataclass(frozen=True, slots=True)
class InternalResponse:
    """The response to an internal request, whose body arrives in parts."""

    status: int
    parts: AsyncIterator[bytes]

    async def body(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self.parts])


@asynccontextmanager
async def internal_request(
    app: ASGIApp, path: str, body: Mapping[str, object], headers: Mapping[str, str]
) -> AsyncIterator[InternalResponse]:
    """Send a request to an application and yield the beginning response. Leaving the block cancels it.

    Args:
        app: the application.
        path: the path of the route.
        body: the JSON body.
        headers: additional headers.
    """
    requests: list[Message] = [
        {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}
    ]
    sent: asyncio.Queue[Message] = asyncio.Queue()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()  # an internal client does not disconnect
        raise AssertionError

    given = {"host": "localhost", "content-type": "application/json", **headers}
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
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": (CLIENT, 0),
        "server": ("localhost", 80),
        "state": {},
        INTERNAL: True,
    }
    task = asyncio.ensure_future(_run(app, scope, receive, sent))

    async def parts() -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await sent.get()
            if message["type"] != "http.response.body":
                raise await _error_of(task)
            if part := message.get("body"):
                yield part
            more = message.get("more_body", False)

    try:
        start = await sent.get()
        if start["type"] != "http.response.start":
            raise await _error_of(task)
        yield InternalResponse(start["status"], parts())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(app: ASGIApp, scope: Message, receive: object, sent: asyncio.Queue[Message]) -> None:
    try:
        await app(scope, receive, sent.put)  # type: ignore[arg-type]
    finally:
        sent.put_nowait({"type": "ended"})


async def _error_of(task: asyncio.Task[None]) -> BaseException:
    """Return the error of an application that ended before its response."""
    (error,) = await asyncio.gather(task, return_exceptions=True)
    return error if isinstance(error, BaseException) else RuntimeError("the response has no end")
