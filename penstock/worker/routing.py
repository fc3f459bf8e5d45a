"""The choice of the worker for a request."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from penstock.kv_cache.hashing import chain_digests, context_root
from penstock.pipelines.core import RequestContext
from penstock.worker.messages import WorkerInfo
from penstock.worker.prefix_map import PrefixMap

MAX_DIGESTS = 512
"""Maximum number of blocks of a prompt to hash. Hashing runs in the event loop, and a longer common prefix
rarely changes the choice."""
REQUEST_COST = 256
"""Cost of one running request, as the number of prompt tokens that take as long to compute."""
MAX_SESSIONS = 100_000
"""Maximum number of sessions with an assigned worker; the least recently used are dropped."""


class RoutingPolicy(Protocol):
    """Chooses workers. It is called in the event loop."""

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: Sequence[int], workers: int
    ) -> int:
        """Return the number of the worker that gets a request.

        Args:
            context: the request.
            digests: the digests of its prompt's full blocks, as `digests_of`.
            loads: the number of running and waiting requests of each worker.
            workers: the workers to choose from, bit ``i`` for worker ``i``; at least one.
        """
        ...


class LeastLoaded:
    """Chooses the worker with the fewest requests, the first one in a tie."""

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: Sequence[int], workers: int
    ) -> int:
        return least_loaded(loads, workers)


class PrefixAware:
    """Weighs the longest cached prefix of a prompt against the load of the workers.

    The cost of a worker is the number of prompt tokens that it must compute, plus `REQUEST_COST` for each of
    its requests. Requests of a session stay with their worker while it has at most ``max_imbalance`` more
    requests than the least loaded one.

    Args:
        prefixes: the caches of the workers.
        block_size: tokens per block.
        max_imbalance: see above.
    """

    def __init__(self, prefixes: PrefixMap, block_size: int, max_imbalance: int) -> None:
        self._prefixes = prefixes
        self._block_size = block_size
        self._max_imbalance = max_imbalance
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: Sequence[int], workers: int
    ) -> int:
        least = least_loaded(loads, workers)
        session = context.session_id
        if not session:
            return self._cheapest(digests, loads, workers, least)
        worker = self._sessions.get(session)
        if worker is None or not workers >> worker & 1 or loads[worker] - loads[least] > self._max_imbalance:
            worker = self._cheapest(digests, loads, workers, least)
        self._sessions[session] = worker
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return worker

    def _cheapest(self, digests: Sequence[bytes], loads: Sequence[int], workers: int, least: int) -> int:
        depths = self._prefixes.depths(digests, workers) if digests else {}
        best, size = least, self._block_size
        lowest = REQUEST_COST * loads[least]
        for worker, depth in depths.items():
            cost = REQUEST_COST * loads[worker] - size * depth
            if cost < lowest or (cost == lowest and loads[worker] < loads[best]):
                best, lowest = worker, cost
        return best


def least_loaded(loads: Sequence[int], workers: int) -> int:
    """Return the worker of a set with the fewest requests, the first one in a tie."""
    if workers + 1 == 1 << len(loads):
        return loads.index(min(loads))
    return min((worker for worker in range(len(loads)) if workers >> worker & 1), key=loads.__getitem__)


def digests_of(context: RequestContext, info: WorkerInfo) -> list[bytes]:
    """Return the digests of the full blocks that a worker looks up for a prompt, as its KV cache hashes them.

    Empty if the request does not use the prefix cache. Also empty for requests with an adapter, because only
    the workers have the digest of its content. At most `MAX_DIGESTS` blocks are hashed.
    """
    if info.prefix_limits is None or context.log_probabilities_echo or context.adapter is not None:
        return []
    length = context.current_length
    root = context_root(context, bisect_left(info.prefix_limits, length), None)
    if root is None:
        return []
    count = min((length - 1) // info.block_size, MAX_DIGESTS)
    return chain_digests(
        root, context.all_tokens, context.token_hash_overrides, range(count), info.block_size
    )
