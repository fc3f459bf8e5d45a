"""Grammars as requests give them -> EBNF, in plain Python: no library for grammars, no torch.

So the server can refuse what no grammar can be made of before a request goes anywhere.
"""

from __future__ import annotations

from penstock.grammar.schema.json_schema import schema_ebnf
from penstock.grammar.schema.sources import GrammarSource, grammar_source, load_json

__all__ = ["GrammarSource", "grammar_source", "load_json", "schema_ebnf"]
