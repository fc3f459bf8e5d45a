"""An application to send requests to, without a socket: real services around a worker that is a stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
from fastapi import APIRouter

from penstock.config import PipelineConfig
from penstock.serve.app import create_app
from penstock.serve.config import ServeConfig
from penstock.serve.http.gate import Gate
from penstock.serve.observability.metrics import Metrics
from penstock.serve.observability.tracing import Tracing
from penstock.serve.parsers import ParserFactory
from penstock.serve.services import Services
from penstock.testing import FakeTokenizer
from penstock.worker.client import WorkerClient
from penstock.worker.messages import WorkerInfo, WorkerStats


@dataclass
class StubWorker:
    """A worker that says of itself what a test wants it to say."""

    state: str = "ready"
    is_alive: bool = True
    num_outstanding: int = 0
    num_restarts: int = 0
    adapters: dict[str, str] = field(default_factory=dict)
    stats: WorkerStats = field(default_factory=WorkerStats)
    info: WorkerInfo = field(
        default_factory=lambda: WorkerInfo(
            max_length=2048,
            max_batch_size=8,
            max_batch_input_tokens=8192,
            num_blocks=100,
            block_size=32,
            vocab_size=257,
        )
    )


def make_services(
    worker: Any = None, *, gate: Gate | None = None, tracing: Tracing | None = None, **config: Any
) -> Services:
    """Services of a `FakeTokenizer`; ``config`` are fields of `ServeConfig`."""
    tokenizer = FakeTokenizer()
    return Services(
        config=ServeConfig(**config),
        pipeline_config=PipelineConfig.from_flat({"enable_lora": True}),
        tokenizer=tokenizer,
        worker=cast(WorkerClient, StubWorker() if worker is None else worker),
        metrics=Metrics(with_process=False),
        pool=ThreadPoolExecutor(2),
        parsers=ParserFactory.choose(tokenizer.chat_template_source, "auto", "auto"),
        gate=Gate() if gate is None else gate,
        tracing=tracing,
    )


@asynccontextmanager
async def client_of(services: Services, *routers: APIRouter) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application with these services, and with more routes."""
    transport = httpx.ASGITransport(create_app(services, *routers))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    services.pool.shutdown()
    for decoder in (services.decoder, services.long_decoder):
        await decoder.close()
