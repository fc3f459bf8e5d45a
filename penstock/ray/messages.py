"""The messages that replicas send to the HTTP processes, and their encoding."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.pipelines.core import msgpack_numpy_decoder, msgpack_numpy_encoder
from penstock.ray.cache_log import CacheChanges
from penstock.worker.messages import ErrorRecord, RequestResult, WorkerInfo, WorkerStats


class ReplicaResults(msgspec.Struct, array_like=True):
    """The results of one request since the previous message, or its error."""

    num_cached_tokens: int = 0
    """Number of prompt tokens that the prefix cache contained."""
    results: list[RequestResult] = []
    error: ErrorRecord | None = None


class ReplicaReport(msgspec.Struct):
    """The state of a replica."""

    name: str
    """The id of the replica in Ray Serve."""
    info: WorkerInfo
    stats: WorkerStats
    num_restarts: int = 0
    """The number of times that a worker process of the replica ended unexpectedly or its restart failed."""
    cache: CacheChanges | None = None
    """The events of the prefix cache after the position that the caller of `EngineReplica.report` gave."""


def encoder() -> Callable[[object], bytes]:
    """Return the encoder of `ReplicaResults` and `ReplicaReport`. Each thread must use its own encoder."""
    return msgpack_numpy_encoder()


def results_decoder() -> Callable[[bytes], ReplicaResults]:
    """Return the decoder of `ReplicaResults`."""
    return msgpack_numpy_decoder(ReplicaResults)


def report_decoder() -> Callable[[bytes], ReplicaReport]:
    """Return the decoder of `ReplicaReport`."""
    return msgpack_numpy_decoder(ReplicaReport)
