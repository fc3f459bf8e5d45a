"""`GrammarCompiler`: compilation in threads, limits, errors, cached grammars, and matchers of contexts."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from support.grammars import EOS, make_grammar_context, new_compiler, wait_until_ready

from penstock.errors import InputError, PenstockError, UnavailableError, UnsupportedFeatureError
from penstock.grammar import compiler, llguidance_backend
from penstock.grammar.schema import sources
from penstock.pipelines.core import Grammar, SamplingParams, TextContext


def accepts(context: TextContext, text: str) -> bool:
    matcher = context.matcher
    assert matcher is not None
    return all(map(matcher.accept_token, text.encode())) and bool(matcher.is_completed())


@pytest.mark.parametrize(
    ("kind", "text", "accepted", "rejected"),
    [
        ("json_schema", {"type": "integer"}, "12", "1.2"),
        ("json_object", "", '{"a": [1]}', "[1]"),
        ("regex", "a+(?:b|c)", "aab", "aabc"),
        ("choice", ["yes", "no!\n"], "no!\n", "maybe"),
        ("ebnf", 'root ::= "a" root | "b"', "aab", "aa"),
        (
            "structural_tag",
            {
                "type": "structural_tag",
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "<call>"},
                        {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 5}},
                        {"type": "regex", "pattern": "[ab]?"},
                        {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 1}},
                    ],
                },
            },
            '<call>5a"é"',
            "<call>4",
        ),
    ],
)
def test_each_kind_of_grammar_accepts_and_rejects_texts(
    kind: str, text: Any, accepted: str, rejected: str
) -> None:
    grammars = new_compiler()
    assert accepts(wait_until_ready(grammars, make_grammar_context(kind, text)), accepted)
    assert not accepts(wait_until_ready(grammars, make_grammar_context(kind, text)), rejected)


def test_a_new_matcher_starts_after_the_generated_tokens() -> None:
    """A context whose generated tokens the grammar does not accept is refused."""
    context = wait_until_ready(new_compiler(), make_grammar_context("regex", "abc", generated=b"ab"))
    context.update(ord("c"))
    context.update(EOS)
    assert context.is_done
    with pytest.raises(InputError, match="token 120, generated token 0"):
        wait_until_ready(new_compiler(), make_grammar_context("regex", "abc", generated=b"x"))


def test_each_matcher_uses_the_end_tokens_of_its_context() -> None:
    grammars = new_compiler()
    context_with_end_tokens = wait_until_ready(
        grammars, make_grammar_context("regex", "a", eos_token_ids={7, 9})
    )
    context_without_end_tokens = wait_until_ready(
        grammars, make_grammar_context("regex", "a", eos_token_ids=set())
    )
    assert context_with_end_tokens.matcher is not None
    assert context_without_end_tokens.matcher is not None
    assert sorted(context_with_end_tokens.matcher.stop_token_ids) == [7, 9]
    assert context_without_end_tokens.matcher.stop_token_ids == [EOS]


def test_a_grammar_without_an_end_token_is_refused() -> None:
    context = make_grammar_context(
        "regex", "a", eos_token_ids=set(), ignore_eos=True, sampling_params=SamplingParams(ignore_eos=True)
    )
    with pytest.raises(UnsupportedFeatureError, match="ignore_eos"):
        new_compiler().ready(context)


def test_a_context_without_a_grammar_is_ready_at_once() -> None:
    context = TextContext(prompt=[1], max_length=5, tokens=np.array([1]))
    assert new_compiler().ready(context)
    assert context.matcher is None


def test_a_grammar_is_compiled_once_until_the_cache_evicts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_grammars: list[Grammar] = []
    original_source = llguidance_backend.grammar_source

    def record_and_compile(grammar: Grammar, **options: Any) -> sources.GrammarSource:
        compiled_grammars.append(grammar)
        return original_source(grammar, **options)

    monkeypatch.setattr(llguidance_backend, "grammar_source", record_and_compile)
    grammars = new_compiler(cache_size=600_000)
    for text in ("a", "b", "a", "a"):
        wait_until_ready(grammars, make_grammar_context("regex", text))
    assert [grammar.text for grammar in compiled_grammars] == ["a", "b"]
    for number in range(12):
        wait_until_ready(grammars, make_grammar_context("regex", f"x{number}"))
    assert 0 < grammars.num_cached_bytes <= 600_000
    wait_until_ready(grammars, make_grammar_context("regex", "a"))
    assert compiled_grammars[-1].text == "a"


DEEPLY_NESTED = {"type": "array", "items": {}}
for _ in range(300):
    DEEPLY_NESTED = {"type": "array", "items": DEEPLY_NESTED}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
        ("regex", "(a|a)*(a|aa)*(b|a)*c"),
        ("regex", "(" * 5000 + "a" + ")" * 5000),
        ("regex", "(a|b)*" * 500),
        ("regex", "[ab]{100000}"),
        ("regex", "a{1,9999999}"),
        ("regex", r"(a)\1"),
        ("regex", ""),
        ("ebnf", 'root ::= root "a" | "b"'),
        ("ebnf", 'root ::= root "a"'),
        ("ebnf", "root ::= root"),
        ("ebnf", 'root ::= ("" | root)*'),
        (
            "ebnf",
            "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30 ::= "c"',
        ),
        ("ebnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(6_000)) + 'r6000 ::= "c"'),
        (
            "ebnf",
            "root ::= r0\n"
            + "".join(f'r{i} ::= "a" r{i + 1} | root\n' for i in range(6_000))
            + 'r6000 ::= "c"',
        ),
        ("regex", "([a-z]{0,100}[0-9]{0,100}){0,100}"),
        ("json_schema", {"type": "string", "pattern": "^([a-z]{0,1000}[0-9]{0,1000}){0,1000}$"}),
        ("ebnf", 'root ::= "a" root root root | ""'),
        ("ebnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        ("ebnf", ""),
        ("ebnf", "root ::= nothing"),
        ("ebnf", "(((("),
        ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
        ("json_schema", DEEPLY_NESTED),
        ("json_schema", {"$ref": "#"}),
        (
            "json_schema",
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        ),
        ("json_schema", {"type": "string", "maxLength": 10**9}),
        ("json_schema", {"type": "string", "minLength": 10**9}),
        ("json_schema", {"type": "array", "minItems": 10**9}),
        ("json_schema", {"type": "integer", "minimum": -(10**30), "maximum": 10**30}),
        ("json_schema", {"enum": [f"value {number}" for number in range(900_000)]}),
        ("json_schema", {"enum": [f"value {number}" for number in range(5000)]}),
        ("json_schema", {"oneOf": [{"const": number} for number in range(1500)]}),
        (
            "json_schema",
            {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": j}]} for i in range(9) for j in range(9)]},
        ),
        ("json_schema", {"pattern": "^(a+)+$", "enum": ["a" * 60 + "!", "a"]}),
        ("json_schema", {"properties": {f"p{number}": {} for number in range(300)}}),
        ("json_schema", "{"),
        ("json_schema", ""),
        ("json_schema", "false"),
        ("json_schema", "true"),
        ("json_schema", "{}"),
        ("json_schema", '{"const": NaN}'),
        ("choice", "[]"),
        ("choice", "{}"),
        ("choice", [""]),
        ("structural_tag", "{}"),
        ("structural_tag", "[]"),
        (
            "structural_tag",
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}},
        ),
        ("structural_tag", {"type": "structural_tag", "format": {"type": "token", "token": "<none>"}}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_costly_or_invalid_grammars_compile_or_are_refused(kind: str, text: Any) -> None:
    grammars = new_compiler(compile_timeout=2.0)
    try:
        context = wait_until_ready(grammars, make_grammar_context(kind, text))
    except InputError:
        assert grammars.ready(TextContext(prompt=[1], max_length=5, tokens=np.array([1])))
    else:
        assert context.matcher is not None


@pytest.mark.parametrize(
    "option",
    [{"style": "qwen_xml"}, {"any_order": True}, {"excludes": ["a"]}, {"max_whitespace_cnt": 1}],
    ids=str,
)
def test_unsupported_options_of_a_schema_in_a_tag_are_refused(option: dict[str, Any]) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}, **option}}
    with pytest.raises(UnsupportedFeatureError, match=next(iter(option))):
        wait_until_ready(new_compiler(), make_grammar_context("structural_tag", tag))


def test_slow_grammars_are_refused_and_others_wait_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original_source = llguidance_backend.grammar_source

    def compile_slowly(grammar: Grammar, **options: Any) -> sources.GrammarSource:
        if grammar.text.startswith("slow"):
            release.wait(60)
        return original_source(grammar, **options)

    monkeypatch.setattr(llguidance_backend, "grammar_source", compile_slowly)
    grammars = new_compiler(compile_timeout=0.2)
    other_context = make_grammar_context("regex", "other")
    try:
        assert not grammars.ready(make_grammar_context("regex", "slow 1"))
        wait_until_ready(grammars, make_grammar_context("regex", "quick"))
        for number in range(1, 5):
            with pytest.raises(InputError, match=rf"'slow {number}' was not compiled within 0\.2 s"):
                wait_until_ready(grammars, make_grammar_context("regex", f"slow {number}"))
        with pytest.raises(InputError, match=r"'slow 1' was not compiled"):
            grammars.ready(make_grammar_context("regex", "slow 1"))  # the refusal is cached
        assert not grammars.ready(other_context), "no thread is free"
        # The grammar waits for a thread up to the time limit.
        with pytest.raises(UnavailableError, match="4 compilation threads"):
            wait_until_ready(grammars, other_context)
        assert not grammars.ready(other_context)
        # The compiled grammar is still cached.
        wait_until_ready(grammars, make_grammar_context("regex", "quick"))
    finally:
        release.set()
    wait_until_ready(grammars, other_context)


def test_a_compilation_thread_ends_after_the_time_limit_without_translating_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original_source = llguidance_backend.grammar_source

    def compile_slowly(grammar: Grammar, **options: Any) -> sources.GrammarSource:
        time.sleep(0.3)
        return original_source(grammar, **options)

    monkeypatch.setattr(llguidance_backend, "grammar_source", compile_slowly)
    translated_grammars: list[object] = []
    monkeypatch.setattr(llguidance_backend, "lark_text", lambda *_, **__: translated_grammars.append(1))
    threads_before = set(threading.enumerate())  # includes compilations of earlier tests
    grammars = new_compiler(compile_timeout=0.2)
    with pytest.raises(InputError, match="not compiled"):
        wait_until_ready(grammars, make_grammar_context("regex", "a"))
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(60)
        assert not thread.is_alive()
    assert translated_grammars == []


def test_a_slow_grammar_does_not_block_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original_source = llguidance_backend.grammar_source

    def compile_slowly(grammar: Grammar, **options: Any) -> sources.GrammarSource:
        if grammar.text == "slow":
            release.wait(60)
        return original_source(grammar, **options)

    monkeypatch.setattr(llguidance_backend, "grammar_source", compile_slowly)
    monkeypatch.setattr(compiler, "_EXCLUSIVE_SECONDS", 0.05)
    grammars = new_compiler(compile_timeout=60)
    try:
        assert not grammars.ready(make_grammar_context("regex", "slow"))
        wait_until_ready(grammars, make_grammar_context("regex", "quick"))
        assert not grammars.ready(make_grammar_context("regex", "slow")), "its time limit has not passed"
    finally:
        release.set()
    wait_until_ready(grammars, make_grammar_context("regex", "slow"))


def test_a_grammar_above_the_size_limit_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="11 characters, the maximum is 10"):
        new_compiler(max_size=10).ready(make_grammar_context("regex", "a" * 11))


def test_errors_name_the_fault_and_no_source_file_of_the_library() -> None:
    grammars = new_compiler()
    for _ in range(2):  # the second error comes from the cache
        with pytest.raises(PenstockError) as caught:
            wait_until_ready(grammars, make_grammar_context("ebnf", "root ::= nothing"))
        assert "nothing" in str(caught.value)
        assert ".cc" not in str(caught.value)
