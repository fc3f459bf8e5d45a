"""llguidance over an alphabet of single bytes and special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance

from penstock.grammar.lark import lark_text, read_ebnf, read_structural_tag
from penstock.grammar.schema import GrammarSource

END_TOKEN = 256


class _ByteTokenizer:
    """A tokenizer for llguidance: 256 bytes, an end token, and special tokens from id 257."""

    bos_token_id = None

    def __init__(self, special_tokens: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [b"\xff" + name.encode() for name in ("<end>", *special_tokens)]
        self.eos_token_id = END_TOKEN
        self.special_token_ids = list(range(END_TOKEN, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def make_byte_tokenizer(special_tokens: tuple[str, ...] = ()) -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokenizer(special_tokens)))


def match_lark(lark: str, special_tokens: tuple[str, ...] = ()) -> Any:
    text = '%llguidance {"no_forcing": true}\n' + lark
    matcher = llguidance.LLMatcher(make_byte_tokenizer(special_tokens), text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@cache
def match_source(source: GrammarSource, special_tokens: tuple[str, ...] = ()) -> Any:
    read_rules = read_structural_tag if source.notation == "structural_tag" else read_ebnf
    return match_lark(lark_text(read_rules(source.text)), special_tokens)


def accepts(matcher: Any, tokens: Sequence[int]) -> bool:
    """Return whether the tokens are a complete output."""
    matcher = matcher.deep_copy()
    return matcher.try_consume_tokens(list(tokens)) == len(tokens) and bool(matcher.is_accepting())
