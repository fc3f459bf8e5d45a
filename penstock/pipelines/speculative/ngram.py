"""Drafts looked up in the text itself: what followed the last time the text read like this.

Texts that quote, edit or summarise their prompt repeat long runs of it (prompt lookup decoding, A. Saxena
2023). Nothing is computed but a few dictionary look-ups a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.pipelines.core import TextContext

_CHAIN = 8
"""Earlier places of the same longest n-gram that are compared for the longest match."""
_MAX_MATCH = 32
"""Tokens; a longer match says no more."""


class NGramProposer:
    """Finds the longest end of a context that stands in it before, and drafts what followed there.

    Args:
        least: tokens that must match at least.
        most: longest n-gram that is indexed; of several places with it, the one that matches furthest back
            is taken, of equals the latest.
    """

    def __init__(self, least: int = 2, most: int = 4) -> None:
        assert 1 <= least <= most, f"n-grams of {least} to {most} tokens"
        self._sizes = range(least, most + 1)
        self._indexes: dict[str, _Index] = {}

    def propose(self, contexts: Sequence[TextContext], rooms: Sequence[int]) -> list[list[int]]:
        return [
            self._index(context).continuation(room) if room > 0 else []
            for context, room in zip(contexts, rooms, strict=True)
        ]

    def observe(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], accepted: Sequence[int]
    ) -> None:
        return  # the next proposal reads the new tokens from the context

    def release(self, context: TextContext) -> None:
        self._indexes.pop(context.request_id, None)

    def _index(self, context: TextContext) -> _Index:
        """The context's index with all its tokens; made anew where tokens were taken back."""
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
    """Where each n-gram of a text stood last; kept up token by token."""

    context: TextContext
    sizes: range
    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> index behind it
    earlier: dict[int, int] = field(default_factory=dict)  # of the longest: index behind it -> the one before

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens. An n-gram is entered once something follows it: the end must not find itself."""
        text, places, longest = self.tokens, self.places, self.sizes[-1]
        for token in tokens:
            end = len(text)
            for size in self.sizes:
                if size > end:
                    break
                key = tuple(text[end - size :])
                if size == longest and key in places:
                    self.earlier[end] = places[key]
                places[key] = end
            text.append(token)

    def continuation(self, count: int) -> list[int]:
        """The ``count`` tokens that followed the best place; they may run on into themselves."""
        place = self._best_place()
        if place is None:
            return []
        drafts: list[int] = []
        text, length = self.tokens, len(self.tokens)
        for index in range(place, place + count):
            drafts.append(text[index] if index < length else drafts[index - length])
        return drafts

    def _best_place(self) -> int | None:
        for size in reversed(self.sizes):
            place = self.places.get(tuple(self.tokens[-size:])) if size <= len(self.tokens) else None
            if place is not None:
                return self._furthest_back(place) if size == self.sizes[-1] else place
        return None

    def _furthest_back(self, place: int) -> int:
        best, longest = place, self._match(place)
        for _ in range(_CHAIN - 1):
            earlier = self.earlier.get(place)
            if earlier is None or longest >= _MAX_MATCH:
                break
            place, match = earlier, self._match(earlier)
            if match > longest:
                best, longest = place, match
        return best

    def _match(self, place: int) -> int:
        """How many tokens before ``place`` are those at the end."""
        text, end, count = self.tokens, len(self.tokens), 0
        while count < min(place, _MAX_MATCH) and text[place - 1 - count] == text[end - 1 - count]:
            count += 1
        return count
