"""Calls written as JSON objects with a name and arguments, and the readers that most formats share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.json_scanner import JsonScanner, json_value
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import NotAToolCallError, Steps
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools
from penstock.serve.parsers.value_scanner import scan_value

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "tool_call_id")
_NAME = re.compile(r"[\w.\-]+")
_MAX_NAME = 256


@dataclass(frozen=True, kw_only=True)
class JsonCalls(ToolFormat):
    """A begin marker, one JSON object or a list of objects, an end marker.

    The reader accepts an object or a list everywhere. The grammar forces a list if ``separator`` is None;
    otherwise it forces one object per marker.
    """

    begin: str
    end: str = ""
    """The end marker; "" for formats without one."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    padding: str = ""
    """Text on both sides of the object or list."""
    first_keys: str = ""
    """JSON text that the models write in an object before the name."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin,)

    def read(self, parser: ReasoningToolParser, marker: str) -> Steps[None]:
        yield from read_json_calls(parser)
        if self.end:
            yield from parser.stream.accept("}")  # some models write one brace too many
            yield from read_end(parser, self.end)
        else:
            end_of_calls(parser)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        calls = self.calls(tools)
        if self.separator is None:
            listed = repeated(calls, ", ", parallel)
            return sequence(constant(f"{self.padding}["), listed, constant(f"]{self.end}"))
        return sequence(constant(self.padding), calls, constant(f"{self.padding}{self.end}"))

    def calls(self, tools: Tools) -> Tag:
        """Return the grammar of one call object."""
        return either([self._call(name, schema) for name, schema in tools.schemas.items()])

    def _call(self, name: str, schema: dict[str, object]) -> Tag:
        head = f'{{{self.first_keys}"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": '
        return sequence(constant(head), by_schema(schema), constant("}"))


def read_json_calls(parser: ReasoningToolParser, more: str = "{[") -> Steps[None]:
    """Read call objects and lists of them. Each item after the first begins with a character of `more`."""
    stream = parser.stream
    yield from stream.skip_space()
    while True:
        if (yield from stream.accept("[")):
            yield from read_json_list(parser)
        else:
            yield from read_json_call(parser)
        if not (yield from another_follows(parser, more)):
            return


def read_json_list(parser: ReasoningToolParser, *, bare: bool = False) -> Steps[None]:
    """Read the objects of a list and its end; the "[" is already taken."""
    stream = parser.stream
    while True:
        yield from stream.skip_space()
        yield from read_json_call(parser, bare=bare)
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            break
    yield from stream.expect("]")
    parser.commit()


def another_follows(parser: ReasoningToolParser, firsts: str, *marker: str) -> Steps[bool]:
    """Return whether another call follows that begins with one of `firsts`.

    Takes the optional text between two calls: white space, a comma or semicolon, and a marker.
    """
    stream = parser.stream
    yield from stream.skip_space()
    yield from stream.accept(";", ",")
    yield from stream.skip_space()
    if marker and (yield from stream.accept(*marker)):
        yield from stream.skip_space()
    first = yield from stream.peek()
    return bool(first) and first in firsts


def end_of_calls(parser: ReasoningToolParser) -> None:
    """End calls that have no end marker. Text taken after them becomes content.

    Raises:
        NotAToolCallError: text was taken after the last call.
    """
    if parser.stream.taken:
        raise NotAToolCallError


def read_end(parser: ReasoningToolParser, *ends: str, one_token: bool = False) -> Steps[None]:
    """Read an end marker. At the end of the text it may be missing or incomplete.

    Args:
        one_token: the marker is one token and thus never incomplete: a prefix of it is content.
    """
    stream = parser.stream
    yield from stream.skip_space()
    if (yield from stream.peek()) and not (yield from stream.accept(*ends)):
        if not stream.ended or one_token:
            raise NotAToolCallError
        if stream.take_rest() == "<":
            raise NotAToolCallError  # more likely plain text than the beginning of a marker
    parser.commit()


def read_json_call(parser: ReasoningToolParser, *, bare: bool = False) -> Steps[None]:
    """Read one call object with its keys in any order; other keys are skipped.

    A `bare` object has no marker. It is a call only if it has no unknown key, has both a name and arguments,
    and names a tool of the request.
    """
    stream = parser.stream
    name, held, is_called = "", "", False
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
                _refuse(parser, bare)
            elif held:
                _call_at_once(parser, name, held)
                is_called = True
        elif key in _ARGUMENT_KEYS and name and parser.has_tool(name) and not is_called:
            yield from stream_arguments(parser, name)
            is_called = True
        elif key in _ARGUMENT_KEYS and not name and not held:
            held = yield from _arguments(parser)
        elif bare and key not in _OTHER_KEYS:
            raise NotAToolCallError
        else:
            yield from json_value(stream)
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            break
        yield from stream.skip_space()
    closed = yield from stream.accept("}")
    if not is_called:
        if not closed or not name or bare:
            raise NotAToolCallError
        if parser.has_tool(name):
            _call_at_once(parser, name, "{}")
    parser.commit()


def stream_arguments(parser: ReasoningToolParser, name: str, call_id: str = "") -> Steps[None]:
    """Read the arguments of a call of a known tool and emit them incrementally.

    The call starts when the arguments object has a first key or its end. After that the call is final: if its
    JSON is invalid, the arguments stop there and the rest is content.
    """
    if (yield from parser.stream.peek()) != "{":
        _call_at_once(parser, name, (yield from _arguments(parser)), call_id)
        return
    head: str | None = ""

    def write(piece: str) -> None:
        nonlocal head
        if head is None:
            parser.add_arguments(piece)
            return
        head += piece
        if len(head.rstrip()) > 1:
            parser.start_call(name, call_id)
            parser.add_arguments(head)
            head = None

    yield from scan_value(parser.stream, JsonScanner(), write)
    parser.end_call()


def read_arguments(parser: ReasoningToolParser, name: str, call_id: str = "") -> Steps[None]:
    """Read the arguments after a name. The call of an unknown tool becomes content."""
    if parser.has_tool(name):
        yield from stream_arguments(parser, name, call_id)
    else:
        parser.refuse()
        yield from json_value(parser.stream)


def read_name(parser: ReasoningToolParser) -> Steps[str]:
    """Read a name without quotes."""
    name = yield from parser.stream.run(_NAME, _MAX_NAME)
    return name


def _call_at_once(parser: ReasoningToolParser, name: str, arguments: str, call_id: str = "") -> None:
    parser.start_call(name, call_id)
    parser.add_arguments(arguments)
    parser.end_call()


def _refuse(parser: ReasoningToolParser, bare: bool) -> None:
    if bare:
        raise NotAToolCallError
    parser.refuse()


def read_string(parser: ReasoningToolParser) -> Steps[str]:
    """Read a JSON string."""
    if (yield from parser.stream.peek()) != '"':
        raise NotAToolCallError
    value = json.loads((yield from json_value(parser.stream)))
    assert isinstance(value, str)
    return value


def _arguments(parser: ReasoningToolParser) -> Steps[str]:
    """Read an arguments object, the JSON text of one in a string, or null, which means no arguments."""
    text = yield from json_value(parser.stream)
    if text.startswith('"'):
        text = json.loads(text).strip()
        value = JsonScanner()
        end, text = value.feed(text)
        if not value.done or value.broken or end != len(text):
            raise NotAToolCallError
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise NotAToolCallError
    return text
