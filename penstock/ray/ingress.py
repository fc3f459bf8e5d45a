"""The Ray Serve deployment that serves HTTP. It runs the same ASGI application as a server without Ray."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.assembly import load_serving_tokenizer
from penstock.config import PipelineConfig
from penstock.errors import PenstockError
from penstock.ray.engine import RayEngine, Replicas
from penstock.serve.app import create_app
from penstock.serve.config import ServeConfig
from penstock.serve.observability.logs import configure_logging, log_event
from penstock.serve.observability.watchdog import Watchdog
from penstock.serve.service_factory import build_services, close_services
from penstock.serve.services import Services
from penstock.serve.warmup import warm_up_grammars

_LOG = logging.getLogger("penstock.ray")

_ABORT_SECONDS = 2.0
"""Maximum seconds to wait until aborted requests have sent their errors to the clients."""


class Application:
    """The ASGI application of one ingress replica. The ASGI lifespan events start and stop it.

    Args:
        services: the services of the application. Their gate must be closed.
        engine: the engine client of these services.
    """

    def __init__(self, services: Services, engine: RayEngine) -> None:
        self._services = services
        self._engine = engine
        self._app: ASGIApp = create_app(services)
        self._background_tasks: list[asyncio.Task[None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an HTTP request or the lifespan events of ASGI."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        try:
            await self.start()
        except PenstockError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Wait until a model replica is ready, then admit requests."""
        services, engine = self._services, self._engine
        await engine.start()
        services.tokenizer.max_length = engine.info.max_length
        services.metrics.describe_build(model=services.model_name, isa=engine.info.isa)
        services.gate.open()
        watchdog = Watchdog(engine, services.config.watchdog_timeout)
        self._background_tasks.append(asyncio.create_task(watchdog.run()))
        if engine.info.grammars_enabled:
            self._background_tasks.append(asyncio.create_task(self._warm_up_grammars()))

    async def _warm_up_grammars(self) -> None:
        try:
            await warm_up_grammars(self._engine, self._services.tokenizer)
        except PenstockError as error:
            log_event(_LOG, logging.WARNING, "the warm-up of grammars has failed", error=str(error))

    async def stop(self) -> None:
        """Refuse new requests, wait up to ``shutdown_grace`` seconds for active ones, and stop."""
        services, gate = self._services, self._services.gate
        gate.close()
        for task in self._background_tasks:
            task.cancel()
        await gate.wait_until_idle(services.config.shutdown_grace)
        await self._engine.stop(0)
        await gate.wait_until_idle(_ABORT_SECONDS)
        await close_services(services)


def make_application(
    config: PipelineConfig,
    serve_config: ServeConfig,
    replicas: Replicas,
    max_outstanding: int,
    num_ingresses: int,
) -> Application:
    """Return an application that has not started. The ASGI event ``lifespan.startup`` starts it.

    Raises:
        CheckpointError: the tokenizer of the model cannot be loaded.
    """
    engine = RayEngine(replicas, max_outstanding, num_ingresses)
    tokenizer = load_serving_tokenizer(config)
    return Application(build_services(serve_config, config, engine, tokenizer), engine)


class Ingress:
    """Builds the application in each replica of the HTTP deployment. `serve.ingress` of Ray wraps the class.

    Args:
        engine_handle: the ``DeploymentHandle`` of the deployment whose replicas run the model.
        config: the configuration of the model.
        serve_config: the configuration of the server.
        max_outstanding: maximum number of running and waiting requests of one replica of the HTTP
            deployment.
        num_ingresses: the number of replicas of the HTTP deployment.
    """

    def __init__(
        self,
        engine_handle: Any,
        config: PipelineConfig,
        serve_config: ServeConfig,
        max_outstanding: int,
        num_ingresses: int,
    ) -> None:
        self._engine_handle = engine_handle
        self._config, self._serve_config = config, serve_config
        self._max_outstanding, self._num_ingresses = max_outstanding, num_ingresses

    def __serve_build_asgi_app__(self) -> Application:
        """Return the application. Ray Serve calls this method in each replica."""
        from penstock.ray.handles import ServeReplicas

        configure_logging(self._serve_config)
        replicas = ServeReplicas(self._engine_handle)
        return make_application(
            self._config, self._serve_config, replicas, self._max_outstanding, self._num_ingresses
        )
