"""Limits the duration of decode steps while one client has many contexts and other clients send requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.pipelines.core import InputContext
from penstock.scheduler.batch import Entry

ContextT = TypeVar("ContextT", bound=InputContext)

_RECENT_SECONDS = 2.0
"""Seconds for which steps stay limited after the scheduler last had contexts of two or more clients."""

_SHORT_SECONDS = 0.005
"""Duration in seconds up to which a step is never limited."""

_MAX_FIXED_MULTIPLE = 2
"""Maximum duration of a limited step above `_SHORT_SECONDS`, as a multiple of `StepTime.fixed_seconds`."""

_MIN_ROWS = 8
"""Minimum number of decode rows per client in a limited step. A step with eight rows takes about as long as a
step with one row, because both read the same weights.
"""

_DECAY = 0.98
"""Weight of a recorded step relative to the step after it, in the least-squares fit."""

_MIN_SPREAD = 0.1
"""Minimum standard deviation of the number of rows, relative to its mean, to estimate the time per row."""


class StepTime:
    """Estimates the duration of a step as a fixed time plus a time per decode row (decoded token).

    The estimate is a weighted least-squares line through the recorded steps. Older steps have smaller
    weights. The line is updated only if the numbers of rows differ enough to determine it.
    """

    def __init__(self) -> None:
        self.fixed_seconds: float | None = None
        """Estimated seconds of a step without rows; None before the first estimate."""
        self.seconds_per_row = 0.0
        """Estimated additional seconds per row."""
        # weighted sums over the recorded steps: of 1, rows, seconds, rows * rows, and rows * seconds
        self._weight = self._rows = self._seconds = self._rows_squared = self._products = 0.0

    def record(self, num_rows: float, seconds: float) -> None:
        """Record the duration of a step."""
        self._weight = _DECAY * self._weight + 1
        self._rows = _DECAY * self._rows + num_rows
        self._seconds = _DECAY * self._seconds + seconds
        self._rows_squared = _DECAY * self._rows_squared + num_rows * num_rows
        self._products = _DECAY * self._products + num_rows * seconds
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_squared / self._weight - mean_rows * mean_rows
        if variance <= (_MIN_SPREAD * mean_rows) ** 2:
            return
        seconds_per_row = (self._products / self._weight - mean_rows * mean_seconds) / variance
        self.seconds_per_row = min(max(seconds_per_row, 0.0), mean_seconds / mean_rows)
        self.fixed_seconds = mean_seconds - self.seconds_per_row * mean_rows


class StepLimit:
    """Limits the decode rows of a step and the steps of a pipeline call while one client holds many slots.

    A prompt that arrives during a pipeline call waits until the call ends. While several clients have
    requests, and for `_RECENT_SECONDS` afterwards, calls are therefore limited if a client has more than
    `_MIN_ROWS` decoding contexts. A limited step has as many rows as fit into its maximum duration, but at
    least `_MIN_ROWS` rows of each client, or all rows of a client with fewer. The contexts of a client take
    turns.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step_time = StepTime()
        self._contended_at = float("-inf")
        self._num_selections = 0

    def note_contention(self) -> None:
        """Record that the scheduler has contexts of two or more clients."""
        self._contended_at = self._clock()

    def record(self, num_rows: float, seconds: float) -> None:
        """Update the estimate with the duration of a step."""
        self._step_time.record(num_rows, seconds)

    def select(
        self, decoding_entries: list[Entry[ContextT]], num_steps: int
    ) -> tuple[list[Entry[ContextT]], int]:
        """Select the entries that decode in the next call. Return them in order, and the number of steps.

        Args:
            decoding_entries: all entries that decode, in order.
            num_steps: the requested number of steps.
        """
        fixed_seconds, seconds_per_row = self._step_time.fixed_seconds, self._step_time.seconds_per_row
        counts = Counter(entry.client_id for entry in decoding_entries)
        is_recent = self._clock() - self._contended_at <= _RECENT_SECONDS
        if fixed_seconds is not None and is_recent and max(counts.values(), default=0) > _MIN_ROWS:
            max_seconds = max(_SHORT_SECONDS, _MAX_FIXED_MULTIPLE * fixed_seconds)
            if fixed_seconds + seconds_per_row * len(decoding_entries) > max_seconds:
                decoding_entries = _least_recently_selected(
                    decoding_entries, counts, int((max_seconds - fixed_seconds) / seconds_per_row)
                )
            step_seconds = fixed_seconds + seconds_per_row * len(decoding_entries)
            if num_steps * step_seconds > max_seconds:
                num_steps = max(1, int(max_seconds / step_seconds))
        self._num_selections += 1
        for entry in decoding_entries:
            entry.last_selection = self._num_selections
        return decoding_entries, num_steps


def _least_recently_selected(
    decoding_entries: list[Entry[ContextT]], counts: Mapping[str, int], num_rows: int
) -> list[Entry[ContextT]]:
    """Return about ``num_rows`` entries, those selected longest ago, in the order of ``decoding_entries``.

    Clients get equal shares, but at least `_MIN_ROWS` rows. Rows that a client with few entries does not use
    go to other clients.

    Args:
        decoding_entries: the entries.
        counts: the number of entries of each client.
        num_rows: the approximate number of entries to return.
    """
    rows_by_client = {}
    for number, (client_id, count) in enumerate(sorted(counts.items(), key=lambda item: item[1])):
        rows_by_client[client_id] = min(count, max(num_rows // (len(counts) - number), _MIN_ROWS))
        num_rows = max(num_rows - rows_by_client[client_id], 0)
    selected_ids = set()
    for entry in sorted(decoding_entries, key=lambda entry: entry.last_selection):
        if rows_by_client[entry.client_id]:
            rows_by_client[entry.client_id] -= 1
            selected_ids.add(entry.request_id)
    return [entry for entry in decoding_entries if entry.request_id in selected_ids]
