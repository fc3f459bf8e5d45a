"""Routing policies, which choose the worker of a request."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.kv_cache.hashing import chain_digests, context_root
from penstock.pipelines.core import RequestContext
from penstock.worker.messages import WorkerInfo
from penstock.worker.prefix_map import PrefixMap

MAX_DIGESTS = 512
"""Maximum number of blocks of a prompt to hash. Hashing runs in the event loop, and a longer common prefix
rarely changes the choice."""
REQUEST_COST = 96
"""Cost of a request in addition to the cost of its prompt, in prompt tokens."""
MAX_SESSIONS = 100_000
"""Maximum number of sessions with an assigned worker. The least recently used sessions are dropped."""


@dataclass(slots=True)
class RequestLoad:
    """The load of a request on its worker."""

    worker: int
    num_tokens: int
    """Prompt tokens that the worker computes; 0 after the first result."""


class WorkerLoads:
    """The number and the cost of the requests of each worker.

    A request costs `REQUEST_COST`. Until the first result of the request, half of the prompt tokens that the
    worker computes for it are added to the cost. On average, the other half has been computed when the next
    request arrives.

    Args:
        num_workers: the number of workers.
        weight: factor by which the number and the cost of each request are multiplied.
    """

    def __init__(self, num_workers: int = 0, weight: int = 1) -> None:
        self.num_requests = [0] * num_workers
        """The number of running and waiting requests of each worker, times ``weight``."""
        self.costs = [0] * num_workers
        """The cost of each worker's requests in prompt tokens, times ``weight``."""
        self._weight = weight

    def add_worker(self) -> None:
        """Append a worker without requests."""
        self.num_requests.append(0)
        self.costs.append(0)

    def clear(self, worker: int) -> None:
        """Remove all requests of a worker. `start` and `end` must not be called for them afterwards."""
        self.num_requests[worker] = self.costs[worker] = 0

    def add(self, worker: int, num_tokens: int) -> RequestLoad:
        """Add a request whose worker computes ``num_tokens`` tokens of its prompt."""
        self.num_requests[worker] += self._weight
        self.costs[worker] += self._weight * (REQUEST_COST + num_tokens // 2)
        return RequestLoad(worker, num_tokens)

    def start(self, load: RequestLoad) -> None:
        """Record that the first result of a request has arrived, so its prompt is computed."""
        self.costs[load.worker] -= self._weight * (load.num_tokens // 2)
        load.num_tokens = 0

    def end(self, load: RequestLoad) -> None:
        """Remove a request."""
        self.start(load)
        self.num_requests[load.worker] -= self._weight
        self.costs[load.worker] -= self._weight * REQUEST_COST


class RoutingPolicy(Protocol):
    """Chooses the worker of each request. `choose` runs in the event loop, so it must not take long."""

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: WorkerLoads, workers: int
    ) -> int:
        """Return the number of the worker that gets a request.

        Args:
            context: the request.
            digests: the result of `prompt_digests` for the request.
            loads: the running and waiting requests of each worker.
            workers: the workers to choose from, bit ``i`` for worker ``i``; at least one.
        """
        ...


class LeastLoaded:
    """Chooses the worker with the fewest requests; of several, the one with the smallest worker number."""

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: WorkerLoads, workers: int
    ) -> int:
        return worker_with_lowest(loads.num_requests, workers)


class PrefixAware:
    """Chooses the worker with the lowest cost, which combines cached prefixes and load.

    The cost of a worker is the number of prompt tokens that it must compute, plus the cost of its requests
    (`WorkerLoads`). Requests of a session go to one worker while this worker is available and has at most
    ``max_imbalance`` more requests than the least loaded worker.

    Args:
        prefixes: the cached prefixes of each worker.
        block_size: tokens per block.
        max_imbalance: how many more requests than the least loaded worker a session's worker may have.
    """

    def __init__(self, prefixes: PrefixMap, block_size: int, max_imbalance: int) -> None:
        self._prefixes = prefixes
        self._block_size = block_size
        self._max_imbalance = max_imbalance
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: WorkerLoads, workers: int
    ) -> int:
        session = context.session_id
        if not session:
            return self._worker_with_lowest_cost(digests, loads.costs, workers)
        worker = self._sessions.get(session)
        if worker is None or not workers >> worker & 1 or self._is_overloaded(worker, loads, workers):
            worker = self._worker_with_lowest_cost(digests, loads.costs, workers)
        self._sessions[session] = worker
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return worker

    def _is_overloaded(self, worker: int, loads: WorkerLoads, workers: int) -> bool:
        """Return whether a worker has too many requests to receive a further request of its sessions."""
        num_requests = loads.num_requests
        least_loaded = worker_with_lowest(num_requests, workers)
        return num_requests[worker] - num_requests[least_loaded] > self._max_imbalance

    def _worker_with_lowest_cost(self, digests: Sequence[bytes], costs: Sequence[int], workers: int) -> int:
        depths = self._prefixes.depths(digests, workers) if digests else {}
        best_worker, block_size = worker_with_lowest(costs, workers), self._block_size
        min_cost = costs[best_worker]
        for worker, depth in depths.items():
            cost = costs[worker] - block_size * depth
            if cost < min_cost or (cost == min_cost and costs[worker] < costs[best_worker]):
                best_worker, min_cost = worker, cost
        return best_worker


def worker_with_lowest(values: Sequence[int], workers: int) -> int:
    """Return the worker with the lowest value in the set ``workers``; among several, the first."""
    if workers + 1 == 1 << len(values):
        return values.index(min(values))
    return min((worker for worker in range(len(values)) if workers >> worker & 1), key=values.__getitem__)


def num_uncached_tokens(context: RequestContext, info: WorkerInfo, num_cached_blocks: int) -> int:
    """Return the number of prompt tokens to compute if ``num_cached_blocks`` leading blocks are cached.

    Tokens after the first `MAX_DIGESTS` blocks are not counted, because it is unknown whether they are
    cached.
    """
    return min(context.current_length, MAX_DIGESTS * info.block_size) - num_cached_blocks * info.block_size


def prompt_digests(context: RequestContext, info: WorkerInfo) -> list[bytes]:
    """Return the digests of the full blocks that a worker looks up for a prompt in its prefix cache.

    The result is empty if the request does not use the prefix cache. The result is also empty for requests
    with an adapter, because only the workers have the digest of the adapter's content. At most `MAX_DIGESTS`
    blocks are hashed.
    """
    if info.prefix_limits is None or context.log_probabilities_echo or context.adapter is not None:
        return []
    length = context.current_length
    first_parent = context_root(context, bisect_left(info.prefix_limits, length), None)
    if first_parent is None:
        return []
    count = min((length - 1) // info.block_size, MAX_DIGESTS)
    return chain_digests(
        first_parent, context.all_tokens, context.token_hash_overrides, range(count), info.block_size
    )
