"""Translates the request field ``bad_words`` to token sequences that must not be generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.text.token_bytes import BYTE_OF_CHARACTER
from penstock.text.tokenizer import TextTokenizer

MAX_SEQUENCES = 1024
"""Maximum number of banned sequences per request. The tokenizer's encodings of the words do not count."""
MAX_SEQUENCES_PER_WORD = 128
"""Maximum number of sequences per form of a word. The forms are the word itself and the word after a space.
"""
_MAX_WORD_BYTES = 64
"""Maximum length of a form in bytes. For a longer form, only the tokenizer's encoding is banned."""
_MAX_TOKEN_BYTES = 16
"""Maximum length in bytes of the tokens that the search uses."""
_MAX_PARTIAL_SEQUENCES = 4096
"""Maximum number of partial token sequences that the search creates for one form."""
_BYTE_CHARACTERS = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def banned_sequences(words: Sequence[str] | None, tokenizer: TextTokenizer) -> list[list[int]] | None:
    """Return token sequences that decode to one of the words, or to a space and one of the words.

    The result contains the tokenizer's encoding of both forms of each word. A model can generate the same
    text with other tokens. The result therefore also contains other encodings, up to the limits of this
    module. Encodings with few tokens take precedence. Returns None if `words` is None or empty.
    """
    if not words:
        return None
    texts = dict.fromkeys(text for word in words for text in (word, " " + word.lstrip()))
    max_encodings = min(MAX_SEQUENCES_PER_WORD, MAX_SEQUENCES // len(texts))
    sequences: dict[tuple[int, ...], None] = {}
    for text in texts:
        sequences[tuple(tokenizer.encode_text(text, False, limited=False).tolist())] = None
        sequences.update(dict.fromkeys(_encodings(text.encode(errors="replace"), tokenizer, max_encodings)))
    return [list(ids) for ids in sequences if ids]


def _encodings(text: bytes, tokenizer: TextTokenizer, max_encodings: int) -> list[tuple[int, ...]]:
    """Return up to `max_encodings` token sequences that decode to `text`, those with the fewest tokens first.

    The result is empty if `text` is longer than `_MAX_WORD_BYTES`.
    """
    if len(text) > _MAX_WORD_BYTES:
        return []
    tokens_by_start = [_tokens_at(text, start, tokenizer) for start in range(len(text))]
    reachable_positions = {len(text)}  # positions from which a token sequence leads to the end of the text
    for start in reversed(range(len(text))):
        if any(end in reachable_positions for end, _ in tokens_by_start[start]):
            reachable_positions.add(start)
    sequences: list[tuple[int, ...]] = []
    partial_sequences: deque[tuple[int, tuple[int, ...]]] = deque([(0, ())])
    num_partial = 1
    while partial_sequences and len(sequences) < max_encodings:
        position, ids = partial_sequences.popleft()
        if position == len(text):
            sequences.append(ids)
            continue
        for end, token_id in tokens_by_start[position]:
            if end in reachable_positions and num_partial < _MAX_PARTIAL_SEQUENCES:
                num_partial += 1
                partial_sequences.append((end, (*ids, token_id)))
    return sequences


def _tokens_at(text: bytes, start: int, tokenizer: TextTokenizer) -> list[tuple[int, int]]:
    """Return the tokens that match the text at position `start`, as pairs (end position, token id)."""
    matches = []
    for end in range(start + 1, min(len(text), start + _MAX_TOKEN_BYTES) + 1):
        token_text = text[start:end]
        vocabulary_strings = {
            "".join(_BYTE_CHARACTERS[byte] for byte in token_text),
            f"<0x{token_text[0]:02X}>" if len(token_text) == 1 else "",
        }
        decoded_text = token_text.decode(errors="replace")
        vocabulary_strings |= {decoded_text, decoded_text.replace(" ", "▁")}
        ids = {tokenizer.backend.token_to_id(string) for string in vocabulary_strings if string}
        matches += [
            (end, token_id)
            for token_id in sorted(token for token in ids if token is not None)
            if token_id < tokenizer.vocab_size and tokenizer.token_bytes(token_id) == token_text
        ]
    return matches
