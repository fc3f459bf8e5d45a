"""Grammars in llguidance's notation: reading EBNF and structural tags, and writing them as lexemes and rules."""

from __future__ import annotations

from penstock.pipelines.grammars.lark.ebnf_reader import read_ebnf
from penstock.pipelines.grammars.lark.structural_tags import read_structural_tag
from penstock.pipelines.grammars.lark.writer import lark_text

__all__ = ["lark_text", "read_ebnf", "read_structural_tag"]
