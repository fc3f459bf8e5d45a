"""`CacheLog`: a log of the recent events of the prefix caches of a replica's workers.

The HTTP processes read the log periodically and route requests by the cached blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent

_MIN_CAPACITY = 1024
"""Minimum capacity of the log, in block digests."""


class CacheChanges(msgspec.Struct):
    """The events of a prefix cache after a position in its log."""

    position: int
    """The position after these events. The reader passes it to the next call of `CacheLog.since`."""
    events: list[CacheEvent]


class CacheLog:
    """The blocks in the prefix caches of a replica's workers, and a log of the cache events.

    A block is cached while at least one worker has it. Several readers read the log, each from its own
    position. The log keeps at most max(number of cached blocks, `_MIN_CAPACITY`) digests. If events
    after the position of a reader have been dropped, the reader gets all cached blocks.
    """

    def __init__(self) -> None:
        self._cached_blocks: dict[bytes, set[int]] = {}
        """Digest -> workers that have the block, in the order in which blocks were stored."""
        self._events: deque[CacheEvent] = deque()
        self._position = 0  # number of events added since the start
        self._num_logged = 0  # number of digests in the log

    def add(self, events: Sequence[CacheEvent], worker: int = 0) -> None:
        """Append events of the prefix cache of one worker."""
        cached_blocks = self._cached_blocks
        for event in events:
            match event:
                case BlocksStored():
                    for digest in event.digests:
                        cached_blocks.setdefault(digest, set()).add(worker)
                    event = BlocksStored(event.digests, None, [])  # routers do not use tokens
                case BlocksRemoved():
                    event = BlocksRemoved(self._remove_owner(event.digests, worker))
                case _:
                    digests = [digest for digest, workers in cached_blocks.items() if worker in workers]
                    removed_blocks = self._remove_owner(digests, worker)
                    event = BlocksRemoved(removed_blocks) if cached_blocks else BlocksCleared()
            self._events.append(event)
            self._position += 1
            self._num_logged += _num_digests(event)
        while self._num_logged > max(len(cached_blocks), _MIN_CAPACITY):
            self._num_logged -= _num_digests(self._events.popleft())

    def _remove_owner(self, digests: Sequence[bytes], worker: int) -> list[bytes]:
        """Remove a worker from the owners of blocks. Return the digests of blocks without other owners."""
        removed_blocks = []
        for digest in digests:
            workers = self._cached_blocks.get(digest, set())
            workers.discard(worker)
            if not workers and self._cached_blocks.pop(digest, None) is not None:
                removed_blocks.append(digest)
        return removed_blocks

    def since(self, position: int) -> CacheChanges:
        """Return the events after a position, or all cached blocks if the log lacks some of these events.

        Position 0 is before the first event, with an empty cache.
        """
        num_new = self._position - position
        if 0 <= num_new <= len(self._events):
            events = list(self._events)[len(self._events) - num_new :]
        else:
            events = [BlocksCleared(), BlocksStored(list(self._cached_blocks), None, [])]
        return CacheChanges(self._position, events)


def _num_digests(event: CacheEvent) -> int:
    """Return the size of an event in the log: the number of its digests, at least 1."""
    return 1 if isinstance(event, BlocksCleared) else max(len(event.digests), 1)
