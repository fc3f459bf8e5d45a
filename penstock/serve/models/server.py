"""A server of several models."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from penstock.host.garbage_collection import gc_disabled
from penstock.serve.config import ServeConfig
from penstock.serve.http.lifecycle import Server
from penstock.serve.http.startup import Startup

if TYPE_CHECKING:
    from fastapi import FastAPI

    from penstock.serve.http.server import HttpServer
    from penstock.serve.models.registry import ModelRegistry, ServedModel
    from penstock.serve.services import Services


class ModelsServer(Server):
    """A server of several models. Loads the first model at the start, others when a request needs them.

    Args:
        config: the configuration of the server.
        models: the models; all engines except the first are asleep.
        budget: bytes of host memory for all loaded models.
        startup: measures the phases of the start.
    """

    def __init__(
        self, config: ServeConfig, models: Sequence[ServedModel], budget: int, startup: Startup
    ) -> None:
        from penstock.serve.models.registry import ModelRegistry

        first_model = models[0]
        super().__init__(config, first_model.config, first_model.engine, first_model.load_tokenizer, startup)
        self._registry: ModelRegistry = ModelRegistry(models, budget, self._prepare, config.shutdown_grace)

    async def _run(self, listener: socket.socket) -> int:
        try:
            return await super()._run(listener)
        finally:
            await self._registry.stop()

    def _make_server(self) -> tuple[Services, HttpServer]:
        """Create the services of all models and the HTTP server. Return the first services and the server."""
        with gc_disabled(), self._startup.phase("import the HTTP framework"):
            from penstock.serve.http.server import HttpServer
            from penstock.serve.models.outer_app import make_outer_app
            from penstock.serve.service_factory import build_services
        services: Services | None = None
        for model in self._registry:
            with self._startup.phase(f"read the tokenizer of {model.name}"):
                tokenizer = model.load_tokenizer()
            services = build_services(self._config, model.config, model.engine, tokenizer, services)
            model.services = services
        first_services = self._registry.default.services
        assert first_services is not None
        with self._startup.phase("make the routes"):
            outer_app = cast("FastAPI", make_outer_app(self._registry))
            return first_services, HttpServer(outer_app, self._config)

    async def _warm_up_and_open(self, services: Services, listener: socket.socket) -> None:
        # The worker of the default model is already running.
        async with self._registry.keep_loaded(self._registry.default):
            await super()._warm_up_and_open(services, listener)

    async def _prepare(self, model: ServedModel) -> None:
        from penstock.serve.warmup import warm_up_model

        assert model.services is not None
        tokenizer = model.services.tokenizer
        tokenizer.max_length = model.engine.info.max_length
        # At the start, `Server._warm_up_and_open` warms up the default model.
        if model is not self._registry.default or model.was_loaded:
            await warm_up_model(model.engine, tokenizer, model.task)

    async def _watch(self) -> None:
        from penstock.serve.observability.watchdog import Watchdog

        limit = self._config.watchdog_timeout
        await asyncio.gather(*(Watchdog(model.engine, limit).run() for model in self._registry))

    async def _drain(self, services: Services) -> int:
        status = await super()._drain(services)
        for model in self._registry:
            if model.services is not None and model.services is not services:
                if model.services.tokenizer.reads_images:
                    model.services.images.close()
                await asyncio.to_thread(model.services.tokenizer.close)
        return status
