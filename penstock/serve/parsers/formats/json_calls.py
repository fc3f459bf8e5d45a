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
            yield from parser.stream.accept("}")  # some models write one too many
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
        """One object."""
        return either([self._call(name, schema) for name, schema in tools.schemas.items()])

    def _call(self, name: str, schema: dict[str, object]) -> Tag:
        head = f'{{{self.first_keys}"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": '
        return sequence(constant(head), by_schema(schema), constant("}"))


def read_json_calls(parser: ReasoningToolParser, more: str = "{[") -> Steps[None]:
    """Objects and lists of them, one or several; those after the first begin with one of `more`."""
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
    """Objects and the end of the list that has begun."""
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
    """Whether another call follows the one at hand, and begins with one of `firsts`.

    Takes what stands between the two: white space, a comma or semicolon, and a marker, all of them optional.
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
    """Ends calls that no marker ends: what was taken behind them is text.

    Raises:
        NotAToolCallError: something was taken.
    """
    if parser.stream.taken:
        raise NotAToolCallError


def read_end(parser: ReasoningToolParser, *ends: str, one_token: bool = False) -> Steps[None]:
    """The end marker. It may be missing or cut short where the text ends; before more text it may not.

    Args:
        one_token: the marker is one token, so that it is never cut short: its beginning is text.
    """
    stream = parser.stream
    yield from stream.skip_space()
    if (yield from stream.peek()) and not (yield from stream.accept(*ends)):
        if not stream.ended or one_token:
            raise NotAToolCallError
        if stream.take_rest() == "<":
            raise NotAToolCallError  # more likely text than the first character of a marker
    parser.commit()


def read_json_call(parser: ReasoningToolParser, *, bare: bool = False) -> Steps[None]:
    """One object, its keys in any order; keys that are of no use are skipped.

    `bare` objects have no marker before them, so that they must look like nothing else: only known keys, both
    name and arguments, and the name of a tool.
    """
    stream = parser.stream
    name, held, is_called = "", "", False
    yield from stream.expect("{")
    yield from stream.skip_space()
    while True:
        key = yield from _string(parser)
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        if key in _NAME_KEYS and not name:
            name = yield from _string(parser)
            if not parser.knows(name):
                _refuse(parser, bare)
            elif held:
                _call_at_once(parser, name, held)
                is_called = True
        elif key in _ARGUMENT_KEYS and name and parser.knows(name) and not is_called:
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
        if parser.knows(name):
            _call_at_once(parser, name, "{}")
    parser.commit()


def stream_arguments(parser: ReasoningToolParser, name: str, call_id: str = "") -> Steps[None]:
    """The arguments of a call whose name is known, passed on as they come.

    The call begins when its object of arguments has begun well, with a key or its end. From there on it stays
    a call: where its JSON breaks off, its arguments break off, and the rest is text.
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
    """The arguments behind a name; those of an unknown tool become text, with what is around them."""
    if parser.knows(name):
        yield from stream_arguments(parser, name, call_id)
    else:
        parser.refuse()
        yield from json_value(parser.stream)


def read_name(parser: ReasoningToolParser) -> Steps[str]:
    """A name without quotes."""
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


def _string(parser: ReasoningToolParser) -> Steps[str]:
    if (yield from parser.stream.peek()) != '"':
        raise NotAToolCallError
    value = json.loads((yield from json_value(parser.stream)))
    assert isinstance(value, str)
    return value


def _arguments(parser: ReasoningToolParser) -> Steps[str]:
    """An object; the same in a string, as some models write it; null for none."""
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
