"""Converts the grammars of requests to EBNF, in plain Python without a grammar library or torch.

The server can therefore refuse unsupported grammars before it submits a request.
"""

from __future__ import annotations

from penstock.grammar.schema.json_schema import schema_ebnf
from penstock.grammar.schema.sources import GrammarSource, grammar_source, load_json

__all__ = ["GrammarSource", "grammar_source", "load_json", "schema_ebnf"]
