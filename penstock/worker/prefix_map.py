"""`PrefixMap`: the blocks in the prefix cache of each worker."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from penstock.pipelines.core.cache_events import BlocksRemoved, BlocksStored, CacheEvent

_COUNT_BITS = 24
_COUNT_MASK = (1 << _COUNT_BITS) - 1


class PrefixMap:
    """Maps the digest of a block to the set of workers that have it, bit ``i`` for worker ``i``.

    The cache events of the workers keep it exact. A block that a running request will store counts as
    cached. Requests with the same prompt that arrive together then go to one worker, which computes it once.
    """

    def __init__(self) -> None:
        self._cached: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}
        """Digest -> set of workers; the low bits are the number of requests."""

    @property
    def num_blocks(self) -> int:
        """The number of different blocks that any worker has."""
        return len(self._cached)

    def update(self, worker: int, events: Iterable[CacheEvent]) -> None:
        """Apply the events of a worker."""
        bit, cached = 1 << worker, self._cached
        for event in events:
            match event:
                case BlocksStored():
                    for digest in event.digests:
                        cached[digest] = cached.get(digest, 0) | bit
                case BlocksRemoved():
                    for digest in event.digests:
                        self._remove(digest, bit)
                case _:
                    for digest in [digest for digest, workers in cached.items() if workers & bit]:
                        self._remove(digest, bit)

    def depth(self, worker: int, digests: Sequence[bytes]) -> int:
        """Return the number of leading blocks that a worker has, as `depths` counts them."""
        bit, cached, expected = 1 << worker, self._cached.get, self._expected.get
        return bisect_left(
            digests,
            True,
            key=lambda digest: not (cached(digest, 0) | expected(digest, 0) >> _COUNT_BITS) & bit,
        )

    def expect(self, worker: int, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Record that a request on a worker will store the blocks of its prompt.

        Returns:
            The recorded blocks, for `clear_expected`. Blocks that the worker already has are not recorded.
        """
        bit, cached, expected = 1 << worker, self._cached.get, self._expected
        start = bisect_left(digests, True, key=lambda digest: not cached(digest, 0) & bit)
        recorded = digests[start:]
        mark = bit << _COUNT_BITS
        for digest in recorded:
            expected[digest] = (expected.get(digest, 0) | mark) + 1
        return recorded

    def clear_expected(self, recorded: Sequence[bytes]) -> None:
        """Remove the record of a request that has ended; ``recorded`` is the result of `expect`."""
        expected = self._expected
        for digest in recorded:
            entry = expected[digest]
            if entry & _COUNT_MASK == 1:
                del expected[digest]
            else:
                expected[digest] = entry - 1

    def depths(self, digests: Sequence[bytes], workers: int) -> dict[int, int]:
        """Return worker -> number of leading blocks that it has, without workers that lack the first block.

        A worker that has a block has all blocks before it, because caches evict the end of a prompt first.
        The function therefore uses binary search, with a few lookups for each distinct depth.

        Args:
            digests: the digests of a prompt's blocks, in order.
            workers: the set of workers to look for.
        """
        cached, expected = self._cached.get, self._expected.get

        def workers_at(depth: int) -> int:
            """Return the set of workers that have ``depth`` leading blocks."""
            digest = digests[depth - 1]
            return (cached(digest, 0) | expected(digest, 0) >> _COUNT_BITS) & workers

        found: dict[int, int] = {}
        count = len(digests)
        first = workers_at(1) if count else 0
        if not first:
            return found
        last = workers_at(count)
        found.update(dict.fromkeys(_members(last), count))
        ranges = [(1, first, count, last)]
        while ranges:
            low, at_low, high, at_high = ranges.pop()
            dropped_workers = at_low & ~at_high
            if not dropped_workers:
                continue
            if high - low == 1:
                found.update(dict.fromkeys(_members(dropped_workers), low))
                continue
            middle = (low + high) // 2
            at_middle = workers_at(middle) & at_low | at_high
            ranges += [(low, at_low, middle, at_middle), (middle, at_middle, high, at_high)]
        return found

    def _remove(self, digest: bytes, bit: int) -> None:
        workers = self._cached.get(digest, 0) & ~bit
        if workers:
            self._cached[digest] = workers
        else:
            self._cached.pop(digest, None)


def _members(workers: int) -> list[int]:
    """Return the numbers of the workers in a bit set."""
    members = []
    while workers:
        lowest = workers & -workers
        members.append(lowest.bit_length() - 1)
        workers ^= lowest
    return members
