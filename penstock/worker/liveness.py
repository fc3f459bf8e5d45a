"""Detects a worker that hangs or is suspended. A worker hangs if it neither answers nor counts progress."""

from __future__ import annotations

import time
from typing import Protocol

MAX_LOAD_PAUSE = 600.0
"""A starting worker is killed after this many seconds without progress, or after the hang limit if that is
longer. The value is high, because imports of libraries take long on a slow disk and count no progress.
"""


class WatchedWorker(Protocol):
    """The properties of a worker that `Liveness` observes."""

    @property
    def progress(self) -> int:
        """The value of the worker's progress counter."""
        ...

    @property
    def is_suspended(self) -> bool:
        """Whether a signal has suspended the worker's process."""
        ...


class Liveness:
    """Measures how long a worker has been silent: an answer is pending and the progress counter is constant.

    The time between two checks counts as at most ``2 * interval``, because a longer time means that the
    server itself was suspended or busy, not that the worker hangs.

    Args:
        worker: the worker.
        interval: seconds between two checks.
    """

    def __init__(self, worker: WatchedWorker, interval: float) -> None:
        self._worker = worker
        self._max_gap = 2 * interval
        self._progress = worker.progress
        self._checked_at = self._now()
        self._was_suspended = False
        self.awaits_answer = False
        """Whether an answer is pending."""
        self.silence = 0.0
        """Seconds without progress while an answer is pending, up to the last check."""

    def expect_answer(self) -> None:
        """Record that the worker has been sent a message that it must answer."""
        self.awaits_answer = True
        self._progress, self._checked_at = self._worker.progress, self._now()

    def on_answer(self) -> None:
        """Record that the worker has answered."""
        self.awaits_answer = False
        self.silence = 0.0

    def check(self, hang_limit: float) -> str:
        """Update `silence`, and return the reason why the worker must be killed, or an empty string.

        The reason is a silence of at least ``hang_limit`` seconds, or that the worker was suspended in this
        check and in the previous one.
        """
        progress, now = self._worker.progress, self._now()
        if self.awaits_answer and progress == self._progress:
            self.silence += min(now - self._checked_at, self._max_gap)
        else:
            self.silence = 0.0
        self._progress, self._checked_at = progress, now
        # If server and worker were suspended together, the first check can find the worker still suspended.
        is_suspended = self._worker.is_suspended
        if is_suspended and self._was_suspended:
            return "suspended by a signal"
        self._was_suspended = is_suspended
        return f"no progress for {self.silence:.0f} s" if self.silence >= hang_limit else ""

    def _now(self) -> float:
        return time.monotonic()
