"""Converts stop strings to token sequences, for callers that match tokens instead of text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from penstock.text.valid_unicode import valid_unicode

_BEFORE = ["", " ", "\n", "\t", "a", "A", "1", "é", "中", *".,;:!?)]}>\"'`-*_"]
_AFTER = ["", " ", "\n", "a", "."]
_MAX_CACHED_STOPS = 1024


def stop_sequences(
    stop: str,
    encode: Callable[[list[str]], list[list[int]]],
    token_bytes: Callable[[int], bytes],
) -> list[list[int]]:
    """Return the token sequences that usually spell a stop string.

    A tokenizer merges a string with adjacent characters (``".\\n\\n"`` is one token in many vocabularies).
    Therefore the string is encoded without neighbours, and with spaces, letters and punctuation before and
    after it. The first sequence is that of the string without neighbours. The text of every other sequence
    contains the string, so none of them ends an output too early. A model can spell the string with further
    token sequences, which are missed.

    Args:
        stop: the stop string, not empty.
        encode: converts texts to token ids, without adding special tokens.
        token_bytes: returns the bytes that a token adds in the middle of a text.
    """
    isolated, *in_context = encode([before + stop + after for before in _BEFORE for after in _AFTER])
    target = stop.encode(errors="replace")
    sequences = [_shortest_sequence(isolated, target, token_bytes) or isolated]
    sequences += [_shortest_sequence(ids, target, token_bytes) or [] for ids in in_context]
    return [list(ids) for ids in dict.fromkeys(map(tuple, sequences)) if ids]


class StopSequenceCache:
    """The token sequences of stop strings, kept for later requests.

    Args:
        encode: converts texts to token ids, without adding special tokens.
        token_bytes: returns the bytes that a token adds in the middle of a text.
    """

    def __init__(
        self, encode: Callable[[list[str]], list[list[int]]], token_bytes: Callable[[int], bytes]
    ) -> None:
        self._encode = encode
        self._token_bytes = token_bytes
        self._sequences: dict[str, list[list[int]]] = {}

    def of(self, stops: Iterable[str]) -> list[list[int]]:
        """Return the token sequences of all stop strings, see `stop_sequences`."""
        return [list(ids) for stop in stops for ids in self._sequences_of(stop)]

    def _sequences_of(self, stop: str) -> list[list[int]]:
        cached = self._sequences.get(stop)
        if cached is None:
            if len(self._sequences) >= _MAX_CACHED_STOPS:
                self._sequences.clear()
            cached = stop_sequences(valid_unicode(stop), self._encode, self._token_bytes)
            self._sequences[stop] = cached
        return cached


def _shortest_sequence(
    ids: Sequence[int], target: bytes, token_bytes: Callable[[int], bytes]
) -> list[int] | None:
    """Return the tokens that cover the first occurrence of ``target``; None if normalisation changed it."""
    pieces = [token_bytes(token_id) for token_id in ids]
    first = b"".join(pieces).find(target)
    if first < 0:
        return None
    ends = list(accumulate(map(len, pieces)))  # byte offset of the end of each token
    return list(ids[bisect_right(ends, first) : bisect_left(ends, first + len(target)) + 1])
