"""A client of the server application, without a socket, with real services and by default a fake worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import APIRouter
from support.engines import FakeEngine

from penstock.config import PipelineConfig
from penstock.serve.app import create_app
from penstock.serve.config import ServeConfig
from penstock.serve.http.gate import Gate
from penstock.serve.observability.metrics import Metrics
from penstock.serve.observability.tracing import Tracing
from penstock.serve.parsers import ParserFactory
from penstock.serve.services import Services
from penstock.testing import FakeTokenizer
from penstock.worker.engine_client import EngineClient


def make_services(
    worker: EngineClient | None = None,
    *,
    gate: Gate | None = None,
    tracing: Tracing | None = None,
    **config: Any,
) -> Services:
    """Return services with a `FakeTokenizer`. `config` are fields of `ServeConfig`."""
    tokenizer = FakeTokenizer()
    return Services(
        config=ServeConfig(**config),
        pipeline_config=PipelineConfig.from_flat({"enable_lora": True}),
        tokenizer=tokenizer,
        worker=FakeEngine() if worker is None else worker,
        metrics=Metrics(reports_process=False),
        pool=ThreadPoolExecutor(2),
        parsers=ParserFactory.choose(tokenizer.chat_template_source, "auto", "auto"),
        gate=Gate() if gate is None else gate,
        tracing=tracing,
    )


@asynccontextmanager
async def app_client(services: Services, *routers: APIRouter) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the application with these services and additional routers.

    The services are closed at the end.
    """
    transport = httpx.ASGITransport(create_app(services, *routers))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    services.states.close()
    services.pool.shutdown()
    for decoder in (services.decoder, services.large_body_decoder):
        await decoder.close()
