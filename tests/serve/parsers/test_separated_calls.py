"""Tool calls in an output: text around calls, several calls, ids, incomplete calls and irregular markup."""

from __future__ import annotations

import pytest
from support.call_formats import (
    FORMATS_WITHOUT_MARKER,
    RENDERERS,
    SINGLE_CALL_FORMATS,
    TOOLS,
    Call,
    collect_calls,
    deepseek_markup,
    parse,
)

from penstock.serve.parsers import Content, Event, ParserFactory, ToolCallStart
from penstock.serve.parsers.formats import TOOL_FORMATS

FORMATS = pytest.mark.parametrize("name", list(TOOL_FORMATS))
FORMATS_WITH_SEVERAL_CALLS = pytest.mark.parametrize(
    "name", [name for name in TOOL_FORMATS if name not in SINGLE_CALL_FORMATS]
)
SEARCH, NOW = Call("search", {"text": "x"}), Call("now")


def parse_text(name: str, text: str) -> tuple[list[Call], str]:
    """Return the calls and the content of a text. Check that the events do not depend on chunking."""
    events = parse_events(name, text)
    call_events = [event for event in events if not isinstance(event, Content)]
    return collect_calls(call_events), "".join(event.text for event in events if isinstance(event, Content))


def parse_events(name: str, text: str) -> list[Event]:
    parsers = ParserFactory.choose(None, name, "harmony" if name == "harmony" else "think")
    events = parse(parsers.new(tools=TOOLS, new_id=lambda: "new"), text)
    for size in (1, 2, 3, 7):
        assert parse(parsers.new(tools=TOOLS, new_id=lambda: "new"), text, (size,)) == events
    return events


@FORMATS_WITH_SEVERAL_CALLS
@pytest.mark.parametrize("separator", ["", " ", "\n", "\n\n", " \r\n\t"])
def test_white_space_between_calls_is_ignored(name: str, separator: str) -> None:
    expected_calls = [SEARCH, NOW, SEARCH]
    assert parse_text(name, separator.join(RENDERERS[name]([call]) for call in expected_calls)) == (
        expected_calls,
        "",
    )


@pytest.mark.parametrize("name", FORMATS_WITHOUT_MARKER)
@pytest.mark.parametrize("separator", [";", "; ", ",", ", ", ",\n", " ;\n"])
def test_separators_between_calls_without_markers_are_ignored(name: str, separator: str) -> None:
    expected_calls = [SEARCH, NOW, SEARCH]
    text = separator.join(RENDERERS[name]([call]) for call in expected_calls)
    assert parse_text(name, text) == (expected_calls, "")
    assert parse_text(name, f"I look. {text}") == (expected_calls, "I look.")


@pytest.mark.matrix
@FORMATS
@pytest.mark.parametrize(
    "text_before", ["I will look. ", "I will look.\n\n", "Sure!", "See:\n", "a < b, [1] {2}: "]
)
@pytest.mark.parametrize(
    "text_after", ["", " Done.", "\nDone.", "; or", ", [1] and {2}", "<", " <", "<b", "< |", ":"]
)
def test_text_around_a_call_is_content(name: str, text_before: str, text_after: str) -> None:
    calls, content = parse_text(name, text_before + RENDERERS[name]([SEARCH]) + text_after)
    assert calls == [SEARCH]
    assert content == text_before.rstrip() + text_after


@FORMATS_WITH_SEVERAL_CALLS
def test_text_between_calls_is_content(name: str) -> None:
    render = RENDERERS[name]
    assert parse_text(name, f"{render([SEARCH])}\nand then\n{render([NOW])}") == ([SEARCH, NOW], "and then")


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("hermes", "<tool_call>", "</tool_call>"),
        ("apriel", "<tool_calls>", "</tool_calls>"),
        ("cohere", "<|START_ACTION|>", "<|END_ACTION|>"),
        ("granite", "<|tool_call|>", ""),
        ("firefunction", "functools", ""),
        ("mistral_v3", "[TOOL_CALLS]", ""),
        ("llama3_json", "<|python_tag|>", ""),
        ("llama3_json", "", ""),
    ],
)
@pytest.mark.parametrize("separator", ["", " ", "\n", ", ", "; "])
def test_consecutive_json_objects_are_calls(name: str, begin: str, end: str, separator: str) -> None:
    call_json = '{"name": "search", "arguments": {"text": "x"}}'
    text = f"{begin}{call_json}{separator}{call_json.replace('search', 'now')}{end}"
    calls = [SEARCH, Call("now", {"text": "x"})]
    assert parse_text(name, text) == (calls, "")
    assert parse_text(name, f"{text}, so") == (calls, ", so")


@pytest.mark.parametrize("text", ["[CALL, CALL]", "[CALL]", "[\n CALL,\n CALL\n]", "So: [CALL]; CALL"])
def test_lists_of_calls_in_the_llama_format_are_parsed(text: str) -> None:
    calls, content = parse_text("llama3_json", text.replace("CALL", '{"name": "now", "parameters": {}}'))
    assert calls == [NOW] * text.count("CALL")
    assert content == text.partition("[")[0].rstrip()


@FORMATS
def test_an_incomplete_call_is_not_content(name: str) -> None:
    """After `ToolCallStart`, no text of an incomplete call is content, except "<" of an incomplete marker."""
    text = RENDERERS[name]([SEARCH])
    for end in range(len(text)):
        events = parse_events(name, text[:end])
        if not any(isinstance(event, ToolCallStart) for event in events):
            continue
        content = "".join(event.text for event in events if isinstance(event, Content))
        assert content in ("", "<")


@pytest.mark.parametrize(
    ("written_id", "call_id"),
    [
        ("functions.search:0", "functions.search:0"),
        ("functions.search:17", "functions.search:17"),
        ("functions.search", "functions.search:0"),
        ("search:0", "functions.search:0"),
        ("search", "functions.search:0"),
        ("functions.search:", "functions.search:0"),
        ("functions.search:x", "functions.search:0"),
        (" functions.search:0\n", "functions.search:0"),
    ],
)
def test_ids_of_kimi_are_kept_if_valid(written_id: str, call_id: str) -> None:
    """An invalid or repeated id is replaced. A call of an unknown tool is content."""
    text = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{written_id}<|tool_call_argument_begin|>"
        '{"text": "x"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    assert parse_text("kimi_k2", text) == ([SEARCH], "")
    [start] = [event for event in parse_events("kimi_k2", text) if isinstance(event, ToolCallStart)]
    assert start.id == call_id
    starts = [event for event in parse_events("kimi_k2", text * 3) if isinstance(event, ToolCallStart)]
    assert len({start.id for start in starts}) == 3
    assert all(start.id.startswith("functions.search:") for start in starts)
    unknown_call = text.replace("search", "other")
    assert parse_text("kimi_k2", unknown_call) == ([], unknown_call)


def test_a_duplicate_call_id_is_replaced() -> None:
    call_text = "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"
    starts = [event for event in parse_events("mistral", call_text * 2) if isinstance(event, ToolCallStart)]
    assert [start.id for start in starts] == ["abcdefghi", "new"]


@pytest.mark.parametrize("remainder", ["<", "<|", "<|call", "<|call|", "<<", "< b", "<|end"])
def test_text_after_a_harmony_call_that_resembles_a_marker_is_content(remainder: str) -> None:
    text = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"text": "x"}'
    assert parse_text("harmony", text + remainder) == ([SEARCH], remainder)
    assert parse_text("harmony", f"{text}<|call|>{remainder}") == ([SEARCH], remainder)


@pytest.mark.matrix(strength=1, times=2)
@FORMATS
@pytest.mark.parametrize("length", [200, 255, 256, 257, 258, 300, 600])
def test_parsing_of_long_names_does_not_depend_on_chunking(name: str, length: int) -> None:
    call = RENDERERS[name]([SEARCH])
    [marker, *_] = TOOL_FORMATS[name].markers
    for filler in ("a" * length, f"{'b' * (length - 5)}{call}", f"<function={'c' * (length - 20)}{call}"):
        for beginning in (marker, call[: call.index("search")], call[: call.index("text")]):
            parse_events(name, beginning + filler + call)


IRREGULAR_MARKUP = {
    "hermes": ['<tool_call>\n{"name": "search", "arguments": {"text": "x"}}}\n</tool_call>'],
    "qwen3_coder": [
        "<tool_call>\n<function=search>\n<parameter=text>\nx\n</parameter>\n</tool_call>",
        "<function=search>\n<parameter=text>\nx\n</parameter>\n</tool_call>",
    ],
    "kimi_k2": [
        "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
        '{"text": "x"}<|tool_call_end|><|tool_calls_section_end|>',
        '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"text": "x"}<|tool_call_end|>',
    ],
    "deepseek_v31": [deepseek_markup('<|tool~call~begin|>search<|tool~sep|>{"text": "x"}<|tool~call~end|>')],
    "deepseek_v3": [
        deepseek_markup('<|tool~calls~begin|><|tool~call~begin|>function<|tool~sep|>search\n{"text": "x"}')
        + deepseek_markup("<|tool~call~end|><|tool~calls~end|>"),
    ],
    "harmony": [
        '<|channel|>commentary to=search <|constrain|>json<|message|>{"text": "x"}',
        ' to=search<|channel|>commentary json<|message|>{"text": "x"}',
    ],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in IRREGULAR_MARKUP for text in IRREGULAR_MARKUP[name]]
)
def test_missing_or_repeated_markup_is_tolerated(name: str, text: str) -> None:
    assert parse_text(name, text) == ([SEARCH], "")
    assert parse_text(name, f"{text} so") == ([SEARCH], " so")
    unknown_call = text.replace("search", "other")
    assert parse_text(name, unknown_call)[0] == []


def test_a_marker_in_text_does_not_hide_a_call() -> None:
    call = RENDERERS["functionary"]([SEARCH])
    assert parse_text("functionary", f"<function= in text, {call}") == ([SEARCH], "<function= in text,")
    call = RENDERERS["qwen3_coder"]([SEARCH])
    assert parse_text("qwen3_coder", f"<function= in text, {call}") == ([SEARCH], "<function= in text,")
