"""N-gram drafts: the tokens that followed an earlier occurrence of the last tokens.

Texts that quote, edit or summarise their prompt repeat long parts of it (prompt lookup decoding, A. Saxena
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
        max_size: longest n-gram that is indexed. Among several occurrences, the longest match is used, and
            among equal matches the latest.
    """

    def __init__(self, min_size: int = 2, max_size: int = 4) -> None:
        assert 1 <= min_size <= max_size, f"n-grams of {min_size} to {max_size} tokens"
        self._sizes = range(min_size, max_size + 1)
        self._indexes: dict[str, _Index] = {}

    def propose(self, contexts: Sequence[TextContext], limits: Sequence[int]) -> list[list[int]]:
        return [
            self._index(context).continuation(limit) if limit > 0 else []
            for context, limit in zip(contexts, limits, strict=True)
        ]

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        return  # the next proposal reads the new tokens from the context

    def release(self, context: TextContext) -> None:
        self._indexes.pop(context.request_id, None)

    def discard_cache(self) -> None:
        return

    def _index(self, context: TextContext) -> _Index:
        """Return the up-to-date index of a context. Build a new one if tokens were rolled back."""
        index = self._indexes.get(context.request_id)
        known = 0 if index is None else len(index.tokens)
        tokens = context.all_tokens
        if (
            index is None
            or index.context is not context
            or known > len(tokens)
            or (known and index.tokens[-1] != tokens[known - 1])
        ):
            index = self._indexes[context.request_id] = _Index(context, self._sizes)
            known = 0
        index.extend(tokens[known:].tolist())
        return index


@dataclass(slots=True)
class _Index:
    """The last occurrence of each n-gram of a text, updated token by token."""

    context: TextContext
    sizes: range
    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram to the index after it
    earlier: dict[int, int] = field(default_factory=dict)  # longest n-gram: end -> its previous end

    def extend(self, tokens: list[int]) -> None:
        """Add tokens.

        An n-gram is indexed only when a token follows it, so the last n-gram never matches itself.
        """
        text, ends, longest = self.tokens, self.ends, self.sizes[-1]
        for token in tokens:
            end = len(text)
            for size in self.sizes:
                if size > end:
                    break
                key = tuple(text[end - size :])
                if size == longest and key in ends:
                    self.earlier[end] = ends[key]
                ends[key] = end
            text.append(token)

    def continuation(self, count: int) -> list[int]:
        """Return the ``count`` tokens after the best match. If the text ends, drafted tokens are repeated."""
        start = self._best_match()
        if start is None:
            return []
        drafts: list[int] = []
        text, length = self.tokens, len(self.tokens)
        for index in range(start, start + count):
            drafts.append(text[index] if index < length else drafts[index - length])
        return drafts

    def _best_match(self) -> int | None:
        for size in reversed(self.sizes):
            end = self.ends.get(tuple(self.tokens[-size:])) if size <= len(self.tokens) else None
            if end is not None:
                return self._longest_match(end) if size == self.sizes[-1] else end
        return None

    def _longest_match(self, end: int) -> int:
        best, longest = end, self._match(end)
        for _ in range(_MAX_CANDIDATES - 1):
            earlier = self.earlier.get(end)
            if earlier is None or longest >= _MAX_MATCH:
                break
            end, match = earlier, self._match(earlier)
            if match > longest:
                best, longest = end, match
        return best

    def _match(self, other: int) -> int:
        """Return how many tokens before index ``other`` equal the last tokens of the text."""
        text, end, count = self.tokens, len(self.tokens), 0
        while count < min(other, _MAX_MATCH) and text[other - 1 - count] == text[end - 1 - count]:
            count += 1
        return count
