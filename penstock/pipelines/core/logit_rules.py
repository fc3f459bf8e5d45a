"""The token rules and token counts of a request, as arrays that sampling applies to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.pipelines.core.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)


class LogitRules:
    """The logit biases, allowed tokens, banned tokens and banned sequences of one request."""

    def __init__(self, params: SamplingParams) -> None:
        bias = params.logit_bias or {}
        sequences = params.banned_sequences or []
        banned = [*(params.banned_token_ids or []), *(ids[0] for ids in sequences if len(ids) == 1)]
        self.bias_ids: Ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias: npt.NDArray[np.float32] = np.fromiter(bias.values(), np.float32, len(bias))
        self.banned: Ids = np.unique(np.array(banned, np.int64))
        self.allowed: Ids | None = None
        """``allowed_token_ids`` without banned tokens; None if the request does not restrict the tokens."""
        if params.allowed_token_ids is not None:
            allowed = np.array(params.allowed_token_ids, np.int64)
            self.allowed = np.setdiff1d(allowed, self.banned)
        self.longest_prefix = max((len(ids) - 1 for ids in sequences), default=0)
        """Maximum number of last tokens that `banned_after` compares; 0 if all sequences have one token."""
        self._last_tokens: dict[tuple[int, ...], list[int]] = {}
        """Maps a prefix to the last tokens of the banned sequences that have one token after this prefix."""
        for *prefix, last in sequences:
            if prefix:
                self._last_tokens.setdefault(tuple(prefix), []).append(last)
        self._prefix_lengths = sorted({len(prefix) for prefix in self._last_tokens})
        sequence_ids = np.array([token for ids in sequences for token in ids], np.int64)
        allowed_ids = [] if self.allowed is None else [self.allowed]
        id_arrays = [self.bias_ids, self.banned, sequence_ids, *allowed_ids]
        self.largest_id = max((int(ids.max()) for ids in id_arrays if len(ids)), default=-1)
        """The largest token id in any rule; -1 without rules."""

    def banned_after(self, tokens: Sequence[int]) -> Ids:
        """Return the tokens that would complete a banned sequence if generated after ``tokens``.

        Sequences of one token are not included: they are in `banned`.
        """
        banned: list[int] = []
        for length in self._prefix_lengths:
            if length <= len(tokens):
                banned += self._last_tokens.get(tuple(tokens[len(tokens) - length :]), ())
        return np.unique(np.array(banned, np.int64))


class TokenCounts:
    """The distinct tokens of a context and the number of times each was generated.

    Adding a token takes ``O(1)`` amortized time.

    Args:
        prompt: tokens of the prompt. They are included in the distinct tokens, with a count of 0.
        generated: the tokens generated so far. They are counted.
    """

    def __init__(self, prompt: npt.NDArray[np.integer], generated: npt.NDArray[np.integer]) -> None:
        self.end = 0
        """Number of generated tokens counted so far."""
        unique = np.unique(prompt)
        self._num_distinct = len(unique)
        self._ids: Ids = np.zeros(max(2 * self._num_distinct, 64), np.int64)
        self._ids[: self._num_distinct] = unique
        self._counts: npt.NDArray[np.float32] = np.zeros(len(self._ids), np.float32)
        self._slots = {token: slot for slot, token in enumerate(unique.tolist())}
        for token in generated.tolist():
            self.add(token)

    @property
    def ids(self) -> Ids:
        """The distinct tokens, as a view of an array that `add` changes or replaces."""
        return self._ids[: self._num_distinct]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` was generated, as a view of an array that `add` changes or replaces."""
        return self._counts[: self._num_distinct]

    def add(self, token: int) -> None:
        """Count the next generated token."""
        self.end += 1
        slot = self._slots.setdefault(token, self._num_distinct)
        if slot == self._num_distinct:
            if slot == len(self._ids):
                self._ids, self._counts = _double_capacity(self._ids), _double_capacity(self._counts)
            self._ids[slot] = token
            self._num_distinct += 1
        self._counts[slot] += 1

    def with_drafts(self, drafts: Sequence[int]) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Return ``ids`` and ``counts`` as if ``drafts`` had been generated too.

        The object does not change. Without drafts, the result is the views `ids` and `counts`.
        """
        if not drafts:
            return self.ids, self.counts
        new_ids = sorted({token for token in drafts if token not in self._slots})
        ids = np.concatenate([self.ids, np.array(new_ids, np.int64)])
        counts = np.concatenate([self.counts, np.zeros(len(new_ids), np.float32)])
        for token in drafts:
            counts[
                self._slots[token] if token in self._slots else self._num_distinct + new_ids.index(token)
            ] += 1
        return ids, counts


def _double_capacity(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    return np.concatenate([array, np.zeros_like(array)])
