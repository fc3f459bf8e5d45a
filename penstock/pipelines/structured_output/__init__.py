"""Structured output: grammars compiled beside the model, and what they allow at each token.

The pipeline sees a grammar in three ways: the tokens that it allows (`grammar_bitmask`), those that it forces
(`forced_tokens`), and how much of a draft it accepts (`acceptable_drafts`). Who drafts may go on with it for
a while (`going_ahead`).
"""

from __future__ import annotations

from penstock.pipelines.structured_output.compiler import GrammarCompiler
from penstock.pipelines.structured_output.masks import (
    acceptable_drafts,
    forced_tokens,
    going_ahead,
    grammar_bitmask,
)

__all__ = ["GrammarCompiler", "acceptable_drafts", "forced_tokens", "going_ahead", "grammar_bitmask"]
