"""Create the services of a server from its configuration."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.serve.http.gate import Gate
from penstock.serve.observability.metrics import Metrics
from penstock.serve.observability.router_gauges import parse_gauges
from penstock.serve.observability.tracing import Tracing
from penstock.serve.parsers import ParserFactory
from penstock.serve.services import Services

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.serve.config import ServeConfig
    from penstock.text.tokenizer import TextTokenizer
    from penstock.worker.engine_client import EngineClient

_NUM_POOL_THREADS = 2


def build_services(
    config: ServeConfig,
    pipeline_config: PipelineConfig,
    worker: EngineClient,
    tokenizer: TextTokenizer,
    sibling: Services | None = None,
) -> Services:
    """Return the services of a model in a server. The worker may still be starting.

    Without a sibling, the services have a new gate, which is closed.

    Args:
        config: the configuration of the server.
        pipeline_config: the configuration of the model.
        worker: the engine client of the model.
        tokenizer: the tokenizer of the model.
        sibling: the services of another model of the same server. The new services share with the sibling
            the objects that do not depend on the model, such as gate, metrics, thread pools and route states.

    Raises:
        ConfigError: a parser setting names an unknown format.
        MissingDependencyError: ``--otlp-endpoint`` is set, but the extra ``otel`` is not installed.
    """
    if sibling is not None:
        sibling.metrics.add_engine(worker, parse_gauges(config.router_gauge), pipeline_config.model.name)
        return replace(
            sibling,
            pipeline_config=pipeline_config,
            task=pipeline_config.model.pipeline_task,
            tokenizer=tokenizer,
            worker=worker,
            parsers=_parsers(config, tokenizer),
        )
    metrics = Metrics()
    metrics.add_engine(worker, parse_gauges(config.router_gauge), pipeline_config.model.name)
    return Services(
        config=config,
        pipeline_config=pipeline_config,
        task=pipeline_config.model.pipeline_task,
        tokenizer=tokenizer,
        worker=worker,
        metrics=metrics,
        pool=ThreadPoolExecutor(_NUM_POOL_THREADS, thread_name_prefix="penstock-pool"),
        parsers=_parsers(config, tokenizer),
        gate=Gate(is_open=False),
        tracing=Tracing.to_endpoint(config.otlp_endpoint) if config.otlp_endpoint else None,
    )


def _parsers(config: ServeConfig, tokenizer: TextTokenizer) -> ParserFactory:
    return ParserFactory.choose(
        tokenizer.chat_template_source,
        config.tool_call_parser,
        config.reasoning_parser,
        tokenizer.special_token_texts,
    )


async def close_services(services: Services) -> None:
    """Close image reader, tokenizer, route states, thread pools, JSON decoders and traces.

    The worker must have stopped.
    """
    if services.tokenizer.reads_images:
        services.images.close()
    await asyncio.to_thread(services.tokenizer.close)
    await asyncio.to_thread(services.states.close)
    for pool in (services.pool, services.large_body_pool):
        pool.shutdown(wait=False, cancel_futures=True)
    for decoder in (services.decoder, services.large_body_decoder):
        await decoder.close()
    if services.tracing is not None:
        await asyncio.to_thread(services.tracing.close)
