"""Grammars that force calls, compiled by xgrammar and llguidance for a vocabulary of single bytes."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from support.call_formats import RENDERERS, SINGLE_CALL_FORMATS, TOOLS, Call, collect_calls, parse

from penstock.errors import UnsupportedFeatureError
from penstock.grammar.schema import grammar_source
from penstock.pipelines.core import Grammar
from penstock.serve.parsers import ParserFactory
from penstock.serve.parsers.formats import TOOL_FORMATS

xgrammar = pytest.importorskip("xgrammar")
llguidance_bytes = pytest.importorskip("support.llguidance_bytes")

FORMATS = pytest.mark.parametrize("name", list(TOOL_FORMATS))
END_TOKEN_ID = 256
NAMED_CHOICE = {"type": "function", "function": {"name": "search"}}
SEARCH = Call("search", {"text": "a b", "count": 3})
SCALARS = ("text", "count", "exact")


def tools_without_nested_arguments() -> list[dict[str, Any]]:
    """Return the tools without nested arguments. Grammars of nested arguments compile 50 times slower."""
    [search_tool, now_tool] = copy.deepcopy(TOOLS)
    properties = search_tool["function"]["parameters"]["properties"]
    search_tool["function"]["parameters"]["properties"] = {name: properties[name] for name in SCALARS}
    return [search_tool, now_tool]


FLAT_TOOLS = tools_without_nested_arguments()


@cache
def make_compiler() -> Any:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[END_TOKEN_ID]
    )
    return xgrammar.GrammarCompiler(info)


@cache
def compile_grammar(grammar: Grammar) -> Any:
    assert grammar.kind == "structural_tag"
    return make_compiler().compile_structural_tag(grammar_source(grammar).text)


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Return whether a grammar accepts a whole text. Check that xgrammar and llguidance agree."""
    assert grammar is not None
    matcher = xgrammar.GrammarMatcher(compile_grammar(grammar))
    is_accepted = bool(matcher.accept_string(text) and matcher.accept_token(END_TOKEN_ID))
    llguidance_matcher = llguidance_bytes.match_source(grammar_source(grammar))
    assert llguidance_bytes.accepts(llguidance_matcher, text.encode()) == is_accepted, (
        "the two libraries disagree"
    )
    return is_accepted


def grammar_that_forces_calls(
    name: str, choice: Any = "required", tools: Any = FLAT_TOOLS, **options: Any
) -> Grammar | None:
    return ParserFactory.choose(None, name, "think").grammar(tools, choice, **options)


def render_calls(name: str, *calls: Call) -> str:
    """Render calls as the grammar forces them: Python calls with JSON literals, lists on one line."""
    if name in ("pythonic", "lfm2", "olmo3"):
        text = ("\n" if name == "olmo3" else ", ").join(
            f"{call.name}({', '.join(f'{key}={json.dumps(value)}' for key, value in call.arguments.items())})"
            for call in calls
        )
        if name == "olmo3":
            return f"<function_calls>{text}</function_calls>"
        return f"[{text}]" if name == "pythonic" else f"<|tool_call_start|>[{text}]<|tool_call_end|>"
    if name == "cohere":
        rendered_calls = [
            '{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGS}'.replace(
                "NAME", call.name
            ).replace("ARGS", json.dumps(call.arguments))
            for call in calls
        ]
        return f"<|START_ACTION|>[{', '.join(rendered_calls)}]<|END_ACTION|>"
    return RENDERERS[name](calls)


@FORMATS
def test_a_call_is_accepted_and_parsed(name: str) -> None:
    text = render_calls(name, SEARCH)
    for grammar in (
        grammar_that_forces_calls(name),
        grammar_that_forces_calls(name, NAMED_CHOICE),
        grammar_that_forces_calls(name, parallel=False),
    ):
        assert accepts(grammar, text)
    assert collect_calls(parse(ParserFactory.choose(None, name).new(tools=TOOLS), text)) == [SEARCH]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
def test_a_call_with_nested_arguments_is_accepted(name: str) -> None:
    text = render_calls(name, Call("search", {"text": "a", "tags": [1, {"b": []}], "filter": {"c": None}}))
    assert accepts(grammar_that_forces_calls(name, tools=TOOLS), text)


@FORMATS
def test_text_that_is_not_a_valid_call_is_rejected(name: str) -> None:
    text = render_calls(name, SEARCH)
    grammar = grammar_that_forces_calls(name)
    assert not accepts(grammar, "")
    assert not accepts(grammar, f"Well. {text}")
    assert not accepts(grammar, f"{text} Done.")
    assert not accepts(grammar, text[:-2])
    assert not accepts(grammar, text.replace("search", "other"))
    assert not accepts(grammar, text.replace("3", "three"))
    assert not accepts(grammar, text.replace("text", "no_such_argument", 1))


@FORMATS
def test_several_calls_are_accepted_only_with_parallel_calls(name: str) -> None:
    text = render_calls(name, SEARCH, SEARCH)
    assert accepts(grammar_that_forces_calls(name), text) is (name not in SINGLE_CALL_FORMATS)
    assert not accepts(grammar_that_forces_calls(name, parallel=False), text)
    assert not accepts(grammar_that_forces_calls(name, NAMED_CHOICE), text)


def test_a_named_choice_forces_the_named_tool() -> None:
    now_call = render_calls("hermes", Call("now"))
    assert accepts(grammar_that_forces_calls("hermes"), now_call)
    assert not accepts(grammar_that_forces_calls("hermes", NAMED_CHOICE), now_call)


def test_a_pythonic_call_may_omit_optional_arguments() -> None:
    grammar = grammar_that_forces_calls("pythonic")
    assert accepts(grammar, '[search(text="a", exact=true)]')
    assert not accepts(grammar, "[search(exact=true)]")
    assert accepts(grammar, "[now()]")
    tool = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {**tool, "$defs": {"A": {"const": 1}}}}}
    ]
    grammar = ParserFactory.choose(None, "pythonic").grammar(tools, "required")
    for text in ("[f()]", "[f(a=1)]", "[f(b=2)]", "[f(a=1, b=2)]"):
        assert accepts(grammar, text)
    assert not accepts(grammar, "[f(a=2)]")


def test_choices_that_force_no_call_have_no_grammar_and_forced_calls_need_a_format() -> None:
    for choice in ("auto", "none", None):
        assert grammar_that_forces_calls("hermes", choice) is None
    with pytest.raises(UnsupportedFeatureError, match=r"set --tool-call-parser to one of .*hermes"):
        ParserFactory.choose(None).grammar(TOOLS, "required")


CALL = render_calls("hermes", SEARCH)
REASONING = f"hm, </thin or not\n</think>\n\n{CALL}"


@pytest.mark.parametrize(
    ("in_reasoning", "accepted_texts"),
    [
        (True, [REASONING]),
        (False, [f"<think>\n{REASONING}", CALL]),
        (None, [REASONING, f"<think>\n{REASONING}", CALL]),
    ],
)
def test_reasoning_may_precede_a_forced_call(in_reasoning: bool | None, accepted_texts: list[str]) -> None:
    grammar = grammar_that_forces_calls("hermes", allows_reasoning=True, in_reasoning=in_reasoning)
    for text in (REASONING, f"<think>\n{REASONING}", CALL):
        # Within a reasoning block, a second "<think>" is reasoning text.
        expected = text in accepted_texts or (in_reasoning is True and text != CALL)
        assert accepts(grammar, text) is expected, text
    assert not accepts(grammar, f"hm {CALL}")
    assert not accepts(grammar, f"<think>hm</think>Well. {CALL}")
    assert not accepts(grammar_that_forces_calls("hermes"), f"<think>\n{REASONING}")


@pytest.mark.parametrize(
    ("kind", "text", "accepted_text", "rejected_text"),
    [
        (
            "json_schema",
            '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
            '{"a": 1}',
            '{"a": "x"}',
        ),
        ("json_object", "", '{"x": [1]}', "[1]"),
        ("regex", "a+b", "aab", "aa"),
        ("ebnf", 'root ::= "x" y\ny ::= "y"', "xy", "x"),
        ("choice", '["yes", "no"]', "no", "maybe"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}',
            "x",
            "y",
        ),
    ],
)
def test_a_grammar_applies_after_the_reasoning(
    kind: Any, text: str, accepted_text: str, rejected_text: str
) -> None:
    grammar = ParserFactory.choose(None, "none", "think").after_reasoning(
        Grammar(kind, text), in_reasoning=True
    )
    assert accepts(grammar, f"so </ so</think>\n\n{accepted_text}")
    assert not accepts(grammar, f"so</think>{rejected_text}")
    assert not accepts(grammar, accepted_text)
    assert ParserFactory.choose(None).after_reasoning(Grammar(kind, text)) == Grammar(kind, text)
