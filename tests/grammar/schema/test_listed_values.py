"""Values of enum and const are kept if they are valid for all other keywords, as in `jsonschema`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.byte_grammar import accepts, compile_grammar

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema import schema_ebnf
from penstock.grammar.schema.keywords import equality_key

# (schema with enum or const, its valid values)
CASES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"format": "uri", "enum": ["mailto:a@b.c", "http://x.y", "no"]}, ["mailto:a@b.c", "http://x.y"]),
    ({"format": "ipv6", "const": "::1"}, ["::1"]),
    ({"format": "email", "const": "root@localhost"}, ["root@localhost"]),
    ({"format": "regex", "enum": ["a+", "("]}, ["a+"]),
    ({"format": "date", "enum": ["2024-02-30", 7, "2024-02-29"]}, [7, "2024-02-29"]),
    ({"enum": ["a", "bcd", "é", 5], "maxLength": 1}, ["a", "é", 5]),
    ({"enum": ["a1", "b2"], "pattern": "^a", "minLength": 2}, ["a1"]),
    ({"enum": ["a", "b", 3], "not": {"const": "b"}}, ["a", 3]),
    ({"enum": [1, 2, 3], "if": {"minimum": 2}, "then": {"const": 3}, "else": {"const": 1}}, [1, 3]),
    ({"enum": [0.5, 0.75, 1], "multipleOf": 0.25, "minimum": 0.6}, [0.75, 1]),
    ({"enum": [[1, 2], [1, 1], [2], []], "uniqueItems": True, "contains": {"const": 1}}, [[1, 2]]),
    ({"enum": [{"a": 1}, {"a": "x"}, {}], "properties": {"a": {"type": "integer"}}}, [{"a": 1}, {}]),
    ({"enum": [{"ab": 1}, {"b": 1}, {"ab": 0}], "patternProperties": {"a": {"minimum": 1}, "b$": {}}},
     [{"ab": 1}, {"b": 1}]),
    ({"$ref": "#/$defs/e", "not": {"enum": [1]}, "$defs": {"e": {"enum": [1, 2]}}}, [2]),
    ({"allOf": [{"enum": ["::1", "1.2.3.4", "x"]}, {"anyOf": [{"format": "ipv6"}, {"format": "ipv4"}]}]},
     ["::1", "1.2.3.4"]),
    ({"enum": [1, 5, 9], "oneOf": [{"minimum": 4}, {"multipleOf": 3}]}, [5]),
    ({"enum": ["a", "\ud800"]}, ["a"]),  # UTF-8 cannot encode a lone surrogate
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid_values"), CASES, ids=lambda value: str(value)[:50])
def test_exactly_the_valid_values_are_accepted(schema: dict[str, Any], valid_values: list[Any]) -> None:
    grammar = compile_grammar(schema_ebnf(schema, compact=True))
    values = [schema["const"]] if "const" in schema else schema.get("enum", [1, 2, "::1", "1.2.3.4", "x"])
    for value in values:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if "\ud800" not in text:
            assert accepts(grammar, text) == (value in valid_values), value


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"enum": [1], "$dynamicRef": "#x"}, "$dynamicRef"),
        ({"enum": [{"a": 1}], "unevaluatedProperties": {"type": "integer"}}, "unevaluatedProperties"),
        ({"enum": ["a"], "pattern": "(a)\\1"}, "pattern"),
        ({"enum": [1], "allOf": [{"$ref": "#"}]}, "$ref"),
    ],
)
def test_keywords_that_cannot_be_evaluated_are_refused(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        schema_ebnf(schema)
    assert caught.value.keyword == keyword


def test_a_value_that_regex_dialects_match_differently_is_excluded() -> None:
    # é matches \W in ECMA 262, but not in Python.
    assert "\u00e9" not in schema_ebnf({"enum": ["é", "e"], "not": {"pattern": "\\W"}})
    with pytest.raises(InputError):
        schema_ebnf({"const": "é", "not": {"pattern": "\\W"}})


_SCALARS = st.sampled_from(
    [None, True, False, 0, 1, 2, 1.0, 1.5, -3, "", "a", "ab", "b1", "2024-01-01", "::1"]
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=4,
)
_SUBSCHEMAS = st.sampled_from(
    [
        *[True, False, {}, {"type": "integer"}, {"type": ["string", "null"]}, {"minimum": 1}, {"const": 1}],
        *[{"pattern": "a"}, {"maxLength": 1}, {"required": ["a"]}, {"format": "ipv6"}, {"uniqueItems": True}],
    ]
)
_BRANCHES = st.lists(_SUBSCHEMAS, min_size=1, max_size=3)
_NAMED_SUBSCHEMAS = st.dictionaries(st.sampled_from("abc"), _SUBSCHEMAS, max_size=2)
_COUNT = st.integers(0, 3)
_KEYWORDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["string", "integer", "number", "array", "object", ["null", "boolean", "array"]]),
    "minimum": st.sampled_from([0, 1, 1.5]),
    "exclusiveMaximum": st.sampled_from([1, 2]),
    "multipleOf": st.sampled_from([1, 2, 0.5]),
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "pattern": st.sampled_from(["a", "^b", "\\d"]),
    "format": st.sampled_from(["ipv6", "date", "unknown"]),
    "items": _SUBSCHEMAS,
    "prefixItems": _BRANCHES,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "uniqueItems": st.booleans(),
    "contains": _SUBSCHEMAS,
    "minContains": _COUNT,
    "maxContains": _COUNT,
    "properties": _NAMED_SUBSCHEMAS,
    "patternProperties": st.just({"a|b": {"type": "integer"}}),
    "additionalProperties": _SUBSCHEMAS,
    "propertyNames": st.just({"pattern": "a"}),
    "required": st.sampled_from([["a"], ["a", "b"]]),
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
    "dependentRequired": st.just({"a": ["b"]}),
    "dependentSchemas": _NAMED_SUBSCHEMAS,
    "allOf": _BRANCHES,
    "anyOf": _BRANCHES,
    "oneOf": _BRANCHES,
    "not": _SUBSCHEMAS,
    "if": _SUBSCHEMAS,
    "then": _SUBSCHEMAS,
    "else": _SUBSCHEMAS,
}


@given(
    # 1 and 1.0 are equal values in JSON schema.
    values=st.lists(_VALUES, min_size=1, max_size=5, unique_by=equality_key),
    keywords=st.sets(st.sampled_from(sorted(_KEYWORDS)), max_size=4).flatmap(
        lambda names: st.fixed_dictionaries({name: _KEYWORDS[name] for name in names})
    ),
)
@settings(max_examples=300, deadline=None)
def test_accepted_values_are_the_values_that_jsonschema_accepts(
    values: list[Any], keywords: dict[str, Any]
) -> None:
    schema = {**keywords, "enum": values}
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    try:
        grammar = compile_grammar(schema_ebnf(schema, compact=True))
    except InputError:
        assert not any(map(checker.is_valid, values))
        return
    for value in values:
        text = json.dumps(value, separators=(",", ":"))
        assert accepts(grammar, text) == checker.is_valid(value), value
