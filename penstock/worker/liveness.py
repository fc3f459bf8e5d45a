"""Tells a worker that works from one that hangs: by its answers, and by the progress that it counts."""

from __future__ import annotations

import time
from typing import Protocol

MAX_LOAD_PAUSE = 600.0
"""Seconds without progress after which a worker that starts is ended, if the limit for steps is not longer.
Importing libraries from a slow disk counts no progress."""


class Watched(Protocol):
    """What can be seen of a worker from outside."""

    @property
    def progress(self) -> int:
        """How much progress it has counted."""
        ...

    @property
    def is_suspended(self) -> bool:
        """Whether its process was suspended by a signal."""
        ...


class Liveness:
    """How long a worker that should answer has shown no sign of life, as far as looks at it can say.

    The time between two looks counts up to twice the ``interval``: a server that was suspended itself, or was
    busy, has not looked and does not know.

    Args:
        worker: the worker.
        interval: seconds between two looks.
    """

    def __init__(self, worker: Watched, interval: float) -> None:
        self._worker = worker
        self._longest_gap = 2 * interval
        self._progress = worker.progress
        self._looked_at = self._now()
        self._was_suspended = False
        self.is_asked = False
        """Whether the worker has yet to answer."""
        self.silence = 0.0
        """Seconds without an answer and without progress, up to the last look."""

    def ask(self) -> None:
        """Note that the worker is to answer from now on."""
        self.is_asked = True
        self._progress, self._looked_at = self._worker.progress, self._now()

    def hear(self) -> None:
        """Note that the worker has answered."""
        self.is_asked = False
        self.silence = 0.0

    def look(self, limit: float) -> str:
        """Return why the worker has to be ended, or nothing.

        Args:
            limit: the longest silence, in seconds.
        """
        progress, now = self._worker.progress, self._now()
        if self.is_asked and progress == self._progress:
            self.silence += min(now - self._looked_at, self._longest_gap)
        else:
            self.silence = 0.0
        self._progress, self._looked_at = progress, now
        is_suspended = self._worker.is_suspended
        if is_suspended and self._was_suspended:  # a server that was suspended with it sees that once
            return "suspended by a signal"
        self._was_suspended = is_suspended
        return f"no progress for {self.silence:.0f} s" if self.silence >= limit else ""

    def _now(self) -> float:
        return time.monotonic()
