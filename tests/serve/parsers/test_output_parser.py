"""`OutputParser` and `ParserFactory`: behaviour that all formats share, and details of some formats."""

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
    merge_events,
    prompt_opens_reasoning,
)

CALL = '<tool_call>\n{"name": "search", "arguments": {"text": "x"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def make_call_events(index: int = 0, name: str = "search", arguments: str = '{"text": "x"}') -> list[Event]:
    return [ToolCallStart(index, "id", name), ToolCallArguments(index, arguments)]


def parse_text(text: str, name: str = "hermes", reasoning: str = "think", **options: Any) -> list[Event]:
    """Parse a text. Check that the events do not depend on chunking, and return them."""
    parsers = ParserFactory.choose(None, name, reasoning, options.pop("special_tokens", ()))
    options = {"tools": TOOLS, "new_id": lambda: "id", **options}
    events = parse(parsers.new(**options), text)
    for size in (1, 2, 5):
        assert parse(parsers.new(**options), text, (size,)) == events
    return events


def test_white_space_before_calls_is_removed_from_the_content() -> None:
    assert parse_text(f"  One \n{CALL}\n{NOW_CALL}\n two ") == [
        Content("  One"),
        *make_call_events(),
        *make_call_events(1, "now", "{}"),
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
    assert parse_text(f"a {text} b") == [Content(f"a {text} b")]
    assert parse_text(f"a {text}") == [Content(f"a {text}")]


@pytest.mark.parametrize("options", [{"tools": []}, {"tool_choice": "none"}])
def test_calls_are_content_without_tools_or_with_the_choice_none(options: dict[str, Any]) -> None:
    assert parse_text(f"a\n{CALL}", **options) == [Content(f"a\n{CALL}")]
    assert parse_text(f"a\n{CALL}", "hermes", "none", **options) == [Content(f"a\n{CALL}")]


def test_a_named_choice_allows_only_calls_of_the_named_tool() -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    assert parse_text(CALL + NOW_CALL, tool_choice=choice) == [
        Content(CALL),
        *make_call_events(0, "now", "{}"),
    ]


def test_a_call_after_a_call_of_an_unknown_tool_in_a_list_is_parsed() -> None:
    text = '[TOOL_CALLS][{"name": "other", "arguments": {}}, {"name": "now", "arguments": {}}]'
    assert parse_text(text, "mistral") == [
        Content('[TOOL_CALLS][{"name": "other", "arguments": {}}'),
        *make_call_events(0, "now", "{}"),
    ]


def test_a_truncated_call_keeps_its_incomplete_arguments() -> None:
    assert parse_text(CALL.partition("}}")[0]) == make_call_events(arguments='{"text": "x"')
    assert parse_text(CALL.partition(' "x"')[0]) == make_call_events(arguments='{"text":')
    assert parse_text(CALL.partition("_call>\n")[0]) == [Content("<tool")]
    assert parse_text(CALL[:-5]) == make_call_events()


def test_text_after_invalid_arguments_is_content() -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"text": 1, count: 2}}\n</tool_call>'
    assert parse_text(text) == [
        *make_call_events(arguments='{"text": 1, '),
        Content("count: 2}}\n</tool_call>"),
    ]


@pytest.mark.parametrize(
    ("raw_arguments", "arguments"),
    [
        ('"{\\"text\\": \\"x\\"}"', '{"text": "x"}'),
        ("null", "{}"),
        ('{"text": "a\nb\tc"}', '{"text": "a\\nb\\tc"}'),
        ('{ "text" : "x" }', '{ "text" : "x" }'),
    ],
)
def test_unambiguous_malformed_arguments_are_repaired(raw_arguments: str, arguments: str) -> None:
    text = f'<tool_call>{{"name": "search", "arguments": {raw_arguments}}}</tool_call>'
    assert parse_text(text) == make_call_events(arguments=arguments)
    text = f'<tool_call>{{"arguments": {raw_arguments}, "id": 7, "name": "search"}}</tool_call>'
    assert parse_text(text) == make_call_events(arguments=arguments)


def test_a_missing_brace_or_end_marker_is_repaired() -> None:
    assert parse_text('<tool_call>\n{"name": "now"}') == make_call_events(0, "now", "{}")
    assert parse_text('<tool_call>{"name": "now", "arguments": {}</tool_call>') == make_call_events(
        0, "now", "{}"
    )
    assert parse_text('<tool_call>{"name": "now", "arguments": {}} So') == [
        *make_call_events(0, "now", "{}"),
        Content(" So"),
    ]


def test_without_parallel_calls_the_output_ends_after_the_first_call() -> None:
    assert parse_text(f"a {CALL}{NOW_CALL} b", parallel=False) == [Content("a"), *make_call_events()]
    parser = ParserFactory.choose(None, "hermes", "none").new(tools=TOOLS, parallel=False)
    parser.push(CALL[:-16])
    assert not parser.done
    parser.push(CALL[-16:])
    assert parser.done
    assert parser.push(NOW_CALL) == parser.finish() == []


def test_call_ids_have_the_length_of_the_format_or_are_read_from_the_text() -> None:
    def find_call_id(name: str, text: str) -> str:
        event = ParserFactory.choose(None, name, "none").new(tools=TOOLS).push(text)[0]
        assert isinstance(event, ToolCallStart)
        return event.id

    assert re.fullmatch("call_[A-Za-z0-9]{24}", find_call_id("hermes", NOW_CALL))
    assert find_call_id("hermes", NOW_CALL) != find_call_id("hermes", NOW_CALL)
    assert re.fullmatch("[A-Za-z0-9]{9}", find_call_id("mistral", "[TOOL_CALLS]now[ARGS]{}"))
    assert find_call_id("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}") == "abcdefghi"


def test_reasoning_is_separated_from_content() -> None:
    expected = [Reasoning("hm \n so"), Content("Yes.\n")]
    assert parse_text("<think>\nhm \n so\n</think>\n\nYes.\n") == expected
    assert parse_text("hm \n so\n</think>\n\nYes.\n", in_reasoning=True) == expected
    assert parse_text("\n<think>hm \n so</think>Yes.\n", in_reasoning=True) == expected
    assert parse_text("<think>\n\n</think>\n\nYes.") == [Content("Yes.")]
    assert parse_text("<think>\nhm") == [Reasoning("hm")]
    assert parse_text("hm", in_reasoning=True) == [Reasoning("hm")]
    assert parse_text("hm", "hermes", "none", in_reasoning=True) == [Content("hm")]


def test_an_end_marker_without_a_begin_marker_is_dropped() -> None:
    assert parse_text("hm</think>Yes") == [Content("hmYes")]


def test_a_call_ends_the_reasoning_but_a_marker_alone_does_not() -> None:
    assert parse_text(f"<think>hm\n{CALL}\n</think>ok") == [
        Reasoning("hm"),
        *make_call_events(),
        Content("ok"),
    ]
    text = '<think>a <tool_call> or {"name": 1} </think>b'
    assert parse_text(text) == [Reasoning('a <tool_call> or {"name": 1}'), Content("b")]


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_calls_without_markers_are_found_after_other_text(name: str) -> None:
    text = {"llama3_json": '{"name": "now", "parameters": {}}', "pythonic": "[now()]"}[name]
    call_events = make_call_events(0, "now", "{}")
    assert parse_text(f"\n {text}", name) == call_events
    assert parse_text(f"<think>hm</think>\n\n{text}", name) == [Reasoning("hm"), *call_events]
    assert parse_text(f"<think>hm {text}</think>", name) == [Reasoning(f"hm {text}")]
    for text_before in ("I will look.", "Sure:", "{", "[1]", '{"a": 1}', '{"name": "x"}', "x = [y]"):
        assert parse_text(f"{text_before} {text} So", name) == [
            Content(text_before),
            *call_events,
            Content(" So"),
        ]
    fenced_call = f"```json\n{text}\n```"
    assert parse_text(fenced_call, name) == [Content("```json"), *call_events, Content("\n```")]
    assert parse_text(f"Well. {text}", name, unmarked_in_text=False) == [Content(f"Well. {text}")]
    assert parse_text(f" {text}", name, unmarked_in_text=False) == call_events


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
    assert parse_text(text, "llama3_json") == [Content(text)]


@pytest.mark.parametrize(
    "text", ['{"title": "x"} ', '{"name": "Ann"}', '{"name": "now"}', "[1, 2]", "[f(x)]", "{"]
)
@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_an_answer_that_resembles_a_call_without_markers_is_content(name: str, text: str) -> None:
    assert parse_text(text, name) == [Content(text)]


def test_a_json_answer_is_streamed() -> None:
    parser = ParserFactory.choose(None, "llama3_json", "none").new(tools=TOOLS)
    assert merge_events(parser.push('{"title": "x')) == [Content('{"title": "x')]


def test_the_python_tag_of_llama_is_parsed() -> None:
    text = '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'
    assert parse_text(text, "llama3_json") == [
        *make_call_events(0, "now", "{}"),
        *make_call_events(1, "now", "{}"),
    ]
    assert parse_text('<|python_tag|>search.call(text="x")', "llama3_json") == make_call_events()
    assert parse_text("<|python_tag|>print(1)", "llama3_json") == [Content("<|python_tag|>print(1)")]
    special_tokens = ["<|python_tag|>", "<|eom_id|>"]
    text = "<|python_tag|>print(1)<|eom_id|>"
    assert parse_text(text, "llama3_json", special_tokens=special_tokens, tools=[]) == [Content("print(1)")]


def test_special_tokens_are_removed_from_the_text() -> None:
    special_tokens = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]"]
    parsers = ParserFactory.choose(None, "mistral", "mistral", special_tokens)
    assert not parsers.skip_special_tokens
    text = "[THINK]hm [INST]so[/THINK]Yes.[INST][TOOL_CALLS]now[ARGS]{}"
    expected: list[Event] = [Reasoning("hm so"), Content("Yes.")]
    events = parse_text(text, "mistral", "mistral", special_tokens=special_tokens)
    assert events == [*expected, *make_call_events(0, "now", "{}")]
    assert parse_text("a[TOOL_CALLS]other[ARGS]{} b", "mistral", special_tokens=special_tokens, tools=[]) == [
        Content("aother{} b")
    ]
    assert ParserFactory.choose(None, "hermes", "think", ["<|im_end|>"]).skip_special_tokens
    assert ParserFactory.choose(None, "mistral", "none").skip_special_tokens


def test_tagged_arguments_get_the_types_of_the_schema() -> None:
    def arguments(**values: str) -> str:
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        events = parse_text(f"<tool_call>\n<function=search>\n{body}</function>\n</tool_call>", "qwen3_coder")
        assert isinstance(events[1], ToolCallArguments)
        return events[1].text

    assert arguments(text="12", count="12") == '{"text": "12", "count": 12}'
    assert arguments(exact="True", user="null") == '{"exact": true, "user": null}'
    assert arguments(user="12") == '{"user": "12"}'
    assert arguments(user="a\n\nb\n") == '{"user": "a\\n\\nb\\n"}'
    assert arguments(tags='["a"]', filter="not json") == '{"tags": ["a"], "filter": "not json"}'
    assert arguments(other='{"a": 1}', more="12 apples") == '{"other": {"a": 1}, "more": "12 apples"}'
    assert arguments() == "{}"


def test_settings_select_the_parsers() -> None:
    assert ParserFactory.choose("<tool_call> arguments </think>", "none", "none").tool_format_name is None
    assert (
        ParserFactory.choose("<tool_call> arguments </think>", "none", "auto").reasoning_format_name
        == "think"
    )
    assert ParserFactory.choose(None).tool_format_name is None
    with pytest.raises(
        ConfigError, match=r"tool_call_parser: 'hermse' is unknown: use auto, none, or one of .*hermes"
    ):
        ParserFactory.choose(None, "hermse")
    with pytest.raises(ConfigError, match=r"reasoning_parser: .*think"):
        ParserFactory.choose(None, "auto", "r1")


def test_prompts_that_end_within_reasoning_are_detected() -> None:
    assert prompt_opens_reasoning("<think>\n")
    assert not prompt_opens_reasoning("<think>\n\n</think>\n\n")
    assert not prompt_opens_reasoning("")
    parsers = ParserFactory.choose(None, "none", "think")
    assert parsers.prompt_opens_reasoning("...<think>\nI wonder", prefill="<think>\nI wonder")
    assert not parsers.prompt_opens_reasoning("...<think>\na</think>b", prefill="<think>\na</think>b")
    assert not parsers.prompt_opens_reasoning("...Well", prefill="Well")
