"""The scanners of JSON and Python values in chunks, compared with json.loads and ast.literal_eval."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.call_formats import split_text
from support.random_draws import num_examples

from penstock.serve.parsers.json_scanner import JsonScanner
from penstock.serve.parsers.python_scanner import PythonScanner
from penstock.serve.parsers.value_scanner import MAX_DEPTH

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(TEXT, children, max_size=4),
    max_leaves=12,
)
TOKENS = [
    "{",
    "}",
    "[",
    "]",
    '"',
    ",",
    ":",
    " ",
    "\\",
    "\\n",
    "\\u12",
    "ab",
    "1",
    "-",
    ".5",
    "e9",
    "0",
    "true",
    "null",
]
PYTHON_TOKENS = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    ",",
    ":",
    " ",
    "\\",
    "\\x41",
    "ab",
    "1",
    "-",
    ".5",
    "_1",
    "True",
    "None",
    "\t",
    "(",
    ")",
    "\\0",
]


def scan(scanner: JsonScanner | PythonScanner, text: str, sizes: list[int]) -> tuple[str, bool, int]:
    """Return the JSON text, whether the value is complete, and the number of scanned characters."""
    json_text, num_scanned = "", 0
    for chunk in split_text(text, sizes):
        end, json_part = scanner.feed(chunk)
        json_text += json_part
        num_scanned += end
        if scanner.is_complete or scanner.is_invalid:
            break
    return json_text, scanner.is_complete and not scanner.is_invalid, num_scanned


@settings(max_examples=num_examples(80))
@given(VALUES, SIZES, st.booleans(), st.sampled_from([None, 2]))
def test_valid_json_is_unchanged(value: Any, sizes: list[int], is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert scan(JsonScanner(), f"{text} rest", sizes) == (text, True, len(text))


@settings(max_examples=num_examples(250))
@given(st.lists(st.sampled_from(TOKENS), max_size=10).map("".join), SIZES)
def test_random_text_is_accepted_as_by_the_json_module(text: str, sizes: list[int]) -> None:
    json_text, is_whole, num_scanned = scan(JsonScanner(), f"{text}\n", sizes)
    try:
        expected, end = json.JSONDecoder().raw_decode(text.lstrip())
    except json.JSONDecodeError:
        expected, end = None, -1
    if is_whole:
        assert json.loads(json_text) == expected
        assert num_scanned - (len(text) - len(text.lstrip())) == end
    else:
        assert end == -1 or _continues_a_number(text.lstrip(), end)


def _continues_a_number(text: str, end: int) -> bool:
    """Return whether a text is a number, followed at `end` by further characters of a number.

    json.JSONDecoder reads 1 from "1-1". The scanner rejects such a text.
    """
    return text[end : end + 1] != "" and text[end] in "0123456789+-.eE" and text[0] in "-0123456789"


def test_control_characters_are_escaped() -> None:
    assert scan(JsonScanner(), '{"a": "b\n\x00"}', [1]) == ('{"a": "b\\n\\u0000"}', True, 12)


def test_the_nesting_depth_is_limited() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert scan(JsonScanner(), text, [1000]) == (text, True, len(text))
    assert not scan(JsonScanner(), f"[{text}]", [1000])[1]
    assert scan(PythonScanner(), text, [1000]) == (text, True, len(text))
    assert not scan(PythonScanner(), f"[{text}]", [1000])[1]


@settings(max_examples=num_examples(80))
@given(VALUES, SIZES)
def test_python_literals_become_json(value: Any, sizes: list[int]) -> None:
    json_text, is_whole, num_scanned = scan(PythonScanner(), f"{value!r})", sizes)
    assert is_whole
    assert json.loads(json_text) == value
    assert num_scanned == len(repr(value))


@settings(max_examples=num_examples(250))
@given(st.lists(st.sampled_from(PYTHON_TOKENS), max_size=10).map("".join), SIZES)
@example('"\\{"', [1])
def test_accepted_python_literals_are_valid(text: str, sizes: list[int]) -> None:
    json_text, is_whole, num_scanned = scan(PythonScanner(), f"{text})", sizes)
    if is_whole and "\\N" not in text:  # "\\N{...}" names a character in Python; the scanner keeps "\\N"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about unknown escapes, such as "\\{"
            expected = ast.literal_eval(f"{text})"[:num_scanned].strip())
        assert json.loads(json_text) == _convert_tuples_to_lists(expected)


def _convert_tuples_to_lists(value: Any) -> Any:
    """Replace tuples by lists, as in JSON."""
    if isinstance(value, list | tuple):
        return [_convert_tuples_to_lists(item) for item in value]
    return (
        {key: _convert_tuples_to_lists(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'\x41\u00e9\U0001f600\n\'\d'", "A\u00e9\U0001f600\n'\\d"),
        (r"'\ud83d\ude00'", "\U0001f600"),
        (r"'\0\12\1234\8'", "\0\nS4\\8"),
        ("(1)", 1),
        ("('a')", "a"),
        ("((1), [(2)], (3,), ((4,)), {'a': ('b')})", [1, [2], [3], [4], {"a": "b"}]),
        ("(1, 2,)", [1, 2]),
        ("{'a': (), \"b\": [True, None, false]}", {"a": [], "b": [True, None, False]}),
        ("1_000", 1000),
        (".5", 0.5),
        ("+3", 3),
    ],
)
def test_python_values_become_json(text: str, value: Any) -> None:
    json_text, is_whole, _ = scan(PythonScanner(), f"{text} ", [1])
    assert is_whole
    assert json.loads(json_text) == value


@pytest.mark.parametrize("text", ["nan", "inf", "f(1)", "{1: 2}", "{'a'}", "a", "lambda", "1 2]", "--1"])
def test_invalid_python_literals_are_rejected(text: str) -> None:
    assert not scan(PythonScanner(), f"[{text}]", [1])[1]
