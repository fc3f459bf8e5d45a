"""Grammars of bounded numbers compared with Python numbers, and of regular expressions with `re`."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_grammar import accepts, compile_grammar
from support.random_draws import num_examples

from penstock.errors import InputError
from penstock.grammar.schema import regex
from penstock.grammar.schema.numbers import Bounds, integers_between, numbers_between

BOUNDS = st.none() | st.integers(-1200, 1200)
DECIMAL = st.decimals(-20, 20, places=2)


@given(BOUNDS, BOUNDS, st.lists(st.integers(-1300, 1300), min_size=5, max_size=20))
@settings(max_examples=num_examples(60), deadline=None)
def test_integers_between_accepts_exactly_the_integers_in_range(
    minimum: int | None, maximum: int | None, values: list[int]
) -> None:
    rule = integers_between(minimum, maximum)
    values_near_bounds = [
        bound + step for bound in (minimum, maximum) if bound is not None for step in (-1, 0, 1)
    ]
    values_in_range = [
        value
        for value in {*values, *values_near_bounds}
        if (minimum is None or value >= minimum) and (maximum is None or value <= maximum)
    ]
    if rule is None:
        assert not values_in_range
        return
    grammar = compile_grammar(f"root ::= {rule}")
    for value in {*values, *values_near_bounds}:
        assert accepts(grammar, str(value)) == (value in values_in_range), value


@given(st.none() | DECIMAL, st.none() | DECIMAL, st.booleans(), st.booleans(), st.lists(DECIMAL, max_size=20))
@settings(max_examples=num_examples(100), deadline=None)
def test_numbers_between_accepts_exactly_the_nonzero_decimals_in_range(
    minimum: Decimal | None,
    maximum: Decimal | None,
    excludes_minimum: bool,
    excludes_maximum: bool,
    values: list[Decimal],
) -> None:
    bounds = Bounds(
        minimum, maximum, minimum is not None and excludes_minimum, maximum is not None and excludes_maximum
    )
    rule = numbers_between(bounds)
    values_near_bounds = [
        bound + step
        for bound in (minimum, maximum)
        if bound is not None
        for step in map(Decimal, ("-0.01", "0", "0.001", "1"))
    ]
    for value in {*values, *values_near_bounds}:
        if value == 0:
            continue  # zero can be written as 0 or as -0
        text = format(value.normalize(), "f")
        expected = bounds.contains(value)
        assert (rule is not None and accepts(compile_grammar(f"root ::= {rule}"), text)) == expected, text


PATTERNS = [
    "a|b*c",
    "(ab){2,3}",
    "[^a-c]+",
    "a?b??",
    "(?:a|bc)*d",
    "[a\\-\\]]",
    "\\x41\\u0042",
    "",
    "[\\d_]{2}",
]


@given(st.sampled_from(PATTERNS), st.text("abcdAB-]_19", max_size=6))
@settings(max_examples=num_examples(200), deadline=None)
def test_regex_grammar_matches_the_same_texts_as_re(pattern: str, text: str) -> None:
    for search in (False, True):
        parsed_pattern = regex.parse_regex(pattern, search=search)
        expected = (re.search if search else re.fullmatch)(pattern, text) is not None
        assert regex.matches(parsed_pattern, text) == expected
        assert accepts(compile_grammar(f"root ::= {regex.to_plain_ebnf(parsed_pattern)}"), text) == expected
        min_length, max_length = regex.lengths(parsed_pattern)
        assert not expected or min_length <= len(text) <= (len(text) if max_length is None else max_length)


@pytest.mark.parametrize(
    "pattern", ["(", "a)", "[z-a]", "*a", "a{2,1}", "a**", "(?=a)", "\\1", "\\bx", "a^b", "[]", "{"]
)
def test_invalid_or_non_regular_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="regular expression"):
        regex.parse_regex(pattern, search=False)
