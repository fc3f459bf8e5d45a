"""N-gram drafts: the tokens that followed an earlier occurrence of the last tokens.

Texts that quote, edit or summarize their prompt repeat long parts of it (prompt lookup decoding, A. Saxena
2023). The cost is a few dictionary look-ups per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.pipelines.core import TextContext

_MAX_CANDIDATES = 8
"""Maximum number of earlier occurrences of an n-gram that are compared to find the longest match."""
_MAX_MATCH = 32
"""Maximum number of tokens of a match that are compared."""


class NGramProposer:
    """Finds an earlier occurrence of the last tokens of a context and drafts the tokens that followed it.

    Args:
        min_size: minimum number of tokens that must match.
        max_size: length of the longest indexed n-gram. If the last ``max_size`` tokens occur earlier, the
            longest match among the latest 8 occurrences is used, and among equally long matches the latest
            one. Otherwise, the latest occurrence of the longest shorter n-gram is used.
    """

    def __init__(self, min_size: int = 2, max_size: int = 4) -> None:
        assert 1 <= min_size <= max_size, f"n-grams of {min_size} to {max_size} tokens"
        self._sizes = range(min_size, max_size + 1)
        self._indexes: dict[str, _NGramIndex] = {}

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        return [
            self._updated_index(context).continuation(limit) if limit > 0 else []
            for context, limit in zip(contexts, limits, strict=True)
        ]

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_accepted: Sequence[int]
    ) -> None:
        return  # not needed, because `propose` reads new tokens from the context

    def release(self, context: TextContext) -> None:
        self._indexes.pop(context.request_id, None)

    def discard_cache(self) -> None:
        return

    def prefault_next_pages(self) -> bool:
        return False

    def _updated_index(self, context: TextContext) -> _NGramIndex:
        """Return the index of all tokens of a context.

        Builds a new index for a new context, and if the indexed tokens are no longer a prefix of the
        context's tokens. Only the number of tokens and the last indexed token are compared.
        """
        index = self._indexes.get(context.request_id)
        num_known = 0 if index is None else len(index.tokens)
        tokens = context.all_tokens
        if (
            index is None
            or index.context is not context
            or num_known > len(tokens)
            or (num_known and index.tokens[-1] != tokens[num_known - 1])
        ):
            index = self._indexes[context.request_id] = _NGramIndex(context, self._sizes)
            num_known = 0
        index.extend(tokens[num_known:].tolist())
        return index


@dataclass(slots=True)
class _NGramIndex:
    """The last occurrence of each n-gram of a token sequence, and all occurrences of the longest n-grams."""

    context: TextContext
    sizes: range
    tokens: list[int] = field(default_factory=list)
    last_ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Maps each n-gram to the index after its last occurrence."""
    previous_ends: dict[int, int] = field(default_factory=dict)
    """Maps the end of each repeated n-gram of the maximum size to the end of its previous occurrence."""

    def extend(self, tokens: list[int]) -> None:
        """Add tokens.

        An n-gram is indexed only when a token follows it, so the last n-gram never matches itself.
        """
        sequence, last_ends, max_size = self.tokens, self.last_ends, self.sizes[-1]
        for token in tokens:
            end = len(sequence)
            for size in self.sizes:
                if size > end:
                    break
                ngram = tuple(sequence[end - size :])
                if size == max_size and ngram in last_ends:
                    self.previous_ends[end] = last_ends[ngram]
                last_ends[ngram] = end
            sequence.append(token)

    def continuation(self, num_tokens: int) -> list[int]:
        """Return the ``num_tokens`` tokens after the best match; empty without a match.

        If fewer tokens follow the match, these tokens are repeated.
        """
        start = self._best_match()
        if start is None:
            return []
        drafts: list[int] = []
        sequence, length = self.tokens, len(self.tokens)
        for index in range(start, start + num_tokens):
            drafts.append(sequence[index] if index < length else drafts[index - length])
        return drafts

    def _best_match(self) -> int | None:
        """Return the index after the best earlier occurrence of the last tokens; None without a match."""
        for size in reversed(self.sizes):
            end = self.last_ends.get(tuple(self.tokens[-size:])) if size <= len(self.tokens) else None
            if end is not None:
                return self._longest_match(end) if size == self.sizes[-1] else end
        return None

    def _longest_match(self, end: int) -> int:
        """Return the end of the longest match among the occurrence at ``end`` and up to 7 earlier ones."""
        best_end, best_length = end, self._match_length(end)
        for _ in range(_MAX_CANDIDATES - 1):
            previous_end = self.previous_ends.get(end)
            if previous_end is None or best_length >= _MAX_MATCH:
                break
            end, length = previous_end, self._match_length(previous_end)
            if length > best_length:
                best_end, best_length = end, length
        return best_end

    def _match_length(self, match_end: int) -> int:
        """Return how many tokens before index ``match_end`` equal the last tokens of the sequence."""
        sequence, end, count = self.tokens, len(self.tokens), 0
        max_count = min(match_end, _MAX_MATCH)
        while count < max_count and sequence[match_end - 1 - count] == sequence[end - 1 - count]:
            count += 1
        return count
