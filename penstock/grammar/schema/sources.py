"""Converts a grammar to EBNF, or to a structural tag whose schemas and regular expressions are EBNF."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

from penstock.errors import InputError, UnsupportedFeatureError
from penstock.grammar.schema import regex
from penstock.grammar.schema.ebnf import choice, literal
from penstock.grammar.schema.json_schema import schema_ebnf
from penstock.pipelines.core import Grammar


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The text of a grammar and its notation."""

    notation: Literal["ebnf", "structural_tag"]
    text: str


def grammar_source(
    grammar: Grammar, *, compact: bool = False, token_id: Callable[[str], int | None] | None = None
) -> GrammarSource:
    """Return the grammar in a notation that the back ends compile exactly.

    JSON schemas, JSON objects, regular expressions and choices become EBNF. Schemas and regular expressions
    inside structural tags become EBNF, too. xgrammar's conversion of schemas is not used, because in some
    cases it accepts values that the schema forbids.

    Args:
        grammar: a grammar of any kind.
        compact: whether JSON has no white space.
        token_id: returns the id of a token, given its text, or None for an unknown token. Without this
            function, the tokens of structural tags remain texts.

    Raises:
        UnsupportedSchemaError: a JSON schema has an unsupported keyword, or its grammar is too large.
        UnsupportedFeatureError: a structural tag has an unsupported format or field.
        InputError: the text is not valid for its kind.
    """
    match grammar.kind:
        case "json_schema":
            return GrammarSource("ebnf", schema_ebnf(load_json(grammar), compact=compact))
        case "json_object":
            return GrammarSource("ebnf", schema_ebnf({"type": "object"}, compact=compact))
        case "regex":
            return GrammarSource("ebnf", _regex_ebnf(grammar.text))
        case "choice":
            return GrammarSource("ebnf", _choice_ebnf(load_json(grammar)))
        case "structural_tag":
            tag = _with_ebnf(load_json(grammar), compact, token_id, 0)
            return GrammarSource("structural_tag", json.dumps(tag))
        case "ebnf":
            return GrammarSource("ebnf", grammar.text)


def load_json(grammar: Grammar) -> object:
    """Parse the text of a grammar as JSON.

    Raises:
        InputError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(grammar.text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InputError(f"the {grammar.kind} is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"the {grammar.kind} is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _regex_ebnf(pattern: str) -> str:
    tree = regex.parse_regex(pattern, search=False)
    return f"root ::= {regex.to_plain_ebnf(tree)}\n"


def _choice_ebnf(choices: object) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise InputError(f"a choice must be a non-empty JSON list of strings, was {str(choices)[:80]}")
    return f"root ::= {choice(map(literal, choices))}\n"


def _with_ebnf(
    part: object, compact: bool, token_id: Callable[[str], int | None] | None, depth: int
) -> object:
    """Return a part of a structural tag with EBNF for schemas and regular expressions, and ids for tokens."""
    if depth > 50:
        raise InputError("the structural_tag is nested too deeply")
    if isinstance(part, list):
        return [_with_ebnf(element, compact, token_id, depth + 1) for element in part]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "json_schema":
        if part.get("style", "json") != "json" or part.get("any_order") or part.get("excludes"):
            raise UnsupportedFeatureError(
                f"a structural tag with style {part.get('style', 'json')!r}, any_order or excludes",
                "JSON schemas produce JSON with properties in order",
            )
        if part.get("max_whitespace_cnt") is not None:
            raise UnsupportedFeatureError(
                "a structural tag with max_whitespace_cnt", "--json-whitespace controls white space"
            )
        ebnf = schema_ebnf(part.get("json_schema"), compact=compact, escaped=part.get("escaped", ""))
        return {"type": "grammar", "grammar": ebnf}
    if kind == "qwen_xml_parameter":
        raise UnsupportedFeatureError(f"the structural tag format {kind!r}", "use json_schema")
    if kind == "regex":
        if not isinstance(part.get("pattern"), str):
            raise InputError("a regex of a structural tag needs a pattern, a string")
        return {"type": "grammar", "grammar": _regex_ebnf(part["pattern"])}
    if kind == "token" and isinstance(part.get("token"), str) and token_id is not None:
        return {**part, "token": _checked_id(part["token"], token_id)}
    converted_object = {name: _with_ebnf(value, compact, token_id, depth + 1) for name, value in part.items()}
    for name in ("trigger_tokens", "exclude_tokens"):
        tokens = converted_object.get(name)
        if isinstance(tokens, list) and token_id is not None:
            converted_object[name] = [
                _checked_id(text, token_id) if isinstance(text, str) else text for text in tokens
            ]
    return converted_object


def _checked_id(token: str, token_id: Callable[[str], int | None]) -> int:
    checked_id = token_id(token)
    if checked_id is None:
        raise InputError(f"the structural tag names a token that this model does not have: {token!r}")
    return checked_id
