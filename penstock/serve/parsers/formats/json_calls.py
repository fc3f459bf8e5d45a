"""Calls that are JSON objects with a name and arguments, and the readers that most formats share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.json_scanner import JsonScanner, json_value
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import NotAToolCallError, Reader
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools
from penstock.serve.parsers.value_scanner import scan_value

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "tool_call_id")
_NAME = re.compile(r"[\w.\-]+")
_MAX_NAME_LENGTH = 256


@dataclass(frozen=True, kw_only=True)
class JsonCalls(ToolFormat):
    """Calls between a begin marker and an end marker, as one JSON object or a list of objects.

    The reader always accepts both an object and a list. The grammar forces a list if ``separator`` is None,
    else one object per marker.
    """

    begin: str
    end: str = ""
    """The end marker; "" for formats without one."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    padding: str = ""
    """Text on both sides of an object, or before a list."""
    first_members: str = ""
    """JSON text of the members that the model writes before the name."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin,)

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        yield from read_json_calls(parser)
        if self.end:
            yield from parser.stream.accept("}")  # some models write an additional closing brace
            yield from read_end_marker(parser, self.end)
        else:
            check_no_text_after_calls(parser)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        calls = self.call_tag(tools)
        if self.separator is None:
            call_list = repeated(calls, ", ", parallel)
            return sequence(constant(f"{self.padding}["), call_list, constant(f"]{self.end}"))
        return sequence(constant(self.padding), calls, constant(f"{self.padding}{self.end}"))

    def call_tag(self, tools: Tools) -> Tag:
        """Return the grammar of one call object."""
        return either([self._call_tag(name, schema) for name, schema in tools.schemas.items()])

    def _call_tag(self, name: str, schema: dict[str, object]) -> Tag:
        call_begin = f'{{{self.first_members}"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": '
        return sequence(constant(call_begin), by_schema(schema), constant("}"))


def read_json_calls(parser: ReasoningToolParser, call_starts: str = "{[") -> Reader[None]:
    """Read call objects and lists of call objects, one after another.

    Args:
        parser: the parser of the output.
        call_starts: the characters that may begin a further object or list.
    """
    stream = parser.stream
    yield from stream.skip_space()
    while True:
        if (yield from stream.accept("[")):
            yield from read_json_list(parser)
        else:
            yield from read_json_call(parser)
        if not (yield from another_call_follows(parser, call_starts)):
            return


def read_json_list(parser: ReasoningToolParser, *, is_unmarked: bool = False) -> Reader[None]:
    """Read the objects of a list and the closing bracket. The caller has taken the opening bracket."""
    stream = parser.stream
    while True:
        yield from stream.skip_space()
        yield from read_json_call(parser, is_unmarked=is_unmarked)
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            break
    yield from stream.expect("]")
    parser.commit()


def another_call_follows(parser: ReasoningToolParser, call_starts: str, *marker: str) -> Reader[bool]:
    """Skip the text between two calls. Return whether the next character is in `call_starts`.

    The text between two calls is white space, an optional comma or semicolon, and an optional marker.
    """
    stream = parser.stream
    yield from stream.skip_space()
    yield from stream.accept(";", ",")
    yield from stream.skip_space()
    if marker and (yield from stream.accept(*marker)):
        yield from stream.skip_space()
    next_character = yield from stream.peek()
    return bool(next_character) and next_character in call_starts


def check_no_text_after_calls(parser: ReasoningToolParser) -> None:
    """Check, for formats without an end marker, that the reader took no text after the last call.

    Raises:
        NotAToolCallError: the reader took text after the last call. The parser emits this text as content.
    """
    if parser.stream.taken_text:
        raise NotAToolCallError


def read_end_marker(
    parser: ReasoningToolParser, *end_markers: str, is_single_token: bool = False
) -> Reader[None]:
    """Read an end marker. The marker may be missing or incomplete at the end of the text.

    Args:
        parser: the parser of the output.
        *end_markers: the accepted end markers.
        is_single_token: whether the marker is a single token. An incomplete marker is then content, because a
            token is never incomplete.

    Raises:
        NotAToolCallError: other text follows the calls; or the text ends with ``<``, or with a part of a
            single-token marker.
    """
    stream = parser.stream
    yield from stream.skip_space()
    if (yield from stream.peek()) and not (yield from stream.accept(*end_markers)):
        if not stream.has_ended or is_single_token:
            raise NotAToolCallError
        if stream.take_rest() == "<":
            raise NotAToolCallError  # more likely content than the beginning of a marker
    parser.commit()


def read_json_call(parser: ReasoningToolParser, *, is_unmarked: bool = False) -> Reader[None]:
    """Read one call object. The keys of the object can have any order.

    After a marker, unknown keys are skipped and the arguments may be missing. After the arguments, the
    closing brace may be missing. An object without a marker (`is_unmarked`) is a call only if it has no
    unknown key, has both a name and arguments, and names a tool of the request.

    Raises:
        NotAToolCallError: the text is not a call.
    """
    stream = parser.stream
    name, pending_arguments, is_called = "", "", False
    yield from stream.expect("{")
    yield from stream.skip_space()
    while True:
        key = yield from read_string(parser)
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        if key in _NAME_KEYS and not name:
            name = yield from read_string(parser)
            if not parser.has_tool(name):
                _reject_unknown_tool(parser, is_unmarked)
            elif pending_arguments:
                _emit_call(parser, name, pending_arguments)
                is_called = True
        elif key in _ARGUMENT_KEYS and name and parser.has_tool(name) and not is_called:
            yield from stream_arguments(parser, name)
            is_called = True
        elif key in _ARGUMENT_KEYS and not name and not pending_arguments:
            pending_arguments = yield from _read_arguments_text(parser)
        elif is_unmarked and key not in _OTHER_KEYS:
            raise NotAToolCallError
        else:
            yield from json_value(stream)
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            break
        yield from stream.skip_space()
    has_brace = yield from stream.accept("}")
    if not is_called:
        if not has_brace or not name or is_unmarked:
            raise NotAToolCallError
        if parser.has_tool(name):
            _emit_call(parser, name, "{}")
    parser.commit()


def stream_arguments(parser: ReasoningToolParser, name: str, call_id: str = "") -> Reader[None]:
    """Read and emit the arguments of a call of a known tool. An object is emitted incrementally.

    `ToolCallStart` is emitted when a character other than white space has arrived after the opening brace. If
    the JSON becomes invalid later, the arguments end there, and the text after them is content.
    """
    if (yield from parser.stream.peek()) != "{":
        _emit_call(parser, name, (yield from _read_arguments_text(parser)), call_id)
        return
    pending_text: str | None = ""  # arguments before the emission of `ToolCallStart`, then None

    def emit_arguments(text: str) -> None:
        nonlocal pending_text
        if pending_text is None:
            parser.add_arguments(text)
            return
        pending_text += text
        if len(pending_text.rstrip()) > 1:
            parser.start_call(name, call_id)
            parser.add_arguments(pending_text)
            pending_text = None

    yield from scan_value(parser.stream, JsonScanner(), emit_arguments)
    parser.end_call()


def read_arguments(parser: ReasoningToolParser, name: str, call_id: str = "") -> Reader[None]:
    """Read the arguments of a call of the tool `name`. A call of an unknown tool becomes content."""
    if parser.has_tool(name):
        yield from stream_arguments(parser, name, call_id)
    else:
        parser.mark_unknown_tool()
        yield from json_value(parser.stream)


def read_name(parser: ReasoningToolParser) -> Reader[str]:
    """Read a tool name that is not in quotes, and return it."""
    name = yield from parser.stream.take_run(_NAME, _MAX_NAME_LENGTH)
    return name


def _emit_call(parser: ReasoningToolParser, name: str, arguments: str, call_id: str = "") -> None:
    parser.start_call(name, call_id)
    parser.add_arguments(arguments)
    parser.end_call()


def _reject_unknown_tool(parser: ReasoningToolParser, is_unmarked: bool) -> None:
    if is_unmarked:
        raise NotAToolCallError
    parser.mark_unknown_tool()


def read_string(parser: ReasoningToolParser) -> Reader[str]:
    """Read a JSON string and return its value.

    Raises:
        NotAToolCallError: the text does not begin with a string.
    """
    if (yield from parser.stream.peek()) != '"':
        raise NotAToolCallError
    value = json.loads((yield from json_value(parser.stream)))
    assert isinstance(value, str)
    return value


def _read_arguments_text(parser: ReasoningToolParser) -> Reader[str]:
    """Read arguments and return them as the JSON text of an object.

    Models write an object, a string with the JSON text of an object, or null for no arguments.

    Raises:
        NotAToolCallError: the text is none of these values.
    """
    text = yield from json_value(parser.stream)
    if text.startswith('"'):
        text = json.loads(text).strip()
        scanner = JsonScanner()
        end, text = scanner.feed(text)
        if not scanner.is_complete or scanner.is_invalid or end != len(text):
            raise NotAToolCallError
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise NotAToolCallError
    return text
