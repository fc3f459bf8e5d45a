"""Prefix cache events over ZeroMQ, from a worker to a subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from support.kv_contexts import kv_manager
from support.workers import fake_runtime, letters_in_order, make_request, read_deltas, running_client

from penstock.errors import ConfigError
from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored
from penstock.testing import FakePipeline
from penstock.worker.cache_publisher import CachePublisher
from penstock.worker.process import WorkerRuntime
from penstock.worker.router import WorkerRouter


class Subscriber:
    def __init__(self, endpoint: str, topic: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.rcvtimeo = 5000
        self.socket.connect(endpoint)
        self.socket.subscribe(topic)

    def read(self) -> tuple[bytes, int, Any]:
        topic, sequence_number, body = self.socket.recv_multipart()
        return topic, int.from_bytes(sequence_number, "big"), msgspec.msgpack.decode(body)


@contextmanager
def open_subscriber(publisher: CachePublisher, topic: str) -> Iterator[Subscriber]:
    """Yield a subscriber whose subscription is active, so that it receives all later messages.

    The publisher is closed at the end.
    """
    subscriber = Subscriber(publisher.endpoint, topic)
    while not subscriber.socket.poll(20):
        publisher.publish(9, [BlocksCleared()])
    while subscriber.socket.poll(50):
        subscriber.socket.recv_multipart()
    try:
        yield subscriber
    finally:
        subscriber.context.destroy(linger=0)
        publisher.close()


def test_messages_have_a_topic_a_sequence_number_and_a_body() -> None:
    publisher = CachePublisher("tcp://127.0.0.1:*", "topic")
    first_digest, second_digest = bytes(range(32)), bytes(range(1, 33))
    events = [
        BlocksStored([first_digest, second_digest], None, [1, 2, 3, 4], "tone"),
        BlocksStored([second_digest], first_digest, [5, 6]),
        BlocksRemoved([first_digest]),
        BlocksCleared(),
    ]
    with open_subscriber(publisher, "topic") as subscriber:
        publisher.publish(3, events)
        publisher.publish(0, [BlocksCleared()])
        topic, sequence_number, (time, received_events, worker) = subscriber.read()
        assert (topic, worker) == (b"topic", 3)
        assert time > 1e9
        first_id, second_id = 0x0001020304050607, 0x0102030405060708
        assert received_events == [
            ["BlockStored", [first_id, second_id], None, [1, 2, 3, 4], 2, None, None, "tone"],
            ["BlockStored", [second_id], first_id, [5, 6], 2, None, None, None],
            ["BlockRemoved", [first_id]],
            ["AllBlocksCleared"],
        ]
        assert subscriber.read()[1] == sequence_number + 1


def test_an_endpoint_that_cannot_be_bound_raises_a_configuration_error() -> None:
    publisher = CachePublisher("tcp://127.0.0.1:*", "topic")
    for endpoint in (publisher.endpoint, "not an endpoint"):
        with pytest.raises(ConfigError, match="cache_events"):
            CachePublisher(endpoint, "topic")
    publisher.close()


async def test_stored_and_cleared_blocks_of_a_worker_are_published() -> None:
    def make_runtime() -> WorkerRuntime:
        return fake_runtime(FakePipeline(letters_in_order(3), kv=kv_manager(16)))

    publisher = CachePublisher("tcp://127.0.0.1:*", "kv")
    with open_subscriber(publisher, "kv") as subscriber:
        async with (
            running_client(make_runtime, listener=publisher.publish) as first_client,
            running_client(make_runtime) as second_client,
        ):
            router = WorkerRouter([first_client, second_client])
            await read_deltas(router.submit(make_request("a", "0123456789")))
            _, _, (_, (event,), worker) = await asyncio.to_thread(subscriber.read)
            assert (worker, event[0], event[3], event[4]) == (0, "BlockStored", [*b"01234567"], 4)
            await first_client.reset_prefix_cache()
            while (event := (await asyncio.to_thread(subscriber.read))[2][1][-1])[0] == "BlockStored":
                pass
            assert event == ["AllBlocksCleared"]
            deltas = await read_deltas(first_client.submit(make_request("b", "0123456789")))
            assert {delta.num_cached_tokens for delta in deltas} == {0}
