"""The bytes that each token stands for, read off a tokenizer without transformers."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from penstock.errors import UnsupportedFeatureError

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of every token id below ``vocab_size``, as they stand in the middle of a text.

    Special tokens, which a detokenizer leaves out, begin with a byte that no text has, so that they never
    spell a part of one. Ids without a token have no bytes.

    Raises:
        UnsupportedFeatureError: the tokens do not join to text byte by byte, as those of WordPiece.
    """
    read = _reader(json.loads(tokenizer.to_str()))
    added = tokenizer.get_added_tokens_decoder()
    result = [b""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            continue
        if token_id in added:
            content = added[token_id].content.encode()
            result[token_id] = NO_TEXT + content if added[token_id].special else content
        else:
            result[token_id] = read(token)
    return result


NO_TEXT = b"\xff"
"""No UTF-8 text has this byte."""


def _reader(description: dict[str, Any]) -> Any:
    kinds = [decoder["type"] for decoder in _parts(description.get("decoder"), "decoders")]
    if "ByteLevel" in kinds:
        return _read_byte_level
    if description["model"].get("byte_fallback") or "ByteFallback" in kinds:
        return _read_byte_fallback
    if "Metaspace" in kinds or any(
        decoder.get("pattern") == {"String": "▁"}
        for decoder in _parts(description.get("decoder"), "decoders")
    ):
        return _read_metaspace
    raise UnsupportedFeatureError(
        "structured output with this tokenizer",
        f"its tokens do not join to text byte by byte (decoder: {', '.join(kinds) or 'none'})",
    )


def _parts(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    return list(component[name]) if component["type"] == "Sequence" else [component]


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[letter] for letter in token)
    except KeyError:  # decoders then take the whole token as it is
        return token.encode()


def _read_byte_fallback(token: str) -> bytes:
    name = _BYTE_NAME.fullmatch(token)
    return bytes([int(name[1], 16)]) if name else _read_metaspace(token)


def _read_metaspace(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others begin at U+0100."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = (byte for byte in range(256) if byte not in shown)
    letters = {chr(256 + index): byte for index, byte in enumerate(hidden)}
    return letters | {chr(byte): byte for byte in shown}


_BYTES = _byte_letters()
