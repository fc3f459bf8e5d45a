"""The bytes of each token of a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NotRequired, Required, TypedDict

from tokenizers import Tokenizer

from penstock.errors import UnsupportedFeatureError
from penstock.text.token_bytes import BYTE_OF_CHARACTER

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each token id below ``vocab_size`` adds in the middle of a text.

    The bytes of special tokens begin with `NO_TEXT`, so that special tokens never match text. Ids without a
    token have no bytes.

    Raises:
        UnsupportedFeatureError: the bytes of the tokens do not concatenate to the text, as with WordPiece.
    """
    token_reader = _token_reader(json.loads(tokenizer.to_str()))
    added_tokens = tokenizer.get_added_tokens_decoder()
    result = [b""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            continue
        if token_id in added_tokens:
            content = added_tokens[token_id].content.encode()
            result[token_id] = NO_TEXT + content if added_tokens[token_id].special else content
        else:
            result[token_id] = token_reader(token)
    return result


NO_TEXT = b"\xff"
"""A byte that UTF-8 text never contains."""


class _Component(TypedDict, total=False):
    """A decoder, or the model, of ``tokenizer.json``."""

    type: Required[str]
    decoders: list[_Component]
    pattern: object
    byte_fallback: bool


class _Description(TypedDict):
    """The members of ``tokenizer.json`` that this module reads."""

    decoder: NotRequired[_Component | None]
    model: _Component


def _token_reader(description: _Description) -> Callable[[str], bytes]:
    decoder_types = [decoder["type"] for decoder in _decoders(description.get("decoder"))]
    if "ByteLevel" in decoder_types:
        return _read_byte_level
    if description["model"].get("byte_fallback") or "ByteFallback" in decoder_types:
        return _read_byte_fallback
    if "Metaspace" in decoder_types or any(
        decoder.get("pattern") == {"String": "▁"} for decoder in _decoders(description.get("decoder"))
    ):
        return _read_metaspace
    decoder_names = ", ".join(decoder_types) or "none"
    raise UnsupportedFeatureError(
        "structured output with this tokenizer",
        f"the bytes of its tokens do not concatenate to the text (decoder: {decoder_names})",
    )


def _decoders(component: _Component | None) -> list[_Component]:
    if component is None:
        return []
    return list(component["decoders"]) if component["type"] == "Sequence" else [component]


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # a character outside the byte alphabet: decoders return the token as text
        return token.encode()


def _read_byte_fallback(token: str) -> bytes:
    name = _BYTE_NAME.fullmatch(token)
    return bytes([int(name[1], 16)]) if name else _read_metaspace(token)


def _read_metaspace(token: str) -> bytes:
    return token.replace("▁", " ").encode()
