"""Calls written as JSON objects with a name and arguments: the reader that most formats share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock.serve.parsers.json_scanner import JsonScanner, json_value
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import NotAToolCallError, Steps
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "tool_call_id")
_NAME = re.compile(r"[\w.\-]+")
_MAX_NAME = 256


@dataclass(frozen=True)
class JsonCalls:
    """A marker, one JSON object or a list of them, an end marker.

    Readers take either shape; `is_list` says which one the format's templates write and its grammar forces.
    """

    name: str
    begin: str
    end: str = ""
    is_list: bool = False
    hints: tuple[str, ...] = ()
    name_key: str = "name"
    arguments_key: str = "arguments"
    padding: str = ""
    """Stands on both sides of the object."""
    separator: str = ""
    """Stands between two calls, each with its own markers."""
    first_keys: str = ""
    """What the templates write in an object before the name."""
    more_begins: tuple[str, ...] = ()
    bare: str = ""
    bare_in_text: bool = False
    id_length: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, *self.more_begins)

    def suits(self, template: str) -> bool:
        return all(hint in template for hint in self.hints)

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        yield from read_json_calls(answer)
        if self.end:
            yield from answer.stream.accept("}")  # some models write one too many
            yield from read_end(answer, self.end)
        else:
            end_of_calls(answer)

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        one = sequence(constant(self.begin), self.behind(self.begin, tools, parallel))
        return one if self.is_list else repeated(one, self.separator, parallel)

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        calls = self.calls(tools)
        if self.is_list:
            listed = repeated(calls, ", ", parallel)
            return sequence(constant(f"{self.padding}["), listed, constant(f"]{self.end}"))
        return sequence(constant(self.padding), calls, constant(f"{self.padding}{self.end}"))

    def calls(self, tools: Tools) -> Tag:
        """One object."""
        return either([self._call(name, schema) for name, schema in tools.schemas.items()])

    def _call(self, name: str, schema: dict[str, object]) -> Tag:
        head = f'{{{self.first_keys}"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": '
        return sequence(constant(head), by_schema(schema), constant("}"))


def read_json_calls(answer: ReasoningToolParser, more: str = "{[") -> Steps[None]:
    """Objects and lists of them, one or several; those after the first begin with one of `more`."""
    stream = answer.stream
    yield from stream.skip_space()
    while True:
        if (yield from stream.accept("[")):
            yield from read_json_list(answer)
        else:
            yield from read_json_call(answer)
        if not (yield from another_follows(answer, more)):
            return


def read_json_list(answer: ReasoningToolParser, *, bare: bool = False) -> Steps[None]:
    """Objects and the end of the list that has begun."""
    stream = answer.stream
    while True:
        yield from stream.skip_space()
        yield from read_json_call(answer, bare=bare)
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            break
    yield from stream.expect("]")
    answer.commit()


def another_follows(answer: ReasoningToolParser, firsts: str, *marker: str) -> Steps[bool]:
    """Whether another call follows the one at hand, and begins with one of `firsts`.

    Takes what stands between the two: white space, a comma or semicolon, and a marker, all of them optional.
    """
    stream = answer.stream
    yield from stream.skip_space()
    yield from stream.accept(";", ",")
    yield from stream.skip_space()
    if marker and (yield from stream.accept(*marker)):
        yield from stream.skip_space()
    first = yield from stream.peek()
    return bool(first) and first in firsts


def end_of_calls(answer: ReasoningToolParser) -> None:
    """Ends calls that no marker ends: what was taken behind them is text.

    Raises:
        NotAToolCallError: something was taken.
    """
    if answer.stream.taken:
        raise NotAToolCallError


def read_end(answer: ReasoningToolParser, *ends: str, one_token: bool = False) -> Steps[None]:
    """The end marker. It may be missing or cut short where the text ends; before more text it may not.

    Args:
        one_token: the marker is one token, so that it is never cut short: its beginning is text.
    """
    stream = answer.stream
    yield from stream.skip_space()
    if (yield from stream.peek()) and not (yield from stream.accept(*ends)):
        if not stream.ended or one_token:
            raise NotAToolCallError
        if stream.take_rest() == "<":
            raise NotAToolCallError  # more likely text than the first character of a marker
    answer.commit()


def read_json_call(answer: ReasoningToolParser, *, bare: bool = False) -> Steps[None]:
    """One object, its keys in any order; keys that are of no use are skipped.

    `bare` objects have no marker before them, so that they must look like nothing else: only known keys, both
    name and arguments, and the name of a tool.
    """
    stream = answer.stream
    name, held, is_called = "", "", False
    yield from stream.expect("{")
    yield from stream.skip_space()
    while True:
        key = yield from _string(answer)
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        if key in _NAME_KEYS and not name:
            name = yield from _string(answer)
            if not answer.knows(name):
                _refuse(answer, bare)
            elif held:
                _call_at_once(answer, name, held)
                is_called = True
        elif key in _ARGUMENT_KEYS and name and answer.knows(name) and not is_called:
            yield from stream_arguments(answer, name)
            is_called = True
        elif key in _ARGUMENT_KEYS and not name and not held:
            held = yield from _arguments(answer)
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
        if answer.knows(name):
            _call_at_once(answer, name, "{}")
    answer.commit()


def stream_arguments(answer: ReasoningToolParser, name: str, call_id: str = "") -> Steps[None]:
    """The arguments of a call whose name is known, passed on as they come.

    The call begins when its object of arguments has begun well, with a key or its end. From there on it stays
    a call: where its JSON breaks off, its arguments break off, and the rest is text.
    """
    stream = answer.stream
    if (yield from stream.peek()) != "{":
        _call_at_once(answer, name, (yield from _arguments(answer)), call_id)
        return
    value = JsonScanner()
    begun, started = "", False
    while not value.done:
        text, at = yield from stream.available()
        end, piece = value.feed(text, at)
        stream.num_looked_at += end - at + 1
        stream.take(end - at)
        if not started:
            begun += piece
            started = len(begun.rstrip()) > 1
            if started:
                answer.start_call(name, call_id)
                answer.add_arguments(begun)
        else:
            answer.add_arguments(piece)
        if value.broken or at == len(text):
            raise NotAToolCallError
    answer.end_call()


def read_arguments(answer: ReasoningToolParser, name: str, call_id: str = "") -> Steps[None]:
    """The arguments behind a name; those of an unknown tool become text, with what is around them."""
    if answer.knows(name):
        yield from stream_arguments(answer, name, call_id)
    else:
        answer.refuse()
        yield from json_value(answer.stream)


def read_name(answer: ReasoningToolParser) -> Steps[str]:
    """A name without quotes."""
    name = yield from answer.stream.run(_NAME, _MAX_NAME)
    return name


def _call_at_once(answer: ReasoningToolParser, name: str, arguments: str, call_id: str = "") -> None:
    answer.start_call(name, call_id)
    answer.add_arguments(arguments)
    answer.end_call()


def _refuse(answer: ReasoningToolParser, bare: bool) -> None:
    if bare:
        raise NotAToolCallError
    answer.refuse()


def _string(answer: ReasoningToolParser) -> Steps[str]:
    if (yield from answer.stream.peek()) != '"':
        raise NotAToolCallError
    value = json.loads((yield from json_value(answer.stream)))
    assert isinstance(value, str)
    return value


def _arguments(answer: ReasoningToolParser) -> Steps[str]:
    """An object; the same in a string, as some models write it; null for none."""
    text = yield from json_value(answer.stream)
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
