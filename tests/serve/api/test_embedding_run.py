"""Embeddings requests with many inputs: queue limits, disconnects, failures, and time limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.app_client import make_services
from support.asgi import Exchange, wait_until
from support.embedding_server import embedder_config
from support.engines import WORKER_INFO, FakeEngine

from penstock.assembly import load_tokenizer
from penstock.errors import OverloadedError, PenstockError, RequestFailedError, UnavailableError
from penstock.pipelines.core import EmbeddingsContext, EmbeddingsResponse, PipelineTask
from penstock.serve.app import create_app
from penstock.worker.messages import EmbeddingsResult
from penstock.worker.results import Generation

TASK = PipelineTask.EMBEDDINGS_GENERATION


class EmbeddingsEngine(FakeEngine):
    """An engine that keeps up to `capacity` inputs until the test calls `answer` or `fail`."""

    def __init__(self, capacity: int = 1000) -> None:
        super().__init__(
            info=msgspec.structs.replace(
                WORKER_INFO, task=TASK, outputs=["dense"], embedding_size=2, max_batch_size=4, max_length=64
            )
        )
        self.capacity = capacity
        self.num_submitted = 0
        self.running: dict[str, tuple[EmbeddingsContext, Generation]] = {}

    def submit(self, context: Any) -> Generation:
        if self.state != "ready":
            raise UnavailableError(f"the engine is {self.state}")
        if len(self.running) >= self.capacity:
            raise OverloadedError("the queue is full: try again")
        self.num_submitted += 1
        generation = Generation(context.request_id, self._cancel)
        self.running[context.request_id] = (context, generation)
        self._count()
        return generation

    def _count(self) -> None:
        has_decreased = len(self.running) < self.num_outstanding
        self.num_outstanding = len(self.running)
        if has_decreased:
            self._report_end()

    def _cancel(self, request_id: str) -> None:
        self.cancelled_ids.append(request_id)
        del self.running[request_id]
        self._count()

    def answer(self, count: int = 1, *, youngest_first: bool = False) -> None:
        """Answer the ``count`` oldest inputs, or the ``count`` youngest inputs if ``youngest_first`` is true.

        A vector consists of the number of tokens and the id of the first token.
        """
        for request_id in (list(self.running)[::-1] if youngest_first else list(self.running))[:count]:
            context, generation = self.running.pop(request_id)
            self._count()
            generation.admit(0)
            vector = np.array([context.current_length, context.all_tokens[0]], np.float32)
            generation.add(EmbeddingsResult(request_id, EmbeddingsResponse(vector)))

    def fail(self, error: PenstockError) -> None:
        """Fail the youngest input."""
        _, generation = self.running.pop(list(self.running)[-1])
        generation.admit(0)
        generation.fail(error)


class Application:
    """An application with the fake engine."""

    def __init__(self, folder: Path, engine: EmbeddingsEngine, **config: Any) -> None:
        pipeline_config = embedder_config(folder)
        tokenizer = load_tokenizer(pipeline_config)
        services = replace(
            make_services(engine, **config), task=TASK, pipeline_config=pipeline_config, tokenizer=tokenizer
        )
        self.services = services
        self.engine = engine
        self.app = create_app(services)

    def post(self, **body: Any) -> Exchange:
        return Exchange(self.app, "/v1/embeddings", body)


def make_inputs(count: int) -> list[list[int]]:
    """Return the token ids of `count` inputs. Input i has 1 + i % 60 tokens, each with the id 5 + i."""
    return [[5 + i] * (1 + i % 60) for i in range(count)]


async def test_a_large_request_submits_two_batches_at_a_time(embedder: Path) -> None:
    application = Application(embedder, engine := EmbeddingsEngine())
    large_exchange = application.post(input=make_inputs(30))
    await wait_until(lambda: len(engine.running) == 8)
    small_exchange = application.post(input=make_inputs(1))
    await wait_until(lambda: len(engine.running) == 9)
    engine.answer(youngest_first=True)
    await small_exchange.wait_until_ended()
    assert small_exchange.status == 200
    assert len(engine.running) == 8
    while not large_exchange.task.done():
        engine.answer(3, youngest_first=True)  # results arrive out of order
        await asyncio.sleep(0.005)
        assert len(engine.running) <= 8
    vectors = [item["embedding"] for item in msgspec.json.decode(large_exchange.body)["data"]]
    assert vectors == [[1.0 + i % 60, 5.0 + i] for i in range(30)]
    assert engine.cancelled_ids == []


async def test_a_disconnect_cancels_all_running_inputs(embedder: Path) -> None:
    application = Application(embedder, engine := EmbeddingsEngine())
    exchange = application.post(input=make_inputs(30))
    await wait_until(lambda: len(engine.running) == 8)
    engine.answer(3)
    await wait_until(lambda: len(engine.running) == 8)
    exchange.disconnect()
    await exchange.wait_until_ended()
    assert (engine.running, engine.num_submitted, len(engine.cancelled_ids)) == ({}, 11, 8)
    assert application.services.gate.num_active == 0


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestFailedError("the request failed"), 500, "internal_error"),
        (UnavailableError("the worker died", retry_after=7), 503, "service_unavailable"),
    ],
)
async def test_a_failed_input_ends_only_its_request(
    embedder: Path, error: PenstockError, status: int, code: str
) -> None:
    application = Application(embedder, engine := EmbeddingsEngine())
    other_exchange = application.post(input=make_inputs(2))
    await wait_until(lambda: len(engine.running) == 2)
    failing_exchange = application.post(input=make_inputs(20))
    await wait_until(lambda: len(engine.running) == 10)
    engine.fail(error)  # the eighth input of `failing_exchange`
    await failing_exchange.wait_until_ended()
    error_fields = msgspec.json.decode(failing_exchange.body)["error"]
    assert (failing_exchange.status, error_fields["code"], error_fields["param"]) == (
        status,
        code,
        "input[7]",
    )
    assert error_fields["message"] == f"input[7]: {error}"
    headers = dict(failing_exchange.messages[0]["headers"])
    assert headers.get(b"retry-after") == (b"7" if status == 503 else None)
    assert (len(engine.running), len(engine.cancelled_ids)) == (2, 7)
    engine.answer(2)
    await other_exchange.wait_until_ended()
    assert other_exchange.status == 200


async def test_a_full_queue_refuses_new_requests_and_delays_started_ones(embedder: Path) -> None:
    application = Application(embedder, engine := EmbeddingsEngine(capacity=3))
    started_exchange = application.post(input=make_inputs(5))
    await wait_until(lambda: len(engine.running) == 3)
    refused_exchange = application.post(input=make_inputs(2))
    await refused_exchange.wait_until_ended()
    assert (refused_exchange.status, msgspec.json.decode(refused_exchange.body)["error"]["code"]) == (
        429,
        "rate_limit_exceeded",
    )
    while not started_exchange.task.done():
        engine.answer()
        await asyncio.sleep(0.02)
    assert (started_exchange.status, engine.num_submitted) == (200, 5)


async def test_large_requests_together_use_about_half_of_the_queue(embedder: Path) -> None:
    application = Application(embedder, engine := EmbeddingsEngine(capacity=20))
    engine.max_outstanding = 20
    large_exchanges = [application.post(input=make_inputs(12)) for _ in range(4)]
    await wait_until(lambda: engine.num_outstanding >= 10)
    await asyncio.sleep(0.1)
    num_large_inputs = engine.num_outstanding
    assert num_large_inputs <= 10 + len(large_exchanges)
    small_exchanges = [application.post(input=make_inputs(1)) for _ in range(3)]
    await wait_until(lambda: engine.num_outstanding == num_large_inputs + 3)
    engine.answer(3, youngest_first=True)
    for exchange in small_exchanges:
        await exchange.wait_until_ended()
        assert exchange.status == 200
    while not all(exchange.task.done() for exchange in large_exchanges):
        engine.answer()
        await asyncio.sleep(0.002)
        assert engine.num_outstanding <= 10 + len(large_exchanges)
    assert [exchange.status for exchange in large_exchanges] == [200] * 4


async def test_a_time_limit_and_an_unavailable_worker_give_status_503(embedder: Path) -> None:
    application = Application(embedder, engine := EmbeddingsEngine(), request_timeout=0.2)
    timed_out_exchange = application.post(input=make_inputs(9))
    await timed_out_exchange.wait_until_ended()
    assert (timed_out_exchange.status, msgspec.json.decode(timed_out_exchange.body)["error"]["code"]) == (
        503,
        "timeout",
    )
    assert (engine.running, len(engine.cancelled_ids)) == ({}, 8)
    engine.state = "restarting"
    unavailable_exchange = application.post(input=make_inputs(2))
    await unavailable_exchange.wait_until_ended()
    assert (
        unavailable_exchange.status,
        msgspec.json.decode(unavailable_exchange.body)["error"]["message"],
    ) == (
        503,
        "the engine is restarting",
    )
