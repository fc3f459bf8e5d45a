"""Checks of JSON schemas and grammars without compiling them."""

from __future__ import annotations

from penstock.errors import InputError
from penstock.grammar.schema import grammar_source, schema_ebnf
from penstock.pipelines.core import Grammar


def check_json_schema(schema: object) -> None:
    """Raise an error if a grammar cannot enforce the schema.

    >>> check_json_schema({"type": "array", "uniqueItems": True})
    Traceback (most recent call last):
        ...
    penstock.errors.UnsupportedSchemaError: the JSON schema keyword 'uniqueItems' (at #) is not supported: ...

    Args:
        schema: the result of ``json.loads``.

    Raises:
        UnsupportedSchemaError: a keyword is not supported. The message contains the keyword and its location.
        InputError: the schema is malformed or too large, or no value satisfies it.
    """
    try:
        schema_ebnf(schema)
    except RecursionError:
        raise InputError("the JSON schema is nested too deeply: make it flatter") from None


def check_grammar(grammar: Grammar) -> None:
    """Raise an error if a grammar has an invalid JSON schema, regular expression or list of choices.

    This function does not check EBNF, nor most formats of structural tags. The grammar compiler checks them.

    Raises:
        UnsupportedSchemaError: a JSON schema in the grammar has a keyword that is not supported, or its
            grammar is too large.
        UnsupportedFeatureError: a structural tag has a field or format that is not supported.
        InputError: the text is not valid for its kind.
    """
    try:
        grammar_source(grammar)
    except RecursionError:
        raise InputError(f"the {grammar.kind} is nested too deeply: make it flatter") from None
