"""`PrefixMap`: the blocks that the prefix cache of each worker has or is expected to have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from penstock.pipelines.core.cache_events import BlocksRemoved, BlocksStored, CacheEvent

_COUNT_BITS = 24
"""Number of low bits of a value of `PrefixMap._expected_workers` that contain the number of requests."""
_COUNT_MASK = (1 << _COUNT_BITS) - 1


class PrefixMap:
    """Maps the digest of a block to the set of workers that have the block: bit ``i`` for worker ``i``.

    The cache events of the workers update the map. A block that a running request is expected to store counts
    as cached, so that simultaneous requests with the same prompt are sent to one worker, which computes the
    prompt once.
    """

    def __init__(self) -> None:
        self._cached_workers: dict[bytes, int] = {}
        """Digest -> set of workers that have the block."""
        self._expected_workers: dict[bytes, int] = {}
        """Digest -> number of requests that will store the block (low bits), set of their workers (high)."""

    @property
    def num_blocks(self) -> int:
        """The number of different blocks that any worker has."""
        return len(self._cached_workers)

    def update(self, worker: int, events: Iterable[CacheEvent]) -> None:
        """Apply the events of a worker."""
        bit, cached_workers = 1 << worker, self._cached_workers
        for event in events:
            match event:
                case BlocksStored():
                    for digest in event.digests:
                        cached_workers[digest] = cached_workers.get(digest, 0) | bit
                case BlocksRemoved():
                    for digest in event.digests:
                        self._remove(digest, bit)
                case _:
                    for digest in [digest for digest, workers in cached_workers.items() if workers & bit]:
                        self._remove(digest, bit)

    def depth(self, worker: int, digests: Sequence[bytes]) -> int:
        """Return the number of leading blocks that a worker has, including expected blocks."""
        bit, cached_workers, expected_workers = (
            1 << worker,
            self._cached_workers.get,
            self._expected_workers.get,
        )
        return bisect_left(
            digests,
            True,
            key=lambda digest: (
                not (cached_workers(digest, 0) | expected_workers(digest, 0) >> _COUNT_BITS) & bit
            ),
        )

    def expect(self, worker: int, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Record that a request on a worker will store the blocks of its prompt.

        Returns:
            The recorded blocks, for `clear_expected`. Blocks that the worker already has are not recorded.
        """
        bit, cached_workers, expected_workers = 1 << worker, self._cached_workers.get, self._expected_workers
        start = bisect_left(digests, True, key=lambda digest: not cached_workers(digest, 0) & bit)
        recorded_digests = digests[start:]
        expected_bit = bit << _COUNT_BITS
        for digest in recorded_digests:
            expected_workers[digest] = (expected_workers.get(digest, 0) | expected_bit) + 1
        return recorded_digests

    def clear_expected(self, recorded_digests: Sequence[bytes]) -> None:
        """Undo `expect` for a request that has ended.

        If several requests expect a block on different workers, it stays expected on all of these workers
        until the last request has ended.
        """
        expected_workers = self._expected_workers
        for digest in recorded_digests:
            workers_and_count = expected_workers[digest]
            if workers_and_count & _COUNT_MASK == 1:
                del expected_workers[digest]
            else:
                expected_workers[digest] = workers_and_count - 1

    def depths(self, digests: Sequence[bytes], workers: int) -> dict[int, int]:
        """Return worker -> number of leading blocks, for workers that have or expect the first block.

        A worker that has a block has all blocks before it, because caches evict the end of a prompt first.
        A binary search therefore finds the numbers, with a few lookups for each distinct number.

        Args:
            digests: the digests of a prompt's blocks, in order.
            workers: the set of workers to look for.
        """
        cached_workers, expected_workers = self._cached_workers.get, self._expected_workers.get

        def workers_at(depth: int) -> int:
            """Return the set of workers that have at least ``depth`` leading blocks."""
            digest = digests[depth - 1]
            return (cached_workers(digest, 0) | expected_workers(digest, 0) >> _COUNT_BITS) & workers

        depths_by_worker: dict[int, int] = {}
        count = len(digests)
        workers_with_first = workers_at(1) if count else 0
        if not workers_with_first:
            return depths_by_worker
        workers_with_all = workers_at(count)
        depths_by_worker.update(dict.fromkeys(_worker_numbers(workers_with_all), count))
        ranges = [(1, workers_with_first, count, workers_with_all)]
        while ranges:
            low, workers_at_low, high, workers_at_high = ranges.pop()
            dropped_workers = workers_at_low & ~workers_at_high
            if not dropped_workers:
                continue
            if high - low == 1:
                depths_by_worker.update(dict.fromkeys(_worker_numbers(dropped_workers), low))
                continue
            middle = (low + high) // 2
            workers_at_middle = workers_at(middle) & workers_at_low | workers_at_high
            ranges += [
                (low, workers_at_low, middle, workers_at_middle),
                (middle, workers_at_middle, high, workers_at_high),
            ]
        return depths_by_worker

    def _remove(self, digest: bytes, bit: int) -> None:
        workers = self._cached_workers.get(digest, 0) & ~bit
        if workers:
            self._cached_workers[digest] = workers
        else:
            self._cached_workers.pop(digest, None)


def _worker_numbers(workers: int) -> list[int]:
    """Return the numbers of the workers in a bit set."""
    numbers = []
    while workers:
        lowest_bit = workers & -workers
        numbers.append(lowest_bit.bit_length() - 1)
        workers ^= lowest_bit
    return numbers
