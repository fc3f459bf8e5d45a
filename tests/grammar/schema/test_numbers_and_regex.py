"""Grammars of bounded numbers against comparisons, and of regular expressions against `re`."""

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

BOUND = st.none() | st.integers(-1200, 1200)
DECIMAL = st.decimals(-20, 20, places=2)


@given(BOUND, BOUND, st.lists(st.integers(-1300, 1300), min_size=5, max_size=20))
@settings(max_examples=num_examples(60), deadline=None)
def test_integers_between_accepts_exactly_the_integers_in_range(
    low: int | None, high: int | None, values: list[int]
) -> None:
    rule = integers_between(low, high)
    near_bounds = [end + step for end in (low, high) if end is not None for step in (-1, 0, 1)]
    in_range = [
        value
        for value in {*values, *near_bounds}
        if (low is None or value >= low) and (high is None or value <= high)
    ]
    if rule is None:
        assert not in_range
        return
    grammar = compile_grammar(f"root ::= {rule}")
    for value in {*values, *near_bounds}:
        assert accepts(grammar, str(value)) == (value in in_range), value


@given(st.none() | DECIMAL, st.none() | DECIMAL, st.booleans(), st.booleans(), st.lists(DECIMAL, max_size=20))
@settings(max_examples=num_examples(100), deadline=None)
def test_numbers_between_accepts_exactly_the_decimals_in_range(
    low: Decimal | None, high: Decimal | None, excludes_low: bool, excludes_high: bool, values: list[Decimal]
) -> None:
    bounds = Bounds(low, high, low is not None and excludes_low, high is not None and excludes_high)
    rule = numbers_between(bounds)
    near_bounds = [
        end + step
        for end in (low, high)
        if end is not None
        for step in map(Decimal, ("-0.01", "0", "0.001", "1"))
    ]
    for value in {*values, *near_bounds}:
        if value == 0:
            continue  # zero has two spellings, 0 and -0
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
        tree = regex.parse_regex(pattern, search=search)
        expected = (re.search if search else re.fullmatch)(pattern, text) is not None
        assert regex.matches(tree, text) == expected
        assert accepts(compile_grammar(f"root ::= {regex.to_plain_ebnf(tree)}"), text) == expected
        low, high = regex.lengths(tree)
        assert not expected or low <= len(text) <= (len(text) if high is None else high)


@pytest.mark.parametrize(
    "pattern", ["(", "a)", "[z-a]", "*a", "a{2,1}", "a**", "(?=a)", "\\1", "\\bx", "a^b", "[]", "{"]
)
def test_invalid_or_non_regular_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="regular expression"):
        regex.parse_regex(pattern, search=False)
