"""Translate bad words to token sequences that must not be generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.text.token_bytes import BYTE_LEVEL
from penstock.text.tokenizer import TextTokenizer

MAX_SEQUENCES = 1024
"""Maximum number of banned sequences of a request, besides the tokenizer's own encoding of each word."""
MAX_SEQUENCES_OF_WORD = 128
_MAX_WORD = 64
"""Maximum length of a word in bytes. For a longer word, only the tokenizer's own encoding is banned."""
_MAX_PIECE = 16
_MAX_STATES = 4096
_SHOWN = {byte: character for character, byte in BYTE_LEVEL.items()}


def banned_sequences(words: Sequence[str] | None, tokenizer: TextTokenizer) -> list[list[int]] | None:
    """Return the token sequences whose text is one of the words, or a space and the word.

    The tokenizer's own encoding of each word comes first. A model can write the same text with other tokens,
    so other encodings are banned too, the shortest first, up to the limits of this module.
    """
    if not words:
        return None
    texts = dict.fromkeys(text for word in words for text in (word, " " + word.lstrip()))
    limit = min(MAX_SEQUENCES_OF_WORD, MAX_SEQUENCES // len(texts))
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        found[tuple(tokenizer.encode_text(text, False, limited=False).tolist())] = None
        found.update(dict.fromkeys(_encodings(text.encode(errors="replace"), tokenizer, limit)))
    return [list(ids) for ids in found if ids]


def _encodings(text: bytes, tokenizer: TextTokenizer, limit: int) -> list[tuple[int, ...]]:
    """Return up to `limit` token sequences that write a text, the shortest first."""
    if len(text) > _MAX_WORD:
        return []
    edges = [_tokens_at(text, start, tokenizer) for start in range(len(text))]
    ends = {len(text)}  # positions from which the end of the text can be reached
    for start in reversed(range(len(text))):
        if any(end in ends for end, _ in edges[start]):
            ends.add(start)
    found: list[tuple[int, ...]] = []
    states: deque[tuple[int, tuple[int, ...]]] = deque([(0, ())])
    num_states = 1
    while states and len(found) < limit:
        position, ids = states.popleft()
        if position == len(text):
            found.append(ids)
            continue
        for end, token_id in edges[position]:
            if end in ends and num_states < _MAX_STATES:
                num_states += 1
                states.append((end, (*ids, token_id)))
    return found


def _tokens_at(text: bytes, start: int, tokenizer: TextTokenizer) -> list[tuple[int, int]]:
    """Return the tokens that match the text at position `start`, as pairs (end position, token id)."""
    found = []
    for end in range(start + 1, min(len(text), start + _MAX_PIECE) + 1):
        piece = text[start:end]
        names = {"".join(_SHOWN[byte] for byte in piece), f"<0x{piece[0]:02X}>" if len(piece) == 1 else ""}
        plain = piece.decode(errors="replace")
        names |= {plain, plain.replace(" ", "▁")}
        ids = {tokenizer.backend.token_to_id(name) for name in names if name}
        found += [
            (end, token_id)
            for token_id in sorted(token for token in ids if token is not None)
            if token_id < tokenizer.vocab_size and tokenizer.token_bytes(token_id) == piece
        ]
    return found
