"""The contexts that wait to run, in the order in which they are to be served."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    """Something that waits."""

    @property
    def request_id(self) -> str: ...

    @property
    def key(self) -> tuple[int, int]:
        """The smallest is served first; no two are equal."""
        ...


EntryT = TypeVar("EntryT", bound=Entry)


class WaitingQueue(Generic[EntryT]):
    """A priority queue whose entries may not be ready yet; those behind them are served meanwhile.

    However long the queue, a step looks at no more than ``look_limit`` entries in vain: the ones found not
    ready are set aside, and asked again in turn, so many in each step.
    """

    def __init__(self, look_limit: int) -> None:
        self._look_limit = look_limit
        self._looks_left = look_limit
        self._entries: dict[str, EntryT] = {}  # what is not in here was removed, and is passed over below
        self._heap: list[tuple[tuple[int, int], EntryT]] = []
        self._aside: deque[EntryT] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def push(self, entry: EntryT) -> None:
        """Adds an entry; its key is its place."""
        self._entries[entry.request_id] = entry
        heapq.heappush(self._heap, (entry.key, entry))

    def remove(self, request_id: str) -> EntryT | None:
        """Takes an entry out, wherever it stands; None if it is not here."""
        return self._entries.pop(request_id, None)

    def look_again(self, is_ready: Callable[[EntryT], bool]) -> None:
        """Begins a step: those that were not ready may be by now."""
        self._looks_left = self._look_limit
        for _ in range(min(self._look_limit, len(self._aside))):
            entry = self._aside.popleft()
            if not self._is_here(entry):
                continue
            if is_ready(entry):
                heapq.heappush(self._heap, (entry.key, entry))
            else:
                self._aside.append(entry)

    def first_ready(self, is_ready: Callable[[EntryT], bool]) -> EntryT | None:
        """The entry to be served next, which stays in the queue; None if there is none in this step."""
        while self._heap and self._looks_left:
            entry = self._heap[0][1]
            if self._is_here(entry):
                if is_ready(entry):
                    return entry
                self._looks_left -= 1
                self._aside.append(entry)
            heapq.heappop(self._heap)
        return None

    def _is_here(self, entry: EntryT) -> bool:
        return self._entries.get(entry.request_id) is entry
