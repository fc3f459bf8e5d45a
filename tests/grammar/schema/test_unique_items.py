"""Grammars of arrays with uniqueItems and a finite set of item values."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.byte_grammar import accepts, compile_grammar, generate_random_text

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema import schema_ebnf


def make_unique_array(items: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **keywords}


_ITEMS = st.sampled_from(
    [
        {"enum": ["a", "b", "c"]},
        {"type": "boolean"},
        {"type": ["boolean", "null"]},
        {"type": "integer", "minimum": 0, "maximum": 3},
        {"type": "integer", "minimum": 0, "maximum": 6, "multipleOf": 3},
        {"enum": [1, 1.0, True, 2]},
        {"enum": [[1], [1.0], {"a": 1}]},
        {"anyOf": [{"const": "a"}, {"enum": ["a", 1]}]},
        {"const": "a"},
        False,
    ]
)
_CANDIDATE_ITEMS = ["a", "b", "c", True, False, None, 0, 1, 2, 3, 6, [1], {"a": 1}]


@given(
    items=_ITEMS,
    prefix=st.lists(_ITEMS, max_size=2),
    min_count=st.integers(0, 4),
    max_count=st.integers(0, 4) | st.none(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_accepted_arrays_are_those_that_jsonschema_accepts(
    items: Any, prefix: list[Any], min_count: int, max_count: int | None, seed: int
) -> None:
    schema = make_unique_array(items, minItems=min_count)
    if prefix:
        schema["prefixItems"] = prefix
    if max_count is not None:
        schema["maxItems"] = max_count
    checker = Draft202012Validator(schema)
    arrays = [list(array) for size in range(4) for array in itertools.product(_CANDIDATE_ITEMS, repeat=size)]
    valid_arrays = [array for array in arrays if checker.is_valid(array)]
    try:
        grammar = compile_grammar(schema_ebnf(schema, compact=True))
    except InputError:
        assert not valid_arrays
        return
    assert checker.is_valid(json.loads(generate_random_text(grammar, seed)))
    for array in valid_arrays[:: max(len(valid_arrays) // 50, 1)]:
        assert accepts(grammar, json.dumps(array, separators=(",", ":"))), array
    for array in arrays[seed::97]:
        if array not in valid_arrays:
            assert not accepts(grammar, json.dumps(array, separators=(",", ":"))), array


def test_eight_values_are_accepted_in_any_order() -> None:
    ebnf = schema_ebnf(make_unique_array({"enum": list("abcdefgh")}), compact=True)
    grammar = compile_grammar(ebnf)
    for values in ("abcdefgh", "hgfedcba", "cab", "h"):
        assert accepts(grammar, json.dumps(list(values), separators=(",", ":")))
    assert not accepts(grammar, '["a","b","a"]')
    assert len(ebnf) < 40_000


@pytest.mark.parametrize("bounds", [{}, {"minItems": 2}, {"maxItems": 3}, {"minItems": 1, "maxItems": 25}])
def test_many_values_are_accepted_in_the_order_of_the_schema_and_at_most_once(bounds: dict[str, int]) -> None:
    values = [f"v{number}" for number in range(30)]
    schema = make_unique_array({"enum": values}, **bounds)
    ebnf = schema_ebnf(schema, compact=True)
    grammar = compile_grammar(ebnf)
    assert accepts(grammar, '["v2","v7","v29"]')
    assert not accepts(grammar, '["v2","v2"]')
    assert not accepts(grammar, '["v7","v2"]')
    assert accepts(grammar, json.dumps(values, separators=(",", ":"))) == ("maxItems" not in bounds)
    assert accepts(grammar, "[]") == ("minItems" not in bounds)
    for seed in range(5):
        Draft202012Validator(schema).validate(json.loads(generate_random_text(grammar, seed)))
    assert len(ebnf) < 60_000


def test_short_arrays_of_many_values_are_accepted_in_any_order() -> None:
    grammar = compile_grammar(schema_ebnf(make_unique_array({"enum": list(range(20))}, maxItems=2)))
    assert accepts(grammar, "[19, 3]")
    assert not accepts(grammar, "[3, 3]")


def test_arrays_of_at_most_one_item_may_have_infinitely_many_item_values() -> None:
    grammar = compile_grammar(schema_ebnf(make_unique_array({"type": "string"}, maxItems=1)))
    assert accepts(grammar, '["any"]')


@pytest.mark.parametrize(
    "schema",
    [
        make_unique_array({"type": "string"}),
        make_unique_array({"type": "number", "minimum": 0, "maximum": 1}),
        make_unique_array({"type": "integer", "minimum": 0}),
        make_unique_array({"enum": list(range(40))}, prefixItems=[{"enum": list(range(40))}]),
    ],
)
def test_infinite_sets_of_values_and_large_sets_after_prefix_items_are_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        schema_ebnf(schema)
    assert caught.value.keyword == "uniqueItems"


def test_min_items_above_the_number_of_values_is_refused() -> None:
    with pytest.raises(InputError, match="no value satisfies"):
        schema_ebnf(make_unique_array({"type": "boolean"}, minItems=3))
