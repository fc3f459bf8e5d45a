"""Converts the grammars of requests to EBNF.

This package imports neither a grammar library nor torch. The server process can therefore reject unsupported
grammars before it submits a request to a worker.
"""

from __future__ import annotations

from penstock.grammar.schema.json_schema import schema_ebnf
from penstock.grammar.schema.sources import GrammarSource, grammar_source, load_json

__all__ = ["GrammarSource", "grammar_source", "load_json", "schema_ebnf"]
