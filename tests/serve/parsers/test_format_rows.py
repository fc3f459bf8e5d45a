"""A new format needs one row of a table and no other change."""

from __future__ import annotations

import pytest
from support.call_formats import TOOLS, Call, collect_calls, parse

from penstock.serve.parsers import Content, ParserFactory, Reasoning
from penstock.serve.parsers.formats import TOOL_FORMATS
from penstock.serve.parsers.formats.json_calls import JsonCalls
from penstock.serve.parsers.reasoning import REASONING_FORMATS, ReasoningFormat

CALLS_ROW = JsonCalls(
    name="fake",
    models="none",
    example='[[CALLS]][{"tool_name": "f", "parameters": {"a": 1}}][[END]]',
    hints=("[[CALLS]]",),
    begin="[[CALLS]]",
    end="[[END]]",
    name_key="tool_name",
    arguments_key="parameters",
)
REASONING_ROW = ReasoningFormat("fake", ("[[WHY]]",), ("[[SO]]",), hints=("[[WHY]]",))
TEMPLATE = "{{ '[[WHY]]' }} {{ '[[CALLS]]' }}"
CALL = Call("search", {"text": "a [b]", "count": 2})
OUTPUT = '[[CALLS]][{"tool_name": "search", "parameters": {"text": "a [b]", "count": 2}}][[END]]'


def choose_parsers() -> ParserFactory:
    return ParserFactory.choose(
        TEMPLATE,
        tool_formats={**TOOL_FORMATS, "fake": CALLS_ROW},
        reasoning_formats={**REASONING_FORMATS, "fake": REASONING_ROW},
    )


def test_the_chat_template_selects_the_rows() -> None:
    assert (choose_parsers().tool_format_name, choose_parsers().reasoning_format_name) == ("fake", "fake")
    assert ParserFactory.choose(TEMPLATE).tool_format_name is None


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
def test_reasoning_content_and_calls_are_parsed_for_any_chunk_size(chunk_size: int) -> None:
    text = f"[[WHY]]because[[SO]]Here: {OUTPUT}"
    events = parse(choose_parsers().new(tools=TOOLS), text, [chunk_size])
    assert events[:2] == [Reasoning("because"), Content("Here:")]
    assert collect_calls(events) == [CALL]


def test_the_grammar_forces_the_markers_and_keys_of_the_row() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    grammar = choose_parsers().grammar(TOOLS, "required", allows_reasoning=True, in_reasoning=False)
    assert grammar is not None
    compiled_grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(grammar.text)

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled_grammar)
        return bool(matcher.accept_string(text) and matcher.accept_token(256))

    assert accepts(OUTPUT)
    assert accepts(f"[[WHY]]because[[SO]]{OUTPUT}")
    assert not accepts(OUTPUT.replace("parameters", "arguments"))
    assert not accepts(OUTPUT.removesuffix("[[END]]"))


def test_a_row_without_template_hints_is_selected_only_by_the_setting() -> None:
    row = JsonCalls(name="silent", models="none", example="", hints=(), begin="[[CALLS]]")
    formats = {"silent": row}
    assert ParserFactory.choose(TEMPLATE, tool_formats=formats).tool_format_name is None
    assert ParserFactory.choose(TEMPLATE, "silent", tool_formats=formats).tool_format_name == "silent"
