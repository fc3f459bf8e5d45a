"""Grammars over a vocabulary of single bytes, which show what texts a grammar accepts and generates."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch
import xgrammar as xgr

END_TOKEN = 256
_CLOSERS = [ord(letter) for letter in '"]}']


@cache
def _compiler() -> xgr.GrammarCompiler:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    info = xgr.TokenizerInfo(tokens, xgr.VocabType.RAW, vocab_size=257, stop_token_ids=[END_TOKEN])
    return xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compile_grammar(ebnf: str) -> xgr.CompiledGrammar:
    return _compiler().compile_grammar(ebnf)


def accepts(grammar: xgr.CompiledGrammar, text: str) -> bool:
    matcher = xgr.GrammarMatcher(grammar)
    return all(map(matcher.accept_token, text.encode())) and matcher.is_completed()


def generate_random_text(grammar: xgr.CompiledGrammar, seed: int, soft_limit: int = 60) -> str:
    """Return a random text of the grammar.

    After `soft_limit` bytes, the text ends as soon as the grammar allows the end. If the grammar does not
    allow the end yet, closing quotes and brackets are preferred.
    """
    random_choices = random.Random(seed)
    matcher = xgr.GrammarMatcher(grammar)
    mask = torch.empty((1, 9), dtype=torch.int32)
    output_bytes = bytearray()
    while True:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        allowed_ids = np.flatnonzero(bits[:257]).tolist()  # ignore the padding of the last word
        assert allowed_ids, f"no byte is allowed after {bytes(output_bytes)!r}"
        token = random_choices.choice(allowed_ids)
        if len(output_bytes) > soft_limit:
            closers = [byte for byte in _CLOSERS if byte in allowed_ids]
            if END_TOKEN in allowed_ids:
                token = END_TOKEN
            elif closers and random_choices.random() < 0.8:
                token = random_choices.choice(closers)
        assert len(output_bytes) < 5000, f"the text does not end: {bytes(output_bytes)[:200]!r}"
        if token == END_TOKEN:
            return output_bytes.decode()
        assert matcher.accept_token(token)
        output_bytes.append(token)
