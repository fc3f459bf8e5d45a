"""Bad words as sequences of tokens that must not be generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.text.token_bytes import BYTE_LEVEL
from penstock.text.tokenizer import TextTokenizer

MAX_SEQUENCES = 1024
"""Of all words of a request together, besides the tokens that the tokenizer writes for each."""
MAX_SEQUENCES_OF_WORD = 128
_MAX_WORD = 64
"""Bytes; of a longer word the tokenizer's own tokens alone are banned."""
_MAX_PIECE = 16
_MAX_STATES = 4096
_SHOWN = {byte: character for character, byte in BYTE_LEVEL.items()}


def banned_sequences(words: Sequence[str] | None, tokenizer: TextTokenizer) -> list[list[int]] | None:
    """Return the sequences of tokens that write one of the words, or a space and the word.

    The tokenizer's own tokens come first. A model can write the same text in other tokens, so other ways are
    banned too, the shortest ones first, up to the limits of this module.
    """
    if not words:
        return None
    texts = dict.fromkeys(text for word in words for text in (word, " " + word.lstrip()))
    room = min(MAX_SEQUENCES_OF_WORD, MAX_SEQUENCES // len(texts))
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        found[tuple(tokenizer.encode_text(text, False, limited=False).tolist())] = None
        found.update(dict.fromkeys(_ways(text.encode(errors="replace"), tokenizer, room)))
    return [list(ids) for ids in found if ids]


def _ways(text: bytes, tokenizer: TextTokenizer, most: int) -> list[tuple[int, ...]]:
    """Return the ways to write a text in tokens, those of few tokens first."""
    if len(text) > _MAX_WORD:
        return []
    edges = [_pieces(text, start, tokenizer) for start in range(len(text))]
    ends = {len(text)}  # places from which the end can be reached
    for start in reversed(range(len(text))):
        if any(end in ends for end, _ in edges[start]):
            ends.add(start)
    ways: list[tuple[int, ...]] = []
    states: deque[tuple[int, tuple[int, ...]]] = deque([(0, ())])
    num_states = 1
    while states and len(ways) < most:
        place, ids = states.popleft()
        if place == len(text):
            ways.append(ids)
            continue
        for end, token_id in edges[place]:
            if end in ends and num_states < _MAX_STATES:
                num_states += 1
                states.append((end, (*ids, token_id)))
    return ways


def _pieces(text: bytes, start: int, tokenizer: TextTokenizer) -> list[tuple[int, int]]:
    """Return the tokens that go on with a text from some place: where they end, and their ids."""
    found = []
    for end in range(start + 1, min(len(text), start + _MAX_PIECE) + 1):
        piece = text[start:end]
        names = {"".join(_SHOWN[byte] for byte in piece), f"<0x{piece[0]:02X}>" if len(piece) == 1 else ""}
        plain = piece.decode(errors="replace")
        names |= {plain, plain.replace(" ", "▁")}
        ids = {tokenizer.backend.token_to_id(name) for name in names if name}
        found += [
            (end, token_id)
            for token_id in sorted(one for one in ids if one is not None)
            if token_id < tokenizer.vocab_size and tokenizer.token_bytes(token_id) == piece
        ]
    return found
