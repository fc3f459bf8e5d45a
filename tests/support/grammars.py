"""Contexts with a grammar for `FakeTokenizer`, whose tokens are bytes."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from penstock.config import StructuredOutputConfig
from penstock.grammar import GrammarCompiler
from penstock.pipelines.core import Grammar, TextContext
from penstock.testing import FakeTokenizer

EOS = FakeTokenizer.EOS


def new_compiler(**config: Any) -> GrammarCompiler:
    return GrammarCompiler(FakeTokenizer(), EOS + 1, config=StructuredOutputConfig(**config))


def make_grammar_context(kind: str, text: Any = "", *, generated: bytes = b"", **fields: Any) -> TextContext:
    grammar = Grammar(kind, text if isinstance(text, str) else json.dumps(text))  # type: ignore[arg-type]
    fields.setdefault("eos_token_ids", {EOS})
    context = TextContext(prompt=[1], max_length=500, tokens=np.array([1]), grammar=grammar, **fields)
    for token in generated:
        context.update(token)
    return context


def wait_until_ready(grammars: GrammarCompiler, context: TextContext) -> TextContext:
    deadline = time.monotonic() + 60
    while not grammars.ready(context):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return context
