"""`Clock`: runs events in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Runs events in the order of their virtual times, without waiting.

    Events of the same time run in the order in which they were added.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """The virtual time, in seconds."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_numbers = count()

    def call_at(self, time: float, action: Callable[[], None]) -> None:
        """Call ``action`` at the virtual time ``time``, which must not be in the past."""
        assert time >= self.now, f"{time} is before {self.now}"
        heapq.heappush(self._events, (time, next(self._event_numbers), action))

    def call_after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``seconds`` of virtual time."""
        self.call_at(self.now + seconds, action)

    def run(self) -> None:
        """Run all events, including events that other events add."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


class BusyServer:
    """A resource in virtual time that performs one task at a time, such as the thread of the router.

    Args:
        clock: the virtual time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at = 0.0
        self.busy_seconds = 0.0
        """Total seconds of the tasks that were passed to `serve`."""
        self.wait_seconds: list[float] = []
        """For each task, the seconds from the call of `serve` until the task began."""

    def serve(self, seconds: float, action: Callable[[], None]) -> None:
        """Run a task of ``seconds`` after all earlier tasks, and then call ``action``."""
        begin = max(self._clock.now, self._free_at)
        self.wait_seconds.append(begin - self._clock.now)
        self._free_at = begin + seconds
        self.busy_seconds += seconds
        self._clock.call_at(self._free_at, action)
