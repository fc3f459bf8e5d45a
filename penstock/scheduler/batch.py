"""`Entry`: a context in the scheduler. `Batch`: a batch that is being built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.kv_cache.reservation import ReservedBatch
from penstock.pipelines.core import InputContext

ContextT = TypeVar("ContextT", bound=InputContext)


@dataclass(slots=True, eq=False)
class Entry(Generic[ContextT]):
    """A context in the scheduler, waiting or running."""

    context: ContextT
    sort_key: tuple[int, int]
    """(negative priority, arrival number).

    Of the entries of one client, the entry with the smallest sort key is scheduled first, and the entry with
    the largest sort key is preempted first.
    """
    request_id: str = field(init=False)
    """The request id of the context."""
    client_id: str = field(init=False)
    """The client that sent the request."""
    is_decoding: bool = False
    """Whether a launched or finished step computes the end of the prompt, so that later steps decode."""
    was_admitted: bool = False
    """Whether the context has ever received a slot."""
    last_selection: int = 0
    """Number of the last call of `StepLimit.select` that returned the entry; 0 if no call returned it."""

    def __post_init__(self) -> None:
        self.request_id, self.client_id = self.context.request_id, self.context.client_id

    @property
    def is_generating(self) -> bool:
        """Whether the context still computes tokens. If False, only output such as audio is still to come."""
        return not self.context.generation_status.is_done

    @property
    def num_remaining_tokens(self) -> int:
        """Number of tokens of the context whose KV has not been computed."""
        return self.context.end_idx - self.context.start_idx


@dataclass(slots=True, eq=False)
class Batch(Generic[ContextT]):
    """The entries of a step, in the order in which they were added."""

    num_unused_tokens: int
    """Unused tokens of the step's budget."""
    num_steps: int = 1
    """Number of steps in one call of the pipeline. All added contexts have blocks for these steps."""
    entries: dict[str, Entry[ContextT]] = field(default_factory=dict)
    _rows: dict[str, int] = field(default_factory=dict)

    @property
    def contexts(self) -> ReservedBatch[ContextT]:
        """The contexts of the entries, by request id."""
        return ReservedBatch({request_id: entry.context for request_id, entry in self.entries.items()})

    @property
    def num_rows(self) -> int:
        """Number of tokens that the first forward computes: the rows of its input."""
        return sum([num_rows(entry.context) for entry in self.entries.values()])

    @property
    def num_decode_rows(self) -> int:
        """Number of tokens in the first forward that belong to decoding contexts."""
        return sum([num_rows(entry.context) for entry in self.entries.values() if entry.is_decoding])

    def add(self, entry: Entry[ContextT], rows: int) -> None:
        """Add an entry that computes ``rows`` tokens in the first forward."""
        self.entries[entry.request_id] = entry
        self._rows[entry.request_id] = rows
        self.num_unused_tokens -= rows

    def drop(self, request_id: str) -> None:
        """Remove an entry if it is in the batch."""
        if self.entries.pop(request_id, None) is not None:
            self.num_unused_tokens += self._rows.pop(request_id)


def set_rows(context: InputContext, rows: int) -> None:
    """Set the number of tokens of a context that the next forward computes."""
    active_idx = context.start_idx + rows
    if active_idx != context.active_idx:
        context.set_token_indices(active_idx=active_idx)


def splittable_rows(context: InputContext, rows: int, *, may_grow: bool = True) -> int:
    """Return a number of tokens for a chunk that does not end inside an image with bidirectional attention.

    All tokens of such an image must be computed in one step.

    Args:
        context: the context.
        rows: the requested number of tokens.
        may_grow: whether the result may exceed ``rows`` if the chunk begins with an image.

    Returns:
        The largest valid number up to ``rows``. If that is 0 and ``may_grow`` is set, the smallest valid
        number above ``rows``.
    """
    start = context.start_idx
    num_before = context.boundary_before(start + rows) - start
    if num_before > 0 or not may_grow:
        return max(num_before, 0)
    return context.boundary_after(start + rows) - start


def num_rows(context: InputContext) -> int:
    """Return how many tokens of a context the next forward computes."""
    return 0 if context.generation_status.is_done else context.active_idx - context.start_idx


def computes_last_token(context: InputContext) -> bool:
    """Return whether the next forward computes the last token of a context."""
    return context.active_idx == context.end_idx
