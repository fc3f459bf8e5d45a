"""Translation of EBNF and structural tags to llguidance's notation: rules over lexemes."""

from __future__ import annotations

from penstock.pipelines.grammars.lark.ebnf_reader import read_ebnf
from penstock.pipelines.grammars.lark.structural_tags import read_structural_tag
from penstock.pipelines.grammars.lark.writer import lark_text

__all__ = ["lark_text", "read_ebnf", "read_structural_tag"]
