"""Defers the decoding of contexts while a short prompt of another client is computed."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from penstock.pipelines.core import InputContext
from penstock.scheduler.batch import Entry

ContextT = TypeVar("ContextT", bound=InputContext)

_MAX_ROWS_WITH_PROMPT = 4
"""Maximum number of decoding contexts of a client in a step with a short prompt of another client.

A step with four decoding contexts takes about as long as a step with one, because both read the same weights.
"""

PROMPT_TOKENS_PER_ROW = 4
"""Number of prompt tokens that take about as long as one token of a decoding context (a decode row).

A decode row takes longer than a prompt token, because it needs attention over its whole context, logits and
sampling.
"""


class Deferral:
    """Selects the contexts that decode in a step.

    A step with hundreds of decode rows takes several times as long as a short prompt. If one client holds
    many slots, such a step would delay the first token of another client. Therefore a step with a short
    prompt decodes at most `_MAX_ROWS_WITH_PROMPT` contexts of each client except the prompt's client. The
    remaining contexts are deferred to the next step. The step after a step with deferred contexts defers
    none, so a context is deferred in at most half of the steps. A prompt is short if its remaining tokens
    take less time than the deferred contexts, estimated with `PROMPT_TOKENS_PER_ROW`.
    """

    def __init__(self) -> None:
        self._has_deferred = False

    def select(
        self, decoding_entries: list[Entry[ContextT]], prompt_entry: Entry[ContextT] | None
    ) -> list[Entry[ContextT]]:
        """Select the entries that decode in the next step, and return them in order.

        Args:
            decoding_entries: all entries that decode, in order.
            prompt_entry: the entry whose prompt the next step computes first; None if it computes no prompt.
        """
        may_defer, self._has_deferred = not self._has_deferred, False
        if prompt_entry is None or not may_defer:
            return decoding_entries
        counts: Counter[str] = Counter()
        selected_entries = []
        for entry in decoding_entries:
            counts[entry.client_id] += 1
            if entry.client_id == prompt_entry.client_id or counts[entry.client_id] <= _MAX_ROWS_WITH_PROMPT:
                selected_entries.append(entry)
        num_deferrable = len(decoding_entries) - len(selected_entries)
        if num_deferrable * PROMPT_TOKENS_PER_ROW <= prompt_entry.num_remaining_tokens:
            return decoding_entries
        self._has_deferred = True
        return selected_entries
