"""Grammars of JSON schemas: every accepted text is valid according to `jsonschema`."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_grammar import accepts, compile_grammar, generate_random_text
from support.random_draws import num_examples

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema import schema_ebnf

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def compile_schema(schema: Any, *, compact: bool = False) -> Any:
    return compile_grammar(schema_ebnf(schema, compact=compact))


# (schema, texts that the grammar accepts, texts that it rejects)
CASES: list[tuple[Any, list[str], list[str]]] = [
    (
        {},
        ["null", "[1, {}]", '{"a": [true]}', "-1.5e+3", '"\\ud83d\\ude00"'],
        ["", "01", '"\\ud83d"', "[1,]"],
    ),
    ({"minimum": 5}, ["5", '"a"', "[]", "5.5"], ["4", "4.99999999999999999999"]),
    (
        {"type": "number", "exclusiveMaximum": 1.5},
        ["1.4", "-7", "0.25"],
        ["1.5", "1.4999999999999999999", "2"],
    ),
    ({"type": "integer", "exclusiveMinimum": 1.5, "maximum": 12}, ["2", "12"], ["1", "13", "2.0", "-2"]),
    ({"type": "integer", "multipleOf": 7}, ["0", "-14", "49"], ["5", "-0", "07"]),
    ({"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30}, ["14", "28"], ["7", "15", "35"]),
    ({"type": "string", "maxLength": 2}, ['"é😀"', '"\\""', '"\\u0041b"'], ['"abc"', '"\\ud83d\\ude00ab"']),
    ({"type": "string", "minLength": 2}, ['"ab"', '"\\n\\\\c"'], ['"\\n"', '""']),
    ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"', '"\\u0062"']),
    ({"type": "string", "pattern": '^"\\\\\\n$'}, ['"\\"\\\\\\n"'], ['"a"']),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"', '""']),
    ({"type": "string", "pattern": "^a|bc*$", "maxLength": 3}, ['"abc"', '"xbc"', '"b"'], ['"xa"', '"abcc"']),
    ({"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ['"b-a"', '"ab"'], ['"a"', '"bb"']),
    ({"type": "string", "pattern": "^(?!b)(?=.*1)[a-z1]{2,4}$"}, ['"a1"', '"1zzz"'], ['"b1"', '"aa"', '"a"']),
    ({"type": "string", "pattern": "^(?!\\d)"}, ['"a1"', '""'], ['"1a"', '"٣"']),
    ({"type": "string", "enum": ["a", 1, "b"]}, ['"a"', '"b"'], ["1", '"c"']),
    ({"enum": [1, 2, 3], "minimum": 2}, ["2", "3"], ["1"]),
    ({"const": {"a": [1, "x"]}}, ['{"a": [1, "x"]}', '{"a":[1,"x"]}'], ['{"a":[1]}']),
    ({"enum": [1, 2, 3], "exclusiveMinimum": 1, "exclusiveMaximum": 3}, ["2"], ["1", "3"]),
    ({"const": True}, ["true"], ["1", "false"]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"], ["[]", "[1,2,3]"]),
    (
        {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 1, "maxItems": 3},
        ["[1]", '[1, "a"]', '[1,"a",null]'],
        ["[]", '["a"]', '[1,"a",2,3]', "[1,2]"],
    ),
    ({"type": "array", "prefixItems": [INTEGER, False, INTEGER]}, ["[]", "[1]"], ["[1,2]", "[1,2,3]"]),
    (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["b"]},
        ['{"b":1}', '{"a": 1, "b": 2}', '{\n  "b": 3\n}'],
        ["{}", '{"a":1}', '{"b":1,"a":2}', '{"b":1,"b":2}', '{"b":1,"c":2}'],
    ),
    (
        {"properties": {"name": INTEGER, "é": INTEGER, 'x"': INTEGER}, "additionalProperties": STRING},
        ['{"name":1,"nam":"x"}', '{"é":1}', '{"":""}', '{"names":"s"}', '{"e":"x","x":"y"}', '{"\\n":"x"}'],
        ['{"name":"x"}', '{"\\u006eame":"x"}', '{"é":"x"}', '{"\\u00e9":"x"}', '{"x\\"":"s"}', '{"nam":1}'],
    ),
    ({"type": "object", "required": ["a"]}, ['{"a":[1]}'], ["{}", '{"b":1}']),
    (
        {"properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "type": "object", "minProperties": 2},
        ['{"a":1,"c":1}', '{"b":1,"c":2}', '{"a":1,"b":2,"c":3}'],
        ["{}", '{"a":1}', '{"c":1}'],
    ),
    (
        {"properties": {"a": INTEGER, "b": INTEGER}, "maxProperties": 1, "type": "object"},
        ["{}", '{"b":1}'],
        ['{"a":1,"b":1}'],
    ),
    ({"type": "object", "minProperties": 1}, ['{"a":1}', '{"a":1,"b":2}'], ["{}"]),
    ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    (
        {"type": "object", "properties": {"a": STRING}, "patternProperties": {"^x": INTEGER}},
        ['{"x1":1,"xx":2}', '{"a":"s","x":3}'],
        ['{"x":"s"}', '{"b":1}'],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"x":{}}', "{}"], ['{"a":1}']),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1,"b":[]}'], ['{"c":1}']),
    (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        ['{"b":1}', '{"a":1,"b":2}', "{}"],
        ['{"a":1}'],
    ),
    ({"allOf": [INTEGER, {"minimum": 5}]}, ["5"], ["4", '"a"']),
    (
        {
            "allOf": [
                {"properties": {"a": INTEGER}, "required": ["a"]},
                {"properties": {"b": STRING}, "type": "object"},
            ]
        },
        ['{"a":1}', '{"a":1,"b":"x"}'],
        ['{"b":"x"}', '{"a":"x"}', "1"],
    ),
    ({"minimum": 3, "anyOf": [INTEGER, STRING]}, ["3", '"a"'], ["2", "3.5"]),
    ({"oneOf": [INTEGER, STRING]}, ["3", '"a"'], ["null"]),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [1.0, 3]}, {"const": "x"}]}, ["2", "3", '"x"'], ["1", "1.0"]),
    ({"oneOf": [{"minimum": 5}, {"maximum": 4}]}, ["5", "3"], ["4.5", "null", '"a"', "[]"]),
    (
        {
            "type": "object",
            "properties": {"x": INTEGER, "y": INTEGER},
            "oneOf": [{"required": ["x"]}, {"required": ["y"]}],
        },
        ['{"x":1}', '{"y":1}'],
        ["{}", '{"x":1,"y":1}'],
    ),
    ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": INTEGER}}, ["5"], ["4", "5.5"]),
    ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": INTEGER}}, ["5"], ['"a"']),
    (
        {
            "type": "object",
            "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["n"],
        },
        ['{"n":{"n":null}}'],
        ['{"n":{}}'],
    ),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}}, ['{"n":{"n":{}}}'], ['{"n":1}']),
    (
        {"type": "string", "format": "date"},
        ['"2024-02-29"'],
        ['"2023-02-29"', '"2020-04-31"', '"0000-01-01"'],
    ),
    ({"type": "string", "format": "int32", "title": "x", "x-order": 3}, ['"a"'], ["1"]),
    ({"type": "object", "properties": {"a": False, "b": INTEGER}}, ['{"b":1}'], ['{"a":1}']),
    (
        {"type": "object", "propertyNames": {"minLength": 5, "maxLength": 2}},  # no name satisfies both
        ["{}"],
        ['{"ab":1}', '{"abcde":1}'],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^abc$", "maxLength": 1}}, ["{}"], ['{"abc":1}']),
    (
        {"type": "object", "required": ["id"], "patternProperties": {"^x": INTEGER}},
        ['{"id":"a"}', '{"id":1,"xa":2}'],
        ["{}", '{"id":1,"xa":"b"}', '{"id":1,"y":1}'],
    ),
    ({"enum": [1e40, 10**30, 7], "multipleOf": 7}, ["7"], ["1e+40", str(10**30)]),
    ({"type": "number", "minimum": -(10**35) - 7, "maximum": -(10**35) - 7}, [str(-(10**35) - 7)], ["-1"]),
    # A parser that converts to float would round a fraction above this bound to a value outside the range.
    ({"type": "number", "exclusiveMinimum": 1e21}, [str(10**21 + 1)], ["1000000000000000000000.1"]),
    ({"minimum": -(2**53) + 1, "exclusiveMaximum": 2**53 - 1}, ["0.5", "-7"], ["9007199254740990.9"]),
    ({"type": "string", "maxLength": 10**30}, ['"a"'], ["1"]),
    ({"type": "array", "maxItems": 10**12}, ["[1]"], ["1"]),
]


@pytest.mark.parametrize(("schema", "accepted", "rejected"), CASES, ids=lambda value: str(value)[:40])
def test_the_grammar_accepts_and_rejects_the_listed_texts(
    schema: Any, accepted: list[str], rejected: list[str]
) -> None:
    grammar = compile_schema(schema)
    for text in accepted:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(grammar, text), text
    for text in rejected:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(("schema", "accepted", "rejected"), CASES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("compact", [False, True])
def test_generated_texts_are_valid(
    schema: Any, accepted: list[str], rejected: list[str], compact: bool
) -> None:
    grammar = compile_schema(schema, compact=compact)
    for seed in range(5):
        jsonschema.validate(json.loads(generate_random_text(grammar, seed)), schema)


def test_a_compact_grammar_has_no_white_space() -> None:
    grammar = compile_schema({"properties": {"a": {"type": "array"}}, "type": "object"}, compact=True)
    assert accepts(grammar, '{"a":[1,{"b":2}]}')
    assert not accepts(grammar, '{"a": [1]}')


@pytest.mark.parametrize(
    ("schema", "keyword", "location"),
    [
        ({"not": {}}, "not", "#"),
        ({"properties": {"a/b": {"if": {}, "then": {}}}}, "if", "#/properties/a~1b"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "#"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems", "#"),
        ({"items": {"contains": {}}}, "contains", "#/items"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf", "#"),
        ({"type": "integer", "multipleOf": 7, "minimum": 1}, "multipleOf", "#"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf", "#"),
        ({"oneOf": [INTEGER, {"enum": [1.0, 2]}]}, "oneOf", "#"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern", "#"),
        ({"type": "string", "pattern": r"(a)\1"}, "pattern", "#"),
        (
            {"type": "string", "pattern": "^(a|b|ab)*c{2,900}$", "maxLength": 2000, "minLength": 40},
            "pattern",
            "#",
        ),
        ({"type": "string", "pattern": "^a(?=b)"}, "pattern", "#"),
        ({"type": "string", "format": "regex"}, "format", "#"),
        ({"allOf": [{"pattern": "a.{300}b"}, {"pattern": "b.{300}c"}]}, "pattern", "#/allOf/1"),
        ({"type": "object", "minProperties": 2}, "minProperties", "#"),
        ({"patternProperties": {"a": {}, "b": {}}}, "patternProperties", "#"),
        ({"properties": {"xa": {}}, "patternProperties": {"^x": {}}}, "patternProperties", "#"),
        ({"properties": {"a": {}}, "propertyNames": {"maxLength": 2}}, "propertyNames", "#"),
        ({"$ref": "http://example.com/x.json"}, "$ref", "#"),
        ({"$ref": "#"}, "$ref", "#"),
        ({"items": [{}]}, "items", "#"),
        ({"properties": {"a": {"$id": "http://x"}}}, "$id", "#/properties/a"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties", "#"),
        ({"dependencies": {"a": ["b"]}}, "dependencies", "#"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [STRING], "items": INTEGER},
            "prefixItems",
            "#",
        ),
        ({"maximum": 10**400}, "maximum", "#"),
        ({"minItems": 10**10}, "minItems", "#"),
        ({"pattern": "\ud800"}, "pattern", "#"),
        (
            {  # the grammar cannot exclude names that match the pattern of the first branch
                "oneOf": [
                    {"properties": {"y": {}}, "required": ["y"], "patternProperties": {"^x": {}}},
                    {"type": "object", "required": ["xa"]},
                ]
            },
            "oneOf",
            "#",
        ),
    ],
)
def test_unsupported_keywords_are_refused_by_name_and_location(
    schema: Any, keyword: str, location: str
) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        schema_ebnf(schema)
    assert (caught.value.keyword, caught.value.where) == (keyword, location)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        3,
        {"type": "foo"},
        {"type": []},
        {"enum": []},
        {"anyOf": []},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"allOf": [INTEGER, STRING]},
        {"minimum": "5"},
        {"type": "string", "minLength": -1},
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"a": {}}, "minProperties": 3},
        {"$ref": "#/$defs/none"},
        {"properties": []},
        {"const": "\ud800"},
        {"const": [float("inf")]},
        {"type": "number", "enum": [float("nan"), 1]},
        {"minLength": float("inf")},
        {"minimum": float("inf")},
        {"format": ["date"]},
        {"anyOf": [INTEGER, {"$ref": "#/anyOf/-2"}]},
    ],
    ids=str,
)
def test_invalid_and_unsatisfiable_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(InputError):
        schema_ebnf(schema)


def test_two_long_enums_are_intersected_fast() -> None:
    values = [str(number) for number in range(15_000)]  # comparing all pairs of values would take minutes
    ebnf = schema_ebnf({"allOf": [{"enum": values}, {"enum": values[::-1]}], "maxLength": 1})
    assert ebnf.count("|") == 9


# -- Random schemas -------------------------------------------------------------------------------------

_NAMES = st.sampled_from(["a", "b", "ab", "é", 'q"'])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-30, 30) | st.sampled_from(["", "a", "é\n", "ab", 1.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
    max_leaves=3,
)


def _optional_keywords(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def _typed_schemas(
    name: str | list[str], **keywords: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    return _optional_keywords(**keywords).map(lambda drawn_keywords: {"type": name, **drawn_keywords})


_BOUND = st.integers(-120, 120) | st.sampled_from([0.5, -1.25, 99.75, -0.001])
_NUMERIC_KEYWORDS = {
    "minimum": _BOUND,
    "maximum": _BOUND,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
}
_COUNT = st.integers(0, 3)
_PATTERN = st.sampled_from(["^a", "[a-z]$", "^[a-z]{1,3}$", "é|\\d+", "^(?:x|yz)*$", "[^a-z]", "^\\S\\s?$"])
_LEAVES = st.one_of(
    st.booleans(),
    _typed_schemas("null"),
    _typed_schemas("boolean"),
    _typed_schemas("integer", **_NUMERIC_KEYWORDS),
    _typed_schemas("number", **_NUMERIC_KEYWORDS),
    _typed_schemas("integer", multipleOf=st.integers(1, 30)),
    _typed_schemas("string", minLength=_COUNT, maxLength=_COUNT),
    _typed_schemas("string", pattern=_PATTERN),
    _typed_schemas("string", format=st.sampled_from(["date", "uuid", "email", "ipv4", "time", "password"])),
    _typed_schemas(["string", "null", "integer"], maxLength=_COUNT, minimum=_BOUND),
    st.lists(_VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
    st.just({"$ref": "#/$defs/d"}),
)


def _container_schemas(subschemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    schema_lists = st.lists(subschemas, min_size=1, max_size=3)
    return st.one_of(
        _typed_schemas("array", items=subschemas, prefixItems=schema_lists, minItems=_COUNT, maxItems=_COUNT),
        _typed_schemas(
            "object",
            properties=st.dictionaries(_NAMES, subschemas, max_size=3),
            required=st.lists(_NAMES, max_size=2, unique=True),
            additionalProperties=subschemas,
            maxProperties=_COUNT,
        ),
        _optional_keywords(
            properties=st.dictionaries(_NAMES, subschemas, max_size=3),
            minProperties=st.integers(0, 2),
            dependentRequired=st.dictionaries(_NAMES, st.lists(_NAMES, max_size=1), max_size=1),
            items=subschemas,
            minimum=_BOUND,
        ),
        _typed_schemas(
            "object", patternProperties=subschemas.map(lambda schema: {"^x": schema}), required=st.just(["a"])
        ),
        schema_lists.map(lambda branches: {"anyOf": branches}),
        schema_lists.map(lambda branches: {"oneOf": branches}),
        st.tuples(schema_lists, _optional_keywords(type=st.sampled_from(["object", "string"]))).map(
            lambda schemas: {"allOf": schemas[0], **schemas[1]}
        ),
    )


SCHEMAS = st.tuples(st.recursive(_LEAVES, _container_schemas, max_leaves=6), _LEAVES).map(
    lambda schemas: {**schemas[0], "$defs": {"d": schemas[1]}} if isinstance(schemas[0], dict) else schemas[0]
)


@given(schema=SCHEMAS, seed=st.integers(0, 1000))
@settings(max_examples=num_examples(150), deadline=None)
def test_generated_texts_of_random_schemas_are_valid(schema: Any, seed: int) -> None:
    try:
        ebnf = schema_ebnf(schema, compact=bool(seed % 2))
    except InputError:
        return
    grammar = compile_grammar(ebnf)
    for offset in range(3):
        jsonschema.validate(json.loads(generate_random_text(grammar, seed + offset)), schema)


@given(schema=SCHEMAS, value=_VALUES)
@settings(max_examples=num_examples(150), deadline=None)
def test_accepted_values_of_random_schemas_are_valid(schema: Any, value: Any) -> None:
    try:
        ebnf = schema_ebnf(schema)
    except InputError:
        return
    if accepts(compile_grammar(ebnf), json.dumps(value, ensure_ascii=False)):
        jsonschema.validate(value, schema)
