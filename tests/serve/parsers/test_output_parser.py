"""Decisions of the parser that do not depend on the format."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.call_formats import TOOLS, parse

from penstock.errors import ConfigError
from penstock.serve.parsers import (
    Content,
    Event,
    ParserFactory,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    joined,
    prompt_opens_reasoning,
)

CALL = '<tool_call>\n{"name": "search", "arguments": {"text": "x"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def started(index: int = 0, name: str = "search", arguments: str = '{"text": "x"}') -> list[Event]:
    return [ToolCallStart(index, "id", name), ToolCallArguments(index, arguments)]


def read(text: str, name: str = "hermes", reasoning: str = "think", **options: Any) -> list[Event]:
    """Return the events of a text; check that they do not depend on chunking."""
    parsers = ParserFactory.choose(None, name, reasoning, options.pop("special_tokens", ()))
    options = {"tools": TOOLS, "new_id": lambda: "id", **options}
    events = parse(parsers.new(**options), text)
    for size in (1, 2, 5):
        assert parse(parsers.new(**options), text, (size,)) == events
    return events


def test_content_around_calls_loses_only_white_space_before_them() -> None:
    assert read(f"  One \n{CALL}\n{NOW}\n two ") == [
        Content("  One"),
        *started(),
        *started(1, "now", "{}"),
        Content("\n two "),
    ]


def test_arguments_are_streamed() -> None:
    parser = ParserFactory.choose(None, "hermes", "none").new(tools=TOOLS, new_id=lambda: "id")
    assert parser.push('<tool_call>\n{"name": "search", "argu') == []
    assert parser.push('ments": {') == []
    assert parser.push('"te') == [ToolCallStart(0, "id", "search"), ToolCallArguments(0, '{"te')]
    assert parser.push('xt": "a') == [ToolCallArguments(0, 'xt": "a')]
    assert parser.push('b"}}\n</tool') == [ToolCallArguments(0, 'b"}')]
    assert parser.push("_call>") == []
    assert parser.finish() == []


def test_text_is_emitted_at_once_unless_it_may_be_markup() -> None:
    parser = ParserFactory.choose(None, "hermes", "think").new(tools=TOOLS)
    assert parser.push("a <b> <tool") == [Content("a <b>")]
    assert parser.push("box> ") == [Content(" <toolbox>")]
    assert parser.finish() == [Content(" ")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {"text": "<tool_call>"}}\n</tool_call>',
        '<tool_call>\n{"name": "search", "arguments": [1]}\n</tool_call>',
        "<tool_call>\n{'name': 'search', 'arguments': {}}\n</tool_call>",
        '<tool_call>\n{"name": "search", "arguments": {\'text\': 1}}\n</tool_call>',
        '<tool_call>\n{"name": "sea',
        "<tool_call>",
        "<tool_call></tool_call>",
        "</tool_call>",
    ],
)
def test_text_that_is_not_a_call_is_unchanged_content(text: str) -> None:
    assert read(f"a {text} b") == [Content(f"a {text} b")]
    assert read(f"a {text}") == [Content(f"a {text}")]


@pytest.mark.parametrize("options", [{"tools": []}, {"tool_choice": "none"}])
def test_without_tools_calls_are_content(options: dict[str, Any]) -> None:
    assert read(f"a\n{CALL}", **options) == [Content(f"a\n{CALL}")]
    assert read(f"a\n{CALL}", "hermes", "none", **options) == [Content(f"a\n{CALL}")]


def test_a_named_choice_allows_only_that_tool() -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    assert read(CALL + NOW, tool_choice=choice) == [Content(CALL), *started(0, "now", "{}")]


def test_a_call_after_a_call_of_an_unknown_tool_in_a_list() -> None:
    text = '[TOOL_CALLS][{"name": "other", "arguments": {}}, {"name": "now", "arguments": {}}]'
    assert read(text, "mistral") == [
        Content('[TOOL_CALLS][{"name": "other", "arguments": {}}'),
        *started(0, "now", "{}"),
    ]


def test_a_truncated_call_keeps_its_arguments_so_far() -> None:
    assert read(CALL.partition("}}")[0]) == started(arguments='{"text": "x"')
    assert read(CALL.partition(' "x"')[0]) == started(arguments='{"text":')
    assert read(CALL.partition("_call>\n")[0]) == [Content("<tool")]
    assert read(CALL[:-5]) == started()


def test_arguments_stop_at_invalid_json_and_the_rest_is_content() -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"text": 1, count: 2}}\n</tool_call>'
    assert read(text) == [*started(arguments='{"text": 1, '), Content("count: 2}}\n</tool_call>")]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"{\\"text\\": \\"x\\"}"', '{"text": "x"}'),
        ("null", "{}"),
        ('{"text": "a\nb\tc"}', '{"text": "a\\nb\\tc"}'),
        ('{ "text" : "x" }', '{ "text" : "x" }'),
    ],
)
def test_unambiguous_malformed_arguments_are_repaired(written: str, arguments: str) -> None:
    text = f'<tool_call>{{"name": "search", "arguments": {written}}}</tool_call>'
    assert read(text) == started(arguments=arguments)
    text = f'<tool_call>{{"arguments": {written}, "id": 7, "name": "search"}}</tool_call>'
    assert read(text) == started(arguments=arguments)


def test_a_missing_brace_or_end_marker() -> None:
    assert read('<tool_call>\n{"name": "now"}') == started(0, "now", "{}")
    assert read('<tool_call>{"name": "now", "arguments": {}</tool_call>') == started(0, "now", "{}")
    assert read('<tool_call>{"name": "now", "arguments": {}} So') == [
        *started(0, "now", "{}"),
        Content(" So"),
    ]


def test_without_parallel_the_output_ends_with_the_first_call() -> None:
    assert read(f"a {CALL}{NOW} b", parallel=False) == [Content("a"), *started()]
    parser = ParserFactory.choose(None, "hermes", "none").new(tools=TOOLS, parallel=False)
    parser.push(CALL[:-16])
    assert not parser.done
    parser.push(CALL[-16:])
    assert parser.done
    assert parser.push(NOW) == parser.finish() == []


def test_call_ids() -> None:
    def made(name: str, text: str) -> str:
        event = ParserFactory.choose(None, name, "none").new(tools=TOOLS).push(text)[0]
        assert isinstance(event, ToolCallStart)
        return event.id

    assert re.fullmatch("call_[A-Za-z0-9]{24}", made("hermes", NOW))
    assert made("hermes", NOW) != made("hermes", NOW)
    assert re.fullmatch("[A-Za-z0-9]{9}", made("mistral", "[TOOL_CALLS]now[ARGS]{}"))
    assert made("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}") == "abcdefghi"


def test_reasoning() -> None:
    said = [Reasoning("hm \n so"), Content("Yes.\n")]
    assert read("<think>\nhm \n so\n</think>\n\nYes.\n") == said
    assert read("hm \n so\n</think>\n\nYes.\n", in_reasoning=True) == said
    assert read("\n<think>hm \n so</think>Yes.\n", in_reasoning=True) == said
    assert read("<think>\n\n</think>\n\nYes.") == [Content("Yes.")]
    assert read("<think>\nhm") == [Reasoning("hm")]
    assert read("hm", in_reasoning=True) == [Reasoning("hm")]
    assert read("hm", "hermes", "none", in_reasoning=True) == [Content("hm")]


def test_an_end_marker_without_a_begin_marker_is_dropped() -> None:
    assert read("hm</think>Yes") == [Content("hmYes")]


def test_a_call_ends_the_reasoning() -> None:
    assert read(f"<think>hm\n{CALL}\n</think>ok") == [Reasoning("hm"), *started(), Content("ok")]
    text = '<think>a <tool_call> or {"name": 1} </think>b'
    assert read(text) == [Reasoning('a <tool_call> or {"name": 1}'), Content("b")]


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_calls_without_markers_after_other_text(name: str) -> None:
    text = {"llama3_json": '{"name": "now", "parameters": {}}', "pythonic": "[now()]"}[name]
    called = started(0, "now", "{}")
    assert read(f"\n {text}", name) == called
    assert read(f"<think>hm</think>\n\n{text}", name) == [Reasoning("hm"), *called]
    assert read(f"<think>hm {text}</think>", name) == [Reasoning(f"hm {text}")]
    for before in ("I will look.", "Sure:", "{", "[1]", '{"a": 1}', '{"name": "x"}', "x = [y]"):
        assert read(f"{before} {text} So", name) == [Content(before), *called, Content(" So")]
    fenced = f"```json\n{text}\n```"
    assert read(fenced, name) == [Content("```json"), *called, Content("\n```")]
    assert read(f"Well. {text}", name, bare_in_text=False) == [Content(f"Well. {text}")]
    assert read(f" {text}", name, bare_in_text=False) == called


@pytest.mark.parametrize(
    "text",
    [
        '{"plan": [{"name": "now", "parameters": {}}]}',
        '[1, {"name": "now", "parameters": {}}]',
        '{"name": "other", "parameters": {"name": "now", "parameters": {}}}',
        'As JSON: {"call": {"name": "now", "parameters": {}}}.',
        '{"name": "other", "parameters": {}}; {"of": {"name": "now", "parameters": {}}}',
    ],
)
def test_json_that_is_not_a_call_contains_no_calls(text: str) -> None:
    assert read(text, "llama3_json") == [Content(text)]


@pytest.mark.parametrize(
    "text", ['{"title": "x"} ', '{"name": "Ann"}', '{"name": "now"}', "[1, 2]", "[f(x)]", "{"]
)
@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_a_json_answer_is_not_a_call(name: str, text: str) -> None:
    assert read(text, name) == [Content(text)]


def test_a_json_answer_is_streamed() -> None:
    parser = ParserFactory.choose(None, "llama3_json", "none").new(tools=TOOLS)
    assert joined(parser.push('{"title": "x')) == [Content('{"title": "x')]


def test_python_tag_of_llama() -> None:
    text = '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'
    assert read(text, "llama3_json") == [*started(0, "now", "{}"), *started(1, "now", "{}")]
    assert read('<|python_tag|>search.call(text="x")', "llama3_json") == started()
    assert read("<|python_tag|>print(1)", "llama3_json") == [Content("<|python_tag|>print(1)")]
    special = ["<|python_tag|>", "<|eom_id|>"]
    text = "<|python_tag|>print(1)<|eom_id|>"
    assert read(text, "llama3_json", special_tokens=special, tools=[]) == [Content("print(1)")]


def test_special_tokens_are_removed_from_the_text() -> None:
    special = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]"]
    parsers = ParserFactory.choose(None, "mistral", "mistral", special)
    assert not parsers.skip_special_tokens
    text = "[THINK]hm [INST]so[/THINK]Yes.[INST][TOOL_CALLS]now[ARGS]{}"
    said: list[Event] = [Reasoning("hm so"), Content("Yes.")]
    events = read(text, "mistral", "mistral", special_tokens=special)
    assert events == [*said, *started(0, "now", "{}")]
    assert read("a[TOOL_CALLS]other[ARGS]{} b", "mistral", special_tokens=special, tools=[]) == [
        Content("aother{} b")
    ]
    assert ParserFactory.choose(None, "hermes", "think", ["<|im_end|>"]).skip_special_tokens
    assert ParserFactory.choose(None, "mistral", "none").skip_special_tokens


def test_types_of_tagged_arguments() -> None:
    def arguments(**values: str) -> str:
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        events = read(f"<tool_call>\n<function=search>\n{body}</function>\n</tool_call>", "qwen3_coder")
        assert isinstance(events[1], ToolCallArguments)
        return events[1].text

    assert arguments(text="12", count="12") == '{"text": "12", "count": 12}'
    assert arguments(exact="True", user="null") == '{"exact": true, "user": null}'
    assert arguments(user="12") == '{"user": "12"}'
    assert arguments(user="a\n\nb\n") == '{"user": "a\\n\\nb\\n"}'
    assert arguments(tags='["a"]', filter="not json") == '{"tags": ["a"], "filter": "not json"}'
    assert arguments(other='{"a": 1}', more="12 apples") == '{"other": {"a": 1}, "more": "12 apples"}'
    assert arguments() == "{}"


def test_flags() -> None:
    assert ParserFactory.choose("<tool_call> arguments </think>", "none", "none").tool_format is None
    assert ParserFactory.choose("<tool_call> arguments </think>", "none", "auto").reasoning_format == "think"
    assert ParserFactory.choose(None).tool_format is None
    with pytest.raises(
        ConfigError, match=r"tool_call_parser: 'hermse' is unknown: use auto, none, or one of .*hermes"
    ):
        ParserFactory.choose(None, "hermse")
    with pytest.raises(ConfigError, match=r"reasoning_parser: .*think"):
        ParserFactory.choose(None, "auto", "r1")


def test_prompts_that_end_inside_reasoning() -> None:
    assert prompt_opens_reasoning("<think>\n")
    assert not prompt_opens_reasoning("<think>\n\n</think>\n\n")
    assert not prompt_opens_reasoning("")
    parsers = ParserFactory.choose(None, "none", "think")
    assert parsers.prompt_opens_reasoning("...<think>\nI wonder", prefill="<think>\nI wonder")
    assert not parsers.prompt_opens_reasoning("...<think>\na</think>b", prefill="<think>\na</think>b")
    assert not parsers.prompt_opens_reasoning("...Well", prefill="Well")
