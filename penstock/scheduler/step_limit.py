"""Bounds the duration of decode steps of a client with many contexts while other clients send requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.pipelines.core import InputContext
from penstock.scheduler.batch import Entry

ContextT = TypeVar("ContextT", bound=InputContext)

_RECENT_SECONDS = 2.0
"""Seconds for which steps stay short after contexts of two clients were last present."""

_SHORT_SECONDS = 0.005
"""Seconds up to which a step always counts as short."""

_FIXED_TIMES = 2
"""Maximum duration of a short step, as a multiple of the fixed costs of a step."""

_MIN_ROWS = 8
"""Minimum number of rows per client in a limited step. A step with this few rows takes about as long as one
with a single row, because both read the same weights.
"""

_DECAY = 0.98
"""Weight of a recorded step relative to the next step."""

_MIN_SPREAD = 0.1
"""Minimum relative standard deviation of the numbers of rows for an estimate of the time per row."""


class StepTime:
    """Estimates the duration of a step: fixed costs plus a time per row.

    The estimate is a line through the recorded steps by least squares; older steps weigh less. It changes
    only while the numbers of rows differ enough to determine the line.
    """

    def __init__(self) -> None:
        self.fixed: float | None = None
        """Seconds of a step without rows; None until it is known."""
        self.per_row = 0.0
        """Seconds per row."""
        self._weight = self._rows = self._seconds = self._rows_squared = self._products = 0.0

    def record(self, num_rows: float, seconds: float) -> None:
        """Update the estimate with the duration of a step."""
        self._weight = _DECAY * self._weight + 1
        self._rows = _DECAY * self._rows + num_rows
        self._seconds = _DECAY * self._seconds + seconds
        self._rows_squared = _DECAY * self._rows_squared + num_rows * num_rows
        self._products = _DECAY * self._products + num_rows * seconds
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_squared / self._weight - mean_rows * mean_rows
        if variance <= (_MIN_SPREAD * mean_rows) ** 2:
            return
        per_row = (self._products / self._weight - mean_rows * mean_seconds) / variance
        self.per_row = min(max(per_row, 0.0), mean_seconds / mean_rows)
        self.fixed = mean_seconds - self.per_row * mean_rows


class StepLimit:
    """Limits the decode rows of a step and the steps of a call while one client holds many slots.

    A prompt that arrives during a call waits until the call ends. While other clients send requests, a client
    with more than `_MIN_ROWS` contexts therefore gets short steps: as many rows as the time of a short step
    allows, but at least `_MIN_ROWS` of each client. Its contexts take turns, so that all of them continue.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._time = StepTime()
        self._contended_at = float("-inf")
        self._num_selections = 0

    def note_contention(self) -> None:
        """Record that contexts of two or more clients are present."""
        self._contended_at = self._clock()

    def record(self, num_rows: float, seconds: float) -> None:
        """Update the estimate with the duration of a step."""
        self._time.record(num_rows, seconds)

    def select(self, decoding: list[Entry[ContextT]], num_steps: int) -> tuple[list[Entry[ContextT]], int]:
        """Return the entries of ``decoding`` that run, in their order, and the number of steps.

        Args:
            decoding: all entries that decode, in order.
            num_steps: the requested number of steps.
        """
        fixed, per_row = self._time.fixed, self._time.per_row
        counts = Counter(entry.client_id for entry in decoding)
        is_recent = self._clock() - self._contended_at <= _RECENT_SECONDS
        if fixed is not None and is_recent and max(counts.values(), default=0) > _MIN_ROWS:
            limit = max(_SHORT_SECONDS, _FIXED_TIMES * fixed)
            if fixed + per_row * len(decoding) > limit:
                decoding = _first_in_turn(decoding, counts, int((limit - fixed) / per_row))
            seconds = fixed + per_row * len(decoding)
            if num_steps * seconds > limit:
                num_steps = max(1, int(limit / seconds))
        self._num_selections += 1
        for entry in decoding:
            entry.last_selection = self._num_selections
        return decoding, num_steps


def _first_in_turn(
    decoding: list[Entry[ContextT]], counts: Mapping[str, int], num_rows: int
) -> list[Entry[ContextT]]:
    """Return about ``num_rows`` entries in their order: for each client, those that waited longest.

    Clients get equal shares, but at least `_MIN_ROWS`.

    Args:
        decoding: the entries.
        counts: the number of entries of each client.
        num_rows: the number of entries to return.
    """
    shares = {}
    for number, (client_id, count) in enumerate(sorted(counts.items(), key=lambda item: item[1])):
        shares[client_id] = min(count, max(num_rows // (len(counts) - number), _MIN_ROWS))
        num_rows = max(num_rows - shares[client_id], 0)
    selected = set()
    for entry in sorted(decoding, key=lambda entry: entry.last_selection):
        if shares[entry.client_id]:
            shares[entry.client_id] -= 1
            selected.add(entry.request_id)
    return [entry for entry in decoding if entry.request_id in selected]
