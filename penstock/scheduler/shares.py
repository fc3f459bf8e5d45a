"""`ClientShares`: counts contexts and slots of each client, and determines the order of the clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from penstock.pipelines.core import InputContext
from penstock.scheduler.batch import Entry

ContextT = TypeVar("ContextT", bound=InputContext)


class ClientShares:
    """Counts the contexts and the slots of each client.

    A client is known while it has at least one context.

    Clients take turns: among clients with equally many slots, the client that was served longest ago comes
    first. A new client comes before the clients that the last step served, and after all other clients.
    Therefore every client is served.
    """

    def __init__(self) -> None:
        self._num_contexts: dict[str, int] = {}
        self._num_slots: dict[str, int] = {}
        # Client -> number of its last turn; the client with the smallest number comes first
        self._turns: dict[str, int] = {}
        self._num_served = 0
        self._num_served_before = 0  # `_num_served` at the start of the last step

    @property
    def is_contended(self) -> bool:
        """Whether contexts of two or more clients are present."""
        return len(self._num_contexts) > 1

    def num_slots(self, client_id: str) -> int:
        """Return the number of slots that a client holds."""
        return self._num_slots.get(client_id, 0)

    def rank(self, client_id: str) -> tuple[int, int]:
        """Return the sort key of a client with waiting contexts.

        The client with the smallest key comes first.
        """
        return self.num_slots(client_id), self._turns[client_id]

    def prompt_key(self, entry: Entry[ContextT]) -> tuple[int, int, int]:
        """Return the sort key of a prompt. The prompt with the smallest key is computed first."""
        priority, arrival = entry.sort_key
        return priority, self._turns[entry.client_id], arrival

    def preemption_key(self, entry: Entry[ContextT]) -> tuple[int, int, int]:
        """Return the sort key of a running entry. The entry with the largest key is preempted first."""
        priority, arrival = entry.sort_key
        return priority, self.num_slots(entry.client_id), arrival

    def entry_to_preempt(
        self, waiting_entry: Entry[ContextT], running_entries: Iterable[Entry[ContextT]]
    ) -> Entry[ContextT] | None:
        """Return the running entry to preempt so that a waiting entry can run; None if there is none.

        The client of the returned entry holds at least two slots more than the client of the waiting entry,
        and the returned entry has no higher priority than the waiting entry. A preemption therefore makes the
        numbers of slots more equal, and is not reverted by a later one.
        """
        min_slots = self.num_slots(waiting_entry.client_id) + 2
        if self.max_slots < min_slots:
            return None
        candidates = (entry for entry in running_entries if entry.sort_key[0] >= waiting_entry.sort_key[0])
        preemptible_entries = (entry for entry in candidates if self.num_slots(entry.client_id) >= min_slots)
        return max(preemptible_entries, key=self.preemption_key, default=None)

    @property
    def max_slots(self) -> int:
        """The largest number of slots that one client holds."""
        return max(self._num_slots.values(), default=0)

    def begin_step(self) -> None:
        """Mark the start of a step."""
        self._num_served_before = self._num_served

    def add_context(self, client_id: str) -> None:
        """Count a new context."""
        self._num_contexts[client_id] = self._num_contexts.get(client_id, 0) + 1
        self._turns.setdefault(client_id, self._num_served_before)

    def remove_context(self, client_id: str) -> None:
        """Stop counting a context, which must have released its slot."""
        self._num_contexts[client_id] -= 1
        if not self._num_contexts[client_id]:
            del self._num_contexts[client_id], self._turns[client_id]

    def add_slot(self, client_id: str) -> None:
        """Count a slot that a context received."""
        self._num_slots[client_id] = self._num_slots.get(client_id, 0) + 1

    def release_slot(self, client_id: str) -> None:
        """Stop counting a slot that a context released."""
        self._num_slots[client_id] -= 1
        if not self._num_slots[client_id]:
            del self._num_slots[client_id]

    def move_to_end(self, client_id: str) -> None:
        """Make a client the most recently served one, after one of its prompts was scheduled."""
        self._num_served += 1
        self._turns[client_id] = self._num_served
