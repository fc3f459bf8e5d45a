"""The contexts that wait to run, in the order in which they are to be served."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar


class Entry(Protocol):
    """Something that waits."""

    @property
    def request_id(self) -> str: ...

    @property
    def client_id(self) -> str: ...

    @property
    def key(self) -> tuple[int, int]:
        """Negative priority, then arrival: the smallest of a client is served first. No two are equal."""
        ...


EntryT = TypeVar("EntryT", bound=Entry)
_Rank: TypeAlias = tuple[int, ...]

_SPARE = 64
"""Outdated items that the heap of clients may hold, besides one for each client."""


class WaitingQueue(Generic[EntryT]):
    """A queue of entries that may not be ready yet; entries behind those are served meanwhile.

    Each client has a lane, in which its entries stand in the order of their keys. Of the first entries of all
    lanes the one with the highest priority comes first, then the one whose client has the smallest rank, then
    the oldest.

    However long the queue, a step looks at no more than ``scan_limit`` entries in vain: the ones found not
    ready are set aside, and asked again in turn, so many in each step.

    Args:
        scan_limit: how many entries a step looks at in vain.
        rank: the rank of a client. A rank may become larger at any time; where one becomes smaller, call
            `refresh`.
    """

    def __init__(self, scan_limit: int, rank: Callable[[str], _Rank] = lambda client_id: ()) -> None:
        self._look_limit = scan_limit
        self._looks_left = scan_limit
        self._rank = rank
        self._entries: dict[str, EntryT] = {}  # what is not in here was removed, and is passed over below
        self._lanes: dict[str, list[tuple[tuple[int, int], EntryT]]] = {}  # a heap for each client
        # Clients by the place of their first entry. An item may be outdated, but only by being too small.
        self._heap: list[tuple[_Rank, str]] = []
        self._aside: deque[EntryT] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def push(self, entry: EntryT) -> None:
        """Adds an entry; its key is its place in the lane of its client."""
        self._entries[entry.request_id] = entry
        self._line_up(entry)

    def remove(self, request_id: str) -> EntryT | None:
        """Takes an entry out, wherever it stands; None if it is not here."""
        return self._entries.pop(request_id, None)

    def refresh(self, client_id: str) -> None:
        """Notes that the rank of a client may have become smaller."""
        first = self._first_of(client_id)
        if first is None:
            return
        heapq.heappush(self._heap, (self._place(first), client_id))
        if len(self._heap) > 2 * len(self._lanes) + _SPARE:
            firsts = ((client, self._first_of(client)) for client in list(self._lanes))
            self._heap = [(self._place(entry), client) for client, entry in firsts if entry is not None]
            heapq.heapify(self._heap)

    def recheck(self, is_ready: Callable[[EntryT], bool]) -> None:
        """Begins a step: those that were not ready may be by now."""
        self._looks_left = self._look_limit
        for _ in range(min(self._look_limit, len(self._aside))):
            entry = self._aside.popleft()
            if not self._is_here(entry):
                continue
            if is_ready(entry):
                self._line_up(entry)
            else:
                self._aside.append(entry)

    def first_ready(self, is_ready: Callable[[EntryT], bool]) -> EntryT | None:
        """The entry to be served next, which stays in the queue; None if there is none in this step."""
        while self._heap and self._looks_left:
            place, client_id = self._heap[0]
            entry = self._first_of(client_id)
            if entry is None:
                heapq.heappop(self._heap)
            elif place != (now := self._place(entry)):
                heapq.heapreplace(self._heap, (now, client_id))
            elif is_ready(entry):
                return entry
            else:
                self._looks_left -= 1
                if self._is_here(entry):  # else asking has ended it
                    heapq.heappop(self._lanes[client_id])
                    self._aside.append(entry)
        return None

    def _line_up(self, entry: EntryT) -> None:
        heapq.heappush(self._lanes.setdefault(entry.client_id, []), (entry.key, entry))
        self.refresh(entry.client_id)

    def _first_of(self, client_id: str) -> EntryT | None:
        lane = self._lanes.get(client_id, [])
        while lane and not self._is_here(lane[0][1]):
            heapq.heappop(lane)
        if lane:
            return lane[0][1]
        self._lanes.pop(client_id, None)
        return None

    def _place(self, entry: EntryT) -> _Rank:
        priority, arrival = entry.key
        return (priority, *self._rank(entry.client_id), arrival)

    def _is_here(self, entry: EntryT) -> bool:
        return self._entries.get(entry.request_id) is entry
