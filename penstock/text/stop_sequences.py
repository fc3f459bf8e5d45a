"""Converts stop strings to token sequences, for callers that match tokens instead of text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from penstock.text.valid_unicode import valid_unicode

_TEXTS_BEFORE = ["", " ", "\n", "\t", "a", "A", "1", "é", "中", *".,;:!?)]}>\"'`-*_"]
_TEXTS_AFTER = ["", " ", "\n", "a", "."]
_MAX_CACHED_STOPS = 1024


def stop_sequences(
    stop: str,
    encode: Callable[[list[str]], list[list[int]]],
    token_bytes: Callable[[int], bytes],
) -> list[list[int]]:
    """Return the token sequences that usually spell a stop string.

    A tokenizer can merge a string with adjacent characters (``".\\n\\n"`` is one token in many vocabularies).
    Therefore the string is encoded alone, and with white space, letters, a digit or punctuation next to it.
    The first result is the sequence of the string alone. The text of every other sequence contains the
    string. A model may generate the string as other token sequences, which are not included.

    Args:
        stop: the stop string, not empty.
        encode: converts texts to token ids, without adding special tokens.
        token_bytes: returns the bytes that a token adds in the middle of a text.
    """
    ids_alone, *ids_in_contexts = encode(
        [text_before + stop + text_after for text_before in _TEXTS_BEFORE for text_after in _TEXTS_AFTER]
    )
    target = stop.encode(errors="replace")
    sequences = [_shortest_sequence(ids_alone, target, token_bytes) or ids_alone]
    sequences += [_shortest_sequence(ids, target, token_bytes) or [] for ids in ids_in_contexts]
    return [list(ids) for ids in dict.fromkeys(map(tuple, sequences)) if ids]


class StopSequenceCache:
    """A cache of the token sequences of stop strings.

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

    def sequences(self, stops: Iterable[str]) -> list[list[int]]:
        """Return the token sequences of all stop strings (see `stop_sequences`)."""
        return [list(ids) for stop in stops for ids in self._cached_sequences(stop)]

    def _cached_sequences(self, stop: str) -> list[list[int]]:
        sequences = self._sequences.get(stop)
        if sequences is None:
            if len(self._sequences) >= _MAX_CACHED_STOPS:
                self._sequences.clear()
            sequences = stop_sequences(valid_unicode(stop), self._encode, self._token_bytes)
            self._sequences[stop] = sequences
        return sequences


def _shortest_sequence(
    ids: Sequence[int], target: bytes, token_bytes: Callable[[int], bytes]
) -> list[int] | None:
    """Return the tokens whose bytes overlap the first occurrence of ``target``; None if it does not occur."""
    byte_strings = [token_bytes(token_id) for token_id in ids]
    start = b"".join(byte_strings).find(target)
    if start < 0:
        return None
    end_offsets = list(accumulate(map(len, byte_strings)))  # byte offset of the end of each token
    return list(ids[bisect_right(end_offsets, start) : bisect_left(end_offsets, start + len(target)) + 1])
