"""Each format: rendered calls are parsed for any chunks, no text is lost, and parsing takes linear time."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.call_formats import (
    FORMATS_WITHOUT_MARKER,
    RENDERERS,
    TOOLS,
    VALUE_ENDS,
    Call,
    collect_calls,
    parse,
)
from support.random_draws import num_examples

from penstock.serve.parsers import Content, Event, ParserFactory, Reasoning, ToolCallArguments, ToolCallStart
from penstock.serve.parsers.formats import TOOL_FORMATS
from penstock.serve.parsers.reasoning import REASONING_FORMATS

EXAMPLES = settings(max_examples=num_examples(6), deadline=None, suppress_health_check=list(HealthCheck))
FORMATS = pytest.mark.parametrize("name", list(TOOL_FORMATS))
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)
MARKUP_PARTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    '"}}',
    "{",
    "[",
    "]",
    "</parameter>",
    "\\",
    '"',
    "'",
    "\n",
    "|",
]
MARKERS = sorted(
    {marker for row in TOOL_FORMATS.values() for marker in row.markers}
    | {
        m
        for row in REASONING_FORMATS.values()
        for m in (*row.begin_markers, *row.end_markers, *row.dropped_markers)
    }
)


def any_text_strategy(max_size: int = 20) -> st.SearchStrategy[str]:
    """Return a strategy for random Unicode text with parts of markup."""
    letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    return st.lists(letters | st.sampled_from(MARKUP_PARTS), max_size=max_size // 4).map("".join)


def plain_text_strategy() -> st.SearchStrategy[str]:
    """Return a strategy for non-empty text without a complete marker or surrounding white space."""

    def is_plain(text: str) -> bool:
        return text == text.strip() != "" and not any(marker in text for marker in MARKERS)

    text_parts = st.sampled_from(
        ["<", "[", "{", "<tool", "</th", "|>", " ", "\n", "é", "ab", "\U0001f600", "functools"]
    )
    return (
        st.lists(text_parts | st.text("ab<[]{}|_ \n>", max_size=4), max_size=8).map("".join).filter(is_plain)
    )


def json_value_strategy() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        scalars | any_text_strategy(),
        lambda children: (
            st.lists(children, max_size=3) | st.dictionaries(any_text_strategy(8), children, max_size=3)
        ),
        max_leaves=6,
    )


@st.composite
def call_strategy(draw: st.DrawFn, name: str) -> Call:
    if draw(st.integers(0, 3)) == 0:
        return Call("now")
    end = VALUE_ENDS.get(name)
    texts = any_text_strategy().filter(lambda text: end is None or end not in text)
    numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
    arguments = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "text": texts,
                "count": st.integers(),
                "ratio": numbers,
                "exact": st.booleans(),
                "tags": st.lists(json_value_strategy(), max_size=3),
                "filter": st.dictionaries(any_text_strategy(8), json_value_strategy(), max_size=3),
                "user": st.none() | st.sampled_from(["ann", '"ann"', "17", "a\nb"]),
            },
        )
    )
    if end is not None and end in json.dumps(arguments, ensure_ascii=False):
        arguments = {}
    return Call("search", arguments)


@dataclass
class Output:
    """The text of an output, with its content, reasoning and calls."""

    text: str = ""
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@st.composite
def output_strategy(draw: st.DrawFn, name: str) -> Output:
    part_kinds = draw(st.lists(st.sampled_from(["content", "calls", "reasoning"]), max_size=5))
    output, previous_kind = Output(), ""
    for kind in part_kinds:
        if kind == previous_kind:
            continue
        previous_kind = kind
        newlines = draw(st.sampled_from(["", "\n", "\n\n"])) if output.text else ""
        if kind == "content":
            text = draw(plain_text_strategy())
            # A "[" before a call would begin a list of calls.
            if name in FORMATS_WITHOUT_MARKER and text.endswith("["):
                text = f"{text}x"
            output.text += newlines + text
            output.content += (newlines if output.content else "") + text
        elif kind == "calls":
            drawn_calls = draw(st.lists(call_strategy(name), min_size=1, max_size=3))
            output.text += newlines + RENDERERS[name](drawn_calls)
            output.calls += tuple(drawn_calls)
        else:
            text = draw(plain_text_strategy())
            output.text += f"{newlines}<think>{text}\n</think>"
            output.reasoning += text
    return output


def make_parser(name: str, reasoning: str = "think", **options: Any) -> Any:
    parsers = ParserFactory.choose(None, name, reasoning)
    ids = iter(range(1 << 30))
    return parsers.new(tools=TOOLS, new_id=lambda: f"id{next(ids)}", **options)


def join_content(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def join_reasoning(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def test_every_format_has_a_renderer() -> None:
    assert set(RENDERERS) == set(TOOL_FORMATS)


@FORMATS
@EXAMPLES
@given(data=st.data())
def test_rendered_output_is_parsed(name: str, data: st.DataObject) -> None:
    output = data.draw(output_strategy(name))
    events = parse(make_parser(name), output.text, data.draw(SIZES))
    assert (join_content(events), join_reasoning(events)) == (output.content, output.reasoning)
    assert collect_calls(events) == list(output.calls)
    assert events == parse(make_parser(name), output.text)


TEXT_PARTS = [
    *MARKERS,
    *MARKUP_PARTS,
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_call_end|>",
    "</function>",
    "<parameter=",
    "text>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    '"name"',
    '"arguments"',
    '"parameters"',
    "arguments",
    ": ",
    ", ",
    ";",
    "{}",
    "}",
    "1",
    '"1"',
    "(",
    ")",
    "=",
    "count",
    ">",
    "\uff5c",
    "\u2581",
    "words of text",
]
NAME_PARTS = ["search", '"search"', '{"name": "search"', "search(", "functions.search:0", "now>"]


@FORMATS
@EXAMPLES
@given(st.data())
def test_events_do_not_depend_on_chunking(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(TEXT_PARTS + NAME_PARTS * 3), max_size=25)))
    options = {"in_reasoning": data.draw(st.booleans()), "parallel": data.draw(st.booleans())}
    events = parse(make_parser(name, **options), text)
    assert events == parse(make_parser(name, **options), text, (1,))
    assert events == parse(make_parser(name, **options), text, data.draw(SIZES))


@pytest.mark.random
@FORMATS
@EXAMPLES
@given(st.data())
def test_events_of_long_text_do_not_depend_on_chunking(name: str, data: st.DataObject) -> None:
    """The text can contain calls, and repeated words, which can exceed the maximum length of names."""
    lengths = st.integers(200, 300)
    long_words = st.builds(lambda word, count: word * count, st.sampled_from(["a", "ab ", "{", "1"]), lengths)
    rendered_calls = call_strategy(name).map(lambda call: RENDERERS[name]([call]))
    text_parts = st.sampled_from(TEXT_PARTS + NAME_PARTS * 3) | long_words | rendered_calls
    text = "".join(data.draw(st.lists(text_parts, max_size=25)))
    options = {"in_reasoning": data.draw(st.booleans()), "unmarked_in_text": data.draw(st.booleans())}
    events = parse(make_parser(name, **options), text)
    assert events == parse(make_parser(name, **options), text, (1,))
    assert events == parse(make_parser(name, **options), text, data.draw(SIZES))


@FORMATS
@EXAMPLES
@given(st.data())
def test_truncated_output_has_complete_or_invalid_arguments(name: str, data: st.DataObject) -> None:
    """A truncated call has all arguments or invalid JSON, so that no client can execute it by mistake."""
    output = data.draw(output_strategy(name))
    text = output.text[: data.draw(st.integers(0, len(output.text)))]
    events = parse(make_parser(name), text, data.draw(SIZES))
    assert events == parse(make_parser(name), text, (1,))
    arguments = {event.index: event.text for event in events if isinstance(event, ToolCallArguments)}
    for index, call in enumerate(output.calls[: len(arguments)]):
        try:
            assert Call(call.name, json.loads(arguments[index])) == call
        except json.JSONDecodeError:
            assert index == len(arguments) - 1
    assert output.reasoning.startswith(join_reasoning(events).rstrip("\n</think"))


@FORMATS
@EXAMPLES
@given(st.data())
def test_text_without_a_tool_name_is_unchanged_content(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(TEXT_PARTS) | any_text_strategy(8), max_size=20)))
    assert parse(make_parser(name, "none"), text, data.draw(SIZES)) == ([Content(text)] if text else [])


@FORMATS
@EXAMPLES
@given(st.data())
def test_no_text_is_lost(name: str, data: st.DataObject) -> None:
    """Words are emitted as content, arguments or call ids, whatever markup is before and after the words.

    The text of a truncated call at the end may be lost. Outputs that do not end with content are not checked.
    """
    words = [f"w{index}w" for index in range(30)]
    text_parts = data.draw(
        st.lists(st.sampled_from(TEXT_PARTS + NAME_PARTS * 3 + ["WORD"] * 12), max_size=25)
    )
    text = "".join(
        f" {words[index]} " if text_part == "WORD" else text_part
        for index, text_part in enumerate(text_parts)
    )
    text += ">" + '"' * 2 + " end of it "
    events = parse(make_parser(name, "none"), text, data.draw(SIZES))
    if isinstance(events[-1], Content):
        content = "".join(event.text for event in events if isinstance(event, Content | ToolCallArguments))
        ids = "".join(event.id for event in events if isinstance(event, ToolCallStart))
        assert [word for word in words if word in text and word not in content + ids] == []


@FORMATS
@pytest.mark.parametrize(("chunk_size", "length"), [(1, 1_500), (50, 15_000)])
def test_the_number_of_examined_characters_is_linear(name: str, chunk_size: int, length: int) -> None:
    long_call = RENDERERS[name]([Call("search", {"text": "<tool_call>\n" * (length // 12)})])
    texts = [
        long_call,
        "<" * length,
        "[" * length,
        "\n" * length + "x",
        TOOL_FORMATS[name].markers[0] * (length // 10),
        f"{TOOL_FORMATS[name].markers[0]}\n{{" * (length // 20),
        f'{TOOL_FORMATS[name].markers[0]}{{"name": "search", "arguments": {{"a": ' + "[" * length,
        f'{TOOL_FORMATS[name].markers[0]}{{"arguments": {{"a": "' + "b" * length,
        f"{TOOL_FORMATS[name].markers[0]}unknown" + string.ascii_letters * (length // 52),
    ]
    for text in texts:
        parser = make_parser(name)
        parse(parser, text, (chunk_size,))
        assert parser.stream.num_examined <= 40 * len(text) + 1000
