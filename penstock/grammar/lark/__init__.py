"""Translates EBNF and structural tags to llguidance's Lark notation: lexemes, and rules over lexemes."""

from __future__ import annotations

from penstock.grammar.lark.ebnf_reader import read_ebnf
from penstock.grammar.lark.structural_tags import read_structural_tag
from penstock.grammar.lark.writer import lark_text

__all__ = ["lark_text", "read_ebnf", "read_structural_tag"]
