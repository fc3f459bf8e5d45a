"""Which workers can find which blocks in their prefix caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.pipelines.core.cache_events import BlocksRemoved, BlocksStored, CacheEvent


class PrefixMap:
    """Maps the digest of a block to the set of workers that have it, bit ``i`` for worker ``i``.

    The cache events of the workers keep it exact. A block that a running request will store counts already:
    requests with the same prompt that arrive together then go to one worker, which computes it once.
    """

    def __init__(self) -> None:
        self._cached: dict[bytes, int] = {}
        self._expected: dict[bytes, tuple[int, int]] = {}  # workers, and number of requests

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

    def expect(self, worker: int, digests: Sequence[bytes]) -> None:
        """Record that a request on a worker will store blocks."""
        bit, expected = 1 << worker, self._expected
        for digest in digests:
            workers, count = expected.get(digest, (0, 0))
            expected[digest] = workers | bit, count + 1

    def settle(self, digests: Sequence[bytes]) -> None:
        """Record that a request has ended, whose blocks were expected."""
        expected = self._expected
        for digest in digests:
            workers, count = expected[digest]
            if count == 1:
                del expected[digest]
            else:
                expected[digest] = workers, count - 1

    def depths(self, digests: Sequence[bytes], workers: int) -> dict[int, int]:
        """Return how many leading blocks each worker has; workers without the first block are left out.

        Args:
            digests: the digests of a prompt's blocks, in order.
            workers: the set of workers to look for.
        """
        found: dict[int, int] = {}
        cached, expected = self._cached.get, self._expected.get
        for depth, digest in enumerate(digests):
            having = cached(digest, 0)
            coming = expected(digest)
            if coming is not None:
                having |= coming[0]
            having &= workers
            if having != workers:
                if depth:
                    found.update(dict.fromkeys(_members(workers & ~having), depth))
                workers = having
                if not workers:
                    return found
        found.update(dict.fromkeys(_members(workers), len(digests)))
        return found

    def _remove(self, digest: bytes, bit: int) -> None:
        workers = self._cached.get(digest, 0) & ~bit
        if workers:
            self._cached[digest] = workers
        else:
            self._cached.pop(digest, None)


def _members(workers: int) -> list[int]:
    """Return the workers of a set."""
    members = []
    while workers:
        lowest = workers & -workers
        members.append(lowest.bit_length() - 1)
        workers ^= lowest
    return members
