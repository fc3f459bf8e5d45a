"""Determines the bytes that a single token adds to a text."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer


def find_byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Return token id -> byte of byte fallback tokens (``<0xE2>``); empty without byte fallback."""
    named_tokens = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    tokens = {token_id: byte for token_id, byte in named_tokens if token_id is not None}
    for token_id, byte in tokens.items():
        # In some vocabularies, tokens with such names are ordinary text for the decoder.
        is_byte_token = tokenizer.decode([token_id]) == bytes([byte]).decode(errors="replace")
        return tokens if is_byte_token else {}
    return {}


def single_token_bytes(tokenizer: Tokenizer, token_id: int, byte_tokens: Mapping[int, int]) -> bytes:
    """Return the bytes that a token adds in the middle of a text; empty for an unknown id.

    Args:
        tokenizer: the tokenizer.
        token_id: the token. It may be special, and its bytes may be part of a character.
        byte_tokens: the result of `find_byte_tokens`.
    """
    if token_id in byte_tokens:
        return bytes([byte_tokens[token_id]])
    token_text = tokenizer.id_to_token(token_id)
    if token_text is None:
        return b""
    # The token is decoded after another token, because decoders strip a leading space.
    ids_before = tokenizer.encode("a", add_special_tokens=False).ids
    start = len(tokenizer.decode(ids_before, skip_special_tokens=False))
    text = tokenizer.decode([*ids_before, token_id], skip_special_tokens=False)[start:]
    if "\N{REPLACEMENT CHARACTER}" in text and all(
        character in BYTE_OF_CHARACTER for character in token_text
    ):
        return bytes(BYTE_OF_CHARACTER[character] for character in token_text)
    return text.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return character -> byte. A printable byte has its Latin-1 character; others have U+0100 and above."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    unprintable = sorted(set(range(256)).difference(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


BYTE_OF_CHARACTER = _byte_level_alphabet()
"""Character of the byte-level BPE alphabet -> byte."""
