"""Stop strings -> runs of tokens that spell them, for code that matches tokens and not text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

_BEFORE = ["", " ", "\n", "\t", "a", "A", "1", "é", "中", *".,;:!?)]}>\"'`-*_"]
_AFTER = ["", " ", "\n", "a", "."]


def stop_sequences(
    stop: str,
    encode: Callable[[list[str]], list[list[int]]],
    token_bytes: Callable[[int], bytes],
) -> list[list[int]]:
    """Runs of tokens that spell a stop string, as the tokenizer writes it at different places of a text.

    The string stands alone, behind a space, behind letters and marks, and before them: a tokenizer joins it
    with some of its neighbours (``".\\n\\n"`` is one token of many). Every run but the first, which is the
    string encoded by itself, has the string in its text, so that none ends an output too soon. A model can
    spell the same text in still other tokens, which are missed.

    Args:
        stop: the stop string, not empty.
        encode: texts to token ids, without special tokens around them.
        token_bytes: what a token writes in the middle of a text.
    """
    alone, *others = encode([before + stop + after for before in _BEFORE for after in _AFTER])
    target = stop.encode(errors="replace")
    runs = [_shortest_run(alone, target, token_bytes) or alone]
    runs += [_shortest_run(ids, target, token_bytes) or [] for ids in others]
    return [list(run) for run in dict.fromkeys(map(tuple, runs)) if run]


def _shortest_run(ids: Sequence[int], target: bytes, token_bytes: Callable[[int], bytes]) -> list[int] | None:
    """The first tokens in a row whose text has ``target``; None where the tokenizer has rewritten it."""
    pieces = [token_bytes(token_id) for token_id in ids]
    first = b"".join(pieces).find(target)
    if first < 0:
        return None
    ends = list(accumulate(map(len, pieces)))  # of each token, in bytes
    return list(ids[bisect_right(ends, first) : bisect_left(ends, first + len(target)) + 1])
