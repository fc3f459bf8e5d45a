"""Structured output: converts schemas, regular expressions and choices to grammars, and computes token masks.

`schema` converts the output format of a request to EBNF and does not import torch. `compiler` compiles
grammars in threads. `masks` computes from the matcher of a context which tokens are allowed, which tokens are
forced, and which draft tokens are acceptable. The names below are imported on first use, so importing this
package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.grammar.compiler import GrammarCompiler
    from penstock.grammar.masks import acceptable_drafts, forced_tokens, grammar_bitmask, matcher_lookahead

__all__ = ["GrammarCompiler", "acceptable_drafts", "forced_tokens", "grammar_bitmask", "matcher_lookahead"]

_MODULES = {
    "GrammarCompiler": "penstock.grammar.compiler",
    "acceptable_drafts": "penstock.grammar.masks",
    "forced_tokens": "penstock.grammar.masks",
    "matcher_lookahead": "penstock.grammar.masks",
    "grammar_bitmask": "penstock.grammar.masks",
}


if not TYPE_CHECKING:  # only at run time, so that type checkers report undefined names
    __getattr__ = lazy_names(__name__, _MODULES)
