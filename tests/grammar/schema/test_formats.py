"""String formats: texts that a grammar accepts, and filtering of enum and const values by format."""

from __future__ import annotations

import ipaddress
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.byte_grammar import accepts, compile_grammar, generate_random_text
from support.random_draws import num_examples

from penstock.errors import InputError
from penstock.grammar.schema import schema_ebnf
from penstock.grammar.schema.formats import SUPPORTED_FORMATS, UNSUPPORTED_FORMATS, has_format

# Format -> (valid strings that the grammar accepts, valid strings that only enum and const accept,
# invalid strings).
CASES: dict[str, tuple[list[str], list[str], list[str]]] = {
    name: (row["generated"], row["enum_only"], row["invalid"])
    for name, row in json.loads((Path(__file__).parent / "format_cases.json").read_text()).items()
}


@cache
def compile_format(name: str, **keywords: int) -> Any:
    return compile_grammar(schema_ebnf({"type": "string", "format": name, **keywords}, compact=True))


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_every_supported_and_unsupported_format_has_test_cases() -> None:
    assert CASES.keys() == SUPPORTED_FORMATS.keys() | UNSUPPORTED_FORMATS


@pytest.mark.parametrize("name", CASES)
def test_valid_strings_are_accepted_and_invalid_ones_rejected(name: str) -> None:
    generated_strings, enum_only_strings, invalid_strings = CASES[name]
    for value in generated_strings + enum_only_strings:
        assert has_format(name, value), value
    for value in invalid_strings:
        assert not has_format(name, value), value
    if name in SUPPORTED_FORMATS:
        for value in generated_strings:
            assert accepts(compile_format(name), to_json(value)), value
        for value in invalid_strings:
            assert not accepts(compile_format(name), to_json(value)), value


@pytest.mark.parametrize("name", CASES)
def test_enum_and_const_exclude_strings_without_the_format(name: str) -> None:
    generated_strings, enum_only_strings, invalid_strings = CASES[name]
    grammar = compile_grammar(
        schema_ebnf(
            {"format": name, "enum": [*invalid_strings, *generated_strings, *enum_only_strings, 7]},
            compact=True,
        )
    )
    for value in [*generated_strings, *enum_only_strings, 7]:  # a format applies to strings only
        assert accepts(grammar, to_json(value)), value
    for value in set(invalid_strings) - {*generated_strings, *enum_only_strings}:
        assert not accepts(grammar, to_json(value)), value
    for value in generated_strings + enum_only_strings:
        assert schema_ebnf({"format": name, "const": value})
    for value in invalid_strings:
        with pytest.raises(InputError, match="no value satisfies"):
            schema_ebnf({"format": name, "const": value})


@pytest.mark.parametrize("name", SUPPORTED_FORMATS)
@given(seed=st.integers(0, 10_000), end_length=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_generated_strings_have_the_format(name: str, seed: int, end_length: int) -> None:
    value = json.loads(generate_random_text(compile_format(name), seed, end_length))
    assert has_format(name, value), value
    checker = Draft202012Validator.FORMAT_CHECKER
    # For these formats, the checker of jsonschema is stricter than the standard.
    if name not in (
        "iri",
        "iri-reference",
        "uri-template",
        "relative-json-pointer",
    ):
        assert checker.conforms(value, name), value


_IPV6 = st.text("0:1.f2", max_size=12) | st.ip_addresses(v=6).flatmap(
    lambda address: st.sampled_from([str(address), address.exploded, address.exploded.upper()])
)


@given(_IPV6)
@settings(deadline=None)
def test_ipv6_accepts_the_addresses_that_python_accepts(text: str) -> None:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        is_valid = False
    else:
        is_valid = True
    assert has_format("ipv6", text) == is_valid
    assert accepts(compile_format("ipv6"), f'"{text}"') == is_valid


def test_grammars_of_formats_are_small() -> None:
    sizes = {name: len(schema_ebnf({"type": "string", "format": name})) for name in SUPPORTED_FORMATS}
    assert max(sizes.values()) < 12_000, sizes
    long_formats = ("uri", "iri-reference", "email", "hostname")
    # The size of a grammar grows with maxLength.
    limited_schemas = [{"format": name, "maxLength": 2083} for name in long_formats]
    assert max(len(schema_ebnf({"type": "string", **keywords})) for keywords in limited_schemas) < 65_000


# -- Formats with other keywords --------------------------------------------------------------------------

_LONG_URL = "https://example.com/" + "a" * 1000 + "/%E4%BD%A0" * 30 + "?q=1#x"
COMBINED_CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"format": "ipv6", "maxLength": 5}, ["::1", "::", "1::", "a::b"], ["fe80::1", "12::34", "1.2.3"]),
    ({"format": "ipv6", "minLength": 6}, ["1111:2222:3333:4444:5555:6666:7777:8888"], ["::1"]),
    ({"format": "uri", "maxLength": 2083, "minLength": 1}, [_LONG_URL, "mailto:a@b.c"], ["x:" + "a" * 2082]),
    ({"format": "uri", "maxLength": 20}, ["https://example.com/", "mailto:a@b.c"], ["https://example.com/a"]),
    ({"format": "uri", "pattern": "^https?://"}, ["http://a/", "https://[::1]"], ["ftp://a/", "http:"]),
    ({"format": "email", "maxLength": 50}, ["root@localhost", "a.b@[127.0.0.1]"], ["a" * 48 + "@b"]),
    ({"format": "email", "pattern": "@example\\.com$"}, ["a.b@example.com"], ["a@example.org"]),
    ({"format": "email", "minLength": 10}, ["root@localhost"], ["a@b"]),
    ({"format": "hostname", "maxLength": 63}, ["a.b.c.example-host.com"], ["a" * 64]),
    ({"format": "date-time", "pattern": "Z$"}, ["2024-01-01T00:00:00.5Z"], ["2024-01-01T00:00:00+01:00"]),
    ({"format": "date", "pattern": "^2024-"}, ["2024-02-29"], ["2023-01-01"]),
    ({"format": "uuid", "maxLength": 36, "minLength": 36}, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], []),
    ({"format": "duration", "maxLength": 300, "minLength": 4}, ["PT36H"], ["P1D"]),
    ({"pattern": "^[a-z]+(-[a-z]+)*$", "maxLength": 200, "minLength": 3}, ["ab-cd"], ["ab", "a-", "a" * 201]),
]


@pytest.mark.parametrize(
    ("keywords", "accepted", "rejected"), COMBINED_CASES, ids=lambda value: str(value)[:50]
)
def test_a_format_combines_with_length_and_pattern(
    keywords: dict[str, Any], accepted: list[str], rejected: list[str]
) -> None:
    schema = {"type": "string", **keywords}
    grammar = compile_grammar(schema_ebnf(schema, compact=True))
    for value in accepted:
        assert accepts(grammar, to_json(value)), value
    for value in rejected:
        assert not accepts(grammar, to_json(value)), value
    checker = Draft202012Validator.FORMAT_CHECKER
    for seed in range(8):
        value = json.loads(generate_random_text(grammar, seed, 10 * (seed % 7)))
        Draft202012Validator(schema, format_checker=checker).validate(value)
        assert has_format(keywords.get("format", ""), value)


@given(
    name=st.sampled_from(sorted(SUPPORTED_FORMATS)),
    min_count=st.integers(0, 12),
    max_count=st.integers(0, 70) | st.none(),
    seed=st.integers(0, 99),
)
@settings(max_examples=num_examples(12), deadline=None)
def test_generated_strings_have_the_format_and_the_length(
    name: str, min_count: int, max_count: int | None, seed: int
) -> None:
    schema = {"type": "string", "format": name, "minLength": min_count}
    if max_count is not None:
        schema["maxLength"] = max_count
    try:
        grammar = compile_grammar(schema_ebnf(schema, compact=True))
    except InputError:
        return
    value = json.loads(generate_random_text(grammar, seed, seed % 60))
    assert min_count <= len(value) <= (max_count if max_count is not None else len(value))
    assert has_format(name, value)


@pytest.mark.parametrize("name", [name for name in SUPPORTED_FORMATS if not name.startswith("i")])
def test_max_length_allows_valid_strings_of_less_than_half_the_length(name: str) -> None:
    generated_strings, _, _ = CASES[name]
    # The grammar accepts addresses in brackets only if they are much shorter than the maximum length.
    values = sorted((value for value in generated_strings if "[" not in value and len(value) <= 40), key=len)
    for value in values:
        assert accepts(compile_format(name, maxLength=100), to_json(value)), value
    # Only the longest value is tested, because each maximum length needs another slow compilation.
    for value in values[-1:]:
        max_count = 2 * len(value) + 2
        assert accepts(compile_format(name, maxLength=max_count), to_json(value)), (value, max_count)


# -- Combined regular expressions ------------------------------------------------------------------------

_PATTERNS = st.sampled_from(
    [
        "^[ab]*$",
        "a",
        "b{2,3}",
        "^(?:ab|c)+$",
        "[^a]$",
        "^.{2,5}$",
        "^(?!ab)",
        "^(?=.*b)(?!.*c)",
        "^(?!(a|b)*$)[abc]+$",
    ]
)


@given(
    outer_pattern=_PATTERNS,
    inner_pattern=_PATTERNS,
    min_count=st.integers(0, 3),
    max_count=st.integers(2, 7) | st.none(),
    texts=st.lists(st.text("abc", max_size=8), min_size=8, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_combined_patterns_accept_exactly_the_texts_that_match_both(
    outer_pattern: str, inner_pattern: str, min_count: int, max_count: int | None, texts: list[str]
) -> None:
    schema: dict[str, Any] = {
        "type": "string",
        "pattern": outer_pattern,
        "allOf": [{"pattern": inner_pattern}],
    }
    schema["minLength"] = min_count
    if max_count is not None:
        schema["maxLength"] = max_count
    try:
        grammar = compile_grammar(schema_ebnf(schema))
    except InputError:
        grammar = None
    for text in texts:
        is_valid = all(re.search(pattern, text) for pattern in (outer_pattern, inner_pattern))
        is_valid = is_valid and min_count <= len(text) and (max_count is None or len(text) <= max_count)
        assert (grammar is not None and accepts(grammar, f'"{text}"')) == is_valid, text
