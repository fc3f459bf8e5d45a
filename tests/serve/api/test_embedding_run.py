"""Requests with many inputs: their share of the queue, disconnects, failures, time limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.asgi import Exchange, eventually
from support.embedding_server import embedder_config
from support.engines import INFO, FakeEngine
from support.serving import make_services

from penstock.assembly import load_tokenizer
from penstock.errors import OverloadedError, PenstockError, RequestFailedError, UnavailableError
from penstock.pipelines.core import EmbeddingsContext, EmbeddingsResponse, PipelineTask
from penstock.serve.app import create_app
from penstock.worker.messages import EmbeddingsResult
from penstock.worker.results import Generation

TASK = PipelineTask.EMBEDDINGS_GENERATION


class EmbeddingsEngine(FakeEngine):
    """Keeps each input until the test answers it; accepts `room` inputs at a time."""

    def __init__(self, room: int = 1000) -> None:
        super().__init__(
            info=msgspec.structs.replace(
                INFO, task=TASK, outputs=["dense"], embedding_size=2, max_batch_size=4, max_length=64
            )
        )
        self.room = room
        self.num_submitted = 0
        self.running: dict[str, tuple[EmbeddingsContext, Generation]] = {}

    def submit(self, context: Any) -> Generation:
        if self.state != "ready":
            raise UnavailableError(f"the engine is {self.state}")
        if len(self.running) >= self.room:
            raise OverloadedError("the queue is full: try again")
        self.num_submitted += 1
        generation = Generation(context.request_id, self._cancel)
        self.running[context.request_id] = (context, generation)
        self._count()
        return generation

    def _count(self) -> None:
        has_fewer = len(self.running) < self.num_outstanding
        self.num_outstanding = len(self.running)
        if has_fewer:
            self._report_end()

    def _cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        del self.running[request_id]
        self._count()

    def answer(self, count: int = 1, *, last: bool = False) -> None:
        """Answer the oldest inputs, or the youngest, by their number of tokens and first token."""
        for request_id in (list(self.running)[::-1] if last else list(self.running))[:count]:
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


class Served:
    """An application around the fake engine."""

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


def inputs(count: int) -> list[list[int]]:
    """Inputs of 1, 2, 3, ... tokens."""
    return [[5 + i] * (1 + i % 60) for i in range(count)]


async def test_a_large_request_submits_two_batches_at_a_time(embedder: Path) -> None:
    served = Served(embedder, engine := EmbeddingsEngine())
    large = served.post(input=inputs(30))
    await eventually(lambda: len(engine.running) == 8)
    small = served.post(input=inputs(1))
    await eventually(lambda: len(engine.running) == 9)
    engine.answer(last=True)
    await small.ended()
    assert small.status == 200
    assert len(engine.running) == 8
    while not large.task.done():
        engine.answer(3, last=True)  # out of order
        await asyncio.sleep(0.005)
        assert len(engine.running) <= 8
    vectors = [one["embedding"] for one in msgspec.json.decode(large.body)["data"]]
    assert vectors == [[1.0 + i % 60, 5.0 + i] for i in range(30)]
    assert engine.cancelled == []


async def test_a_disconnect_cancels_all_inputs(embedder: Path) -> None:
    served = Served(embedder, engine := EmbeddingsEngine())
    exchange = served.post(input=inputs(30))
    await eventually(lambda: len(engine.running) == 8)
    engine.answer(3)
    await eventually(lambda: len(engine.running) == 8)
    exchange.leave()
    await exchange.ended()
    assert (engine.running, engine.num_submitted, len(engine.cancelled)) == ({}, 11, 8)
    assert served.services.gate.num_active == 0


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestFailedError("the request failed"), 500, "internal_error"),
        (UnavailableError("the worker died", retry_after=7), 503, "service_unavailable"),
    ],
)
async def test_a_failed_input_ends_its_request_only(
    embedder: Path, error: PenstockError, status: int, code: str
) -> None:
    served = Served(embedder, engine := EmbeddingsEngine())
    other = served.post(input=inputs(2))
    await eventually(lambda: len(engine.running) == 2)
    failing = served.post(input=inputs(20))
    await eventually(lambda: len(engine.running) == 10)
    engine.fail(error)  # the eighth input of the second request
    await failing.ended()
    answer = msgspec.json.decode(failing.body)["error"]
    assert (failing.status, answer["code"], answer["param"]) == (status, code, "input[7]")
    assert answer["message"] == f"input[7]: {error}"
    headers = dict(failing.messages[0]["headers"])
    assert headers.get(b"retry-after") == (b"7" if status == 503 else None)
    assert (len(engine.running), len(engine.cancelled)) == (2, 7)
    engine.answer(2)
    await other.ended()
    assert other.status == 200


async def test_a_full_queue_refuses_new_requests_and_delays_begun_ones(embedder: Path) -> None:
    served = Served(embedder, engine := EmbeddingsEngine(room=3))
    begun = served.post(input=inputs(5))
    await eventually(lambda: len(engine.running) == 3)
    refused = served.post(input=inputs(2))
    await refused.ended()
    assert (refused.status, msgspec.json.decode(refused.body)["error"]["code"]) == (
        429,
        "rate_limit_exceeded",
    )
    while not begun.task.done():
        engine.answer()
        await asyncio.sleep(0.02)
    assert (begun.status, engine.num_submitted) == (200, 5)


async def test_half_of_the_queue_is_left_to_other_requests(embedder: Path) -> None:
    served = Served(embedder, engine := EmbeddingsEngine(room=20))
    engine.max_outstanding = 20
    large = [served.post(input=inputs(12)) for _ in range(4)]
    await eventually(lambda: engine.num_outstanding >= 10)
    await asyncio.sleep(0.1)
    count = engine.num_outstanding
    assert count <= 10 + len(large)
    small = [served.post(input=inputs(1)) for _ in range(3)]
    await eventually(lambda: engine.num_outstanding == count + 3)
    engine.answer(3, last=True)
    for one in small:
        await one.ended()
        assert one.status == 200
    while not all(one.task.done() for one in large):
        engine.answer()
        await asyncio.sleep(0.002)
        assert engine.num_outstanding <= 10 + len(large)
    assert [one.status for one in large] == [200] * 4


async def test_time_limit_and_worker_that_is_not_ready(embedder: Path) -> None:
    served = Served(embedder, engine := EmbeddingsEngine(), request_timeout=0.2)
    late = served.post(input=inputs(9))
    await late.ended()
    assert (late.status, msgspec.json.decode(late.body)["error"]["code"]) == (503, "timeout")
    assert (engine.running, len(engine.cancelled)) == ({}, 8)
    engine.state = "restarting"
    down = served.post(input=inputs(2))
    await down.ended()
    assert (down.status, msgspec.json.decode(down.body)["error"]["message"]) == (
        503,
        "the engine is restarting",
    )
