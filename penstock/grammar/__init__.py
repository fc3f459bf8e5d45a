"""Structured output: schemas, regular expressions and choices to grammars, and grammars to token bitmasks.

`schema` turns what a request gives into EBNF and loads no torch. `compiler` compiles grammars in a thread,
and `masks` reads from a context's matcher which tokens are allowed, forced or acceptable as drafts. The names
below are loaded on first use: importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.grammar.compiler import GrammarCompiler
    from penstock.grammar.masks import acceptable_drafts, forced_tokens, going_ahead, grammar_bitmask

__all__ = ["GrammarCompiler", "acceptable_drafts", "forced_tokens", "going_ahead", "grammar_bitmask"]

_HOMES = {
    "GrammarCompiler": "penstock.grammar.compiler",
    "acceptable_drafts": "penstock.grammar.masks",
    "forced_tokens": "penstock.grammar.masks",
    "going_ahead": "penstock.grammar.masks",
    "grammar_bitmask": "penstock.grammar.masks",
}


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
