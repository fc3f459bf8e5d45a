"""`WaitingQueue`: the waiting contexts, in the order in which they are admitted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar


class QueueEntry(Protocol):
    """An entry of the queue."""

    @property
    def request_id(self) -> str: ...

    @property
    def client_id(self) -> str: ...

    @property
    def sort_key(self) -> tuple[int, int]:
        """(negative priority, arrival number), unique among all entries.

        Of the entries of one client, the entry with the smallest sort key comes first.
        """
        ...


EntryT = TypeVar("EntryT", bound=QueueEntry)
_Rank: TypeAlias = tuple[int, ...]

_MAX_OUTDATED = 64
"""The heap of clients is rebuilt when it has more than two items per client plus this number."""


class WaitingQueue(Generic[EntryT]):
    """A priority queue that returns only ready entries, and checks entries that are not ready again later.

    Each client has a lane: a heap of its entries by sort key. The queue compares the first entries of all
    lanes by priority, then by the rank of the client (smallest first), then by age (oldest first).

    To limit the time of a step with a long queue, a step stops checking lanes after it has found
    ``scan_limit`` entries that are not ready. Entries that are not ready leave their lane. Each step checks
    up to ``scan_limit`` of these entries again, in turn.

    Args:
        scan_limit: per step, the maximum number of entries in lanes that are found not ready, and the maximum
            number of entries outside lanes that are checked again.
        rank: returns the rank of a client. A rank may increase at any time. After a decrease, call `refresh`.
    """

    def __init__(self, scan_limit: int, rank: Callable[[str], _Rank] = lambda client_id: ()) -> None:
        self._scan_limit = scan_limit
        self._num_remaining_checks = scan_limit  # entries in lanes that the step may still find not ready
        self._rank = rank
        self._entries: dict[str, EntryT] = {}  # lanes can contain removed entries, which are skipped
        self._lanes: dict[str, list[tuple[tuple[int, int], EntryT]]] = {}  # client id -> heap of its entries
        # Heap of (heap key of the first entry, client id). Outdated keys are never larger than current keys.
        self._heap: list[tuple[_Rank, str]] = []
        self._newest_keys: dict[str, _Rank] = {}  # client id -> its newest key in the heap
        self._not_ready: deque[EntryT] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def push(self, entry: EntryT) -> None:
        """Add an entry to the lane of its client."""
        self._entries[entry.request_id] = entry
        self._enqueue(entry)

    def remove(self, request_id: str) -> EntryT | None:
        """Remove and return an entry; None if the queue does not contain it."""
        return self._entries.pop(request_id, None)

    def refresh(self, client_id: str) -> None:
        """Update the position of a client in the order after its rank may have decreased."""
        first_entry = self._first_entry(client_id)
        if first_entry is None:
            return
        key = self._heap_key(first_entry)
        if self._newest_keys.get(client_id) == key:
            return
        self._newest_keys[client_id] = key
        heapq.heappush(self._heap, (key, client_id))
        if len(self._heap) > 2 * len(self._lanes) + _MAX_OUTDATED:
            first_entries = ((client, self._first_entry(client)) for client in list(self._lanes))
            self._newest_keys = {
                client: self._heap_key(entry) for client, entry in first_entries if entry is not None
            }
            self._heap = [(key, client) for client, key in self._newest_keys.items()]
            heapq.heapify(self._heap)

    def recheck(self, is_ready: Callable[[EntryT], bool]) -> None:
        """Start a step: check again up to ``scan_limit`` entries that were not ready when last checked."""
        self._num_remaining_checks = self._scan_limit
        for _ in range(min(self._scan_limit, len(self._not_ready))):
            entry = self._not_ready.popleft()
            if not self._contains(entry):
                continue
            if is_ready(entry):
                self._enqueue(entry)
            else:
                self._not_ready.append(entry)

    def first_ready(self, is_ready: Callable[[EntryT], bool]) -> EntryT | None:
        """Return the next ready entry without removing it; None if no checked entry is ready.

        Entries that are found not ready leave their lane.
        """
        while self._heap and self._num_remaining_checks:
            heap_key, client_id = self._heap[0]
            entry = self._first_entry(client_id)
            if entry is None:
                self._drop_first()
                continue
            current_key = self._heap_key(entry)
            if heap_key != current_key:
                if self._newest_keys.get(client_id) == current_key:
                    self._drop_first()  # the heap also contains the current key
                    continue
                self._newest_keys[client_id] = current_key
                heapq.heapreplace(self._heap, (current_key, client_id))
                if self._heap[0] != (current_key, client_id):
                    continue
            if is_ready(entry):
                return entry
            self._num_remaining_checks -= 1
            if self._contains(entry):  # false if `is_ready` removed the entry
                heapq.heappop(self._lanes[client_id])
                self._not_ready.append(entry)
        return None

    def _drop_first(self) -> None:
        """Remove the first item of the heap."""
        key, client_id = heapq.heappop(self._heap)
        if self._newest_keys.get(client_id) == key:
            del self._newest_keys[client_id]

    def _enqueue(self, entry: EntryT) -> None:
        heapq.heappush(self._lanes.setdefault(entry.client_id, []), (entry.sort_key, entry))
        self.refresh(entry.client_id)

    def _first_entry(self, client_id: str) -> EntryT | None:
        lane = self._lanes.get(client_id)
        if lane is None:
            return None
        while lane:
            entry = lane[0][1]
            if self._contains(entry):
                return entry
            heapq.heappop(lane)
        del self._lanes[client_id]
        return None

    def _heap_key(self, entry: EntryT) -> _Rank:
        priority, arrival = entry.sort_key
        return (priority, *self._rank(entry.client_id), arrival)

    def _contains(self, entry: EntryT) -> bool:
        return self._entries.get(entry.request_id) is entry
