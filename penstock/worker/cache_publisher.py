"""Publishes the events of prefix caches over ZeroMQ, for routers outside the server.

A message has three frames: the topic, a sequence number of 8 bytes (big-endian), and a msgpack body::

    [time, [event, ...], worker]

    event = ["BlockStored", hashes, parent_hash | nil, token_ids, block_size, nil, nil, adapter | nil]
          | ["BlockRemoved", hashes]
          | ["AllBlocksCleared"]

``time`` is in seconds since 1970, and ``worker`` is the number of the worker. A hash is the first 8 bytes of
a block's digest, as a big-endian number. Subscribers for vLLM's events can read this format; the two ``nil``
are vLLM's ``lora_id`` and ``medium``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import zmq

from penstock.errors import ConfigError
from penstock.pipelines.core.cache_events import BlocksRemoved, BlocksStored, CacheEvent

_MAX_QUEUED = 100_000
"""Maximum number of messages queued for a slow subscriber. Further messages are dropped, which leaves a gap
in the sequence numbers."""


class CachePublisher:
    """A ZeroMQ PUB socket for the events of all workers of a server.

    Args:
        endpoint: the address to bind, such as ``tcp://127.0.0.1:5557``.
        topic: the first frame of each message.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, endpoint: str, topic: str) -> None:
        self._topic = topic.encode()
        self._sequence_number = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.sndhwm = _MAX_QUEUED
        self._socket.linger = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("cache_events", f"cannot publish at {endpoint!r}: {error}") from error

    @property
    def endpoint(self) -> str:
        """The bound address."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, worker: int, events: Sequence[CacheEvent]) -> None:
        """Send the events of a worker. Never blocks. The method can be used as a `CacheListener`."""
        body = self._encode([time.time(), [_as_array(event) for event in events], worker])
        sequence_number = self._sequence_number.to_bytes(8, "big")
        self._sequence_number += 1
        self._socket.send_multipart([self._topic, sequence_number, body])

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


def _as_array(event: CacheEvent) -> list[object]:
    match event:
        case BlocksStored():
            block_size = len(event.token_ids) // len(event.digests)
            parent = None if event.parent is None else _hash(event.parent)
            lora_id, medium = None, None
            hashes = [*map(_hash, event.digests)]
            fields = [hashes, parent, event.token_ids, block_size, lora_id, medium, event.adapter]
            return ["BlockStored", *fields]
        case BlocksRemoved():
            return ["BlockRemoved", [*map(_hash, event.digests)]]
        case _:
            return ["AllBlocksCleared"]


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
