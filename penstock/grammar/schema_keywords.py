"""Whether a JSON schema can be honoured, said at once and without compiling it."""

from __future__ import annotations

from penstock.errors import InputError
from penstock.grammar.schema import grammar_source, schema_ebnf
from penstock.pipelines.core import Grammar


def check_json_schema(schema: object) -> None:
    """Refuses a schema that no grammar can be made of which lets through nothing else.

    >>> check_json_schema({"type": "array", "uniqueItems": True})
    Traceback (most recent call last):
        ...
    penstock.errors.UnsupportedSchemaError: the JSON schema keyword 'uniqueItems' (at #) is not supported: ...

    Args:
        schema: as ``json.loads`` gives it.

    Raises:
        UnsupportedSchemaError: names the keyword that cannot be honoured, and where it stands.
        InputError: this is no schema, nothing satisfies it, or it is too large.
    """
    try:
        schema_ebnf(schema)
    except RecursionError:
        raise InputError("the JSON schema is nested too deeply: make it flatter") from None


def check_grammar(grammar: Grammar) -> None:
    """Refuses a grammar of any kind as far as can be told without a tokenizer.

    EBNF and the formats of structural tags are looked at by the compilation alone.

    Raises:
        UnsupportedSchemaError: a JSON schema in it has a keyword that cannot be honoured.
        InputError: the text is not of its kind.
    """
    try:
        grammar_source(grammar)
    except RecursionError:
        raise InputError(f"the {grammar.kind} is nested too deeply: make it flatter") from None
