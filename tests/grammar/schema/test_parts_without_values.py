"""Unsatisfiable subschemas are left out of the grammar if they are optional, and refused if required."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.byte_grammar import accepts, compile_grammar, generate_random_text

from penstock.errors import InputError
from penstock.grammar.schema import schema_ebnf

UNSATISFIABLE: list[Any] = [
    False,
    {"enum": []},
    {"type": "string", "pattern": "^abc$", "maxLength": 2},
    {"type": "string", "pattern": "^a{0}$", "minLength": 1, "maxLength": 5},
    {"type": "string", "format": "uuid", "maxLength": 5},
    {"type": "string", "format": "date", "pattern": "x"},
    {"type": "string", "allOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
    {"type": "string", "pattern": "^(?!a)a$"},
    {"format": "ipv6", "const": "x"},
    {"type": "integer", "minimum": 8, "maximum": 13, "multipleOf": 7},
    {"type": "integer", "minimum": 1.1, "maximum": 1.9},
    {"type": "number", "minimum": 5, "maximum": 4},
    {"type": "object", "required": ["a", "b"], "maxProperties": 1},
    {
        "type": "object",
        "properties": {"a": False, "b": {}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    {"type": "object", "required": ["a"], "propertyNames": {"const": "b"}},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"enum": []}, "minItems": 1},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 1}], "uniqueItems": True, "minItems": 2},
]


@pytest.mark.parametrize("unsatisfiable", UNSATISFIABLE, ids=str)
def test_an_unsatisfiable_schema_is_refused(unsatisfiable: Any) -> None:
    with pytest.raises(InputError, match="no value satisfies"):
        schema_ebnf(unsatisfiable)


@pytest.mark.parametrize("unsatisfiable", UNSATISFIABLE, ids=str)
@pytest.mark.parametrize(
    ("position", "accepted"),
    [("property", "{}"), ("branch", "7"), ("items", "[]"), ("prefix", "[true]"), ("additional", '{"a":1}')],
)
def test_an_optional_unsatisfiable_subschema_is_left_out(
    unsatisfiable: Any, position: str, accepted: str
) -> None:
    schema: Any = {
        "property": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}},
        "branch": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "integer"}]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/n"}},
        "prefix": {"type": "array", "prefixItems": [{"type": "boolean"}, {"$ref": "#/$defs/n"}]},
        "additional": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"$ref": "#/$defs/n"},
        },
    }[position]
    schema["$defs"] = {"n": unsatisfiable}
    grammar = compile_grammar(schema_ebnf(schema, compact=True))
    assert accepts(grammar, accepted)
    for seed in range(4):
        Draft202012Validator(schema).validate(json.loads(generate_random_text(grammar, seed)))


def test_a_required_unsatisfiable_property_is_refused() -> None:
    with pytest.raises(InputError, match="no value satisfies"):
        schema_ebnf({"type": "object", "properties": {"a": UNSATISFIABLE[2]}, "required": ["a"]})


def test_min_properties_counts_only_satisfiable_properties() -> None:
    schema = {
        "type": "object",
        "properties": {"a": False, "b": {"type": "null"}, "c": {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 2,
    }
    grammar = compile_grammar(schema_ebnf(schema, compact=True))
    assert accepts(grammar, '{"b":null,"c":null}')
    assert not accepts(grammar, '{"b":null}')
