"""`LocalServer`: the server's routes and one model in a Ray actor or replica, without an HTTP socket."""

from __future__ import annotations

from starlette.types import ASGIApp

from penstock.assembly import load_tokenizer
from penstock.config import PipelineConfig
from penstock.engines import make_engine
from penstock.ray.shared_start import SharedStart
from penstock.serve.app import create_app
from penstock.serve.config import ServeConfig
from penstock.serve.service_factory import build_services, close_services
from penstock.worker.engine_client import EngineClient


class LocalServer:
    """The ASGI application of a server and the engine of its model, for calls from this process.

    Args:
        config: the configuration of the model.
        serve_config: the configuration of the server, such as request limits and parsers.
        engine: an engine client that has not been launched. The default runs the model in a worker process.
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
        """The ASGI application."""
        self.start = SharedStart(self._start)
        """Callable that loads the model (`SharedStart`)."""

    async def _start(self) -> None:
        await self.engine.start()
        self._tokenizer.max_length = self.engine.info.max_length
        self.services.gate.open()

    async def stop(self) -> None:
        """Stop the worker and close the services."""
        await self.engine.stop(0)
        await close_services(self.services)
