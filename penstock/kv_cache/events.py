"""`CacheEventLog`: the events of a prefix cache: some blocks were stored or removed, or all were removed."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent


class CacheEventLog:
    """Collects events in order until `take` returns them. Consecutive evictions become one event."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def add_stored(
        self, digests: Sequence[bytes], parent: bytes | None, token_ids: list[int], adapter: str | None
    ) -> None:
        """Record that consecutive blocks were computed and are in the prefix cache."""
        self._events.append(BlocksStored(list(digests), parent, token_ids, adapter))

    def add_removed(self, digest: bytes) -> None:
        """Record the eviction of a block."""
        if self._events and isinstance(last_event := self._events[-1], BlocksRemoved):
            last_event.digests.append(digest)
        else:
            self._events.append(BlocksRemoved([digest]))

    def add_cleared(self) -> None:
        """Record that all blocks were removed. Drops the earlier events, which no longer matter."""
        self._events = [BlocksCleared()]

    def take(self) -> list[CacheEvent]:
        """Remove and return all collected events."""
        events, self._events = self._events, []
        return events
