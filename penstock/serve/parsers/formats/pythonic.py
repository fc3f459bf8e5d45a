"""Calls written as a Python list: ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock.serve.parsers.formats.arguments import Arguments, comma_separated
from penstock.serve.parsers.formats.json_calls import (
    another_call_follows,
    check_no_text_after_calls,
    read_end_marker,
)
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.python_scanner import PythonScanner
from penstock.serve.parsers.stream import NotAToolCallError, Reader
from penstock.serve.parsers.structural_tags import (
    Tag,
    any_number,
    by_schema,
    constant,
    either,
    optional,
    pattern,
    repeated,
    sequence,
)
from penstock.serve.parsers.tools import Schema, Tools
from penstock.serve.parsers.value_scanner import scan_value

_NAME = re.compile(r"[\w.\-]+")
_MAX_NAME_LENGTH = 256


@dataclass(frozen=True, kw_only=True)
class PythonicCalls(ToolFormat):
    """A Python list of calls with keyword arguments and literal values, with or without markers."""

    begin: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin,)

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        yield from parser.stream.skip_space()
        while True:
            yield from _read_list(parser)
            if not (yield from another_call_follows(parser, "[")):
                break
        if marker:
            yield from read_end_marker(parser, self.end)
        else:
            check_no_text_after_calls(parser)

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        return self._list_tag(tools, parallel) if self.unmarked_starts else super().grammar(tools, parallel)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        return sequence(self._list_tag(tools, parallel), constant(self.end))

    def _list_tag(self, tools: Tools, parallel: bool) -> Tag:
        calls = either([call_grammar(name, schema) for name, schema in tools.schemas.items()])
        return sequence(constant("["), repeated(calls, ", ", parallel), constant("]"))


def _read_list(parser: ReasoningToolParser) -> Reader[None]:
    stream = parser.stream
    yield from stream.expect("[")
    yield from stream.skip_space()
    while not (yield from stream.accept("]")):
        yield from read_call(parser)
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            yield from stream.expect("]")
            break
        yield from stream.skip_space()
    parser.commit()


def read_call(parser: ReasoningToolParser) -> Reader[None]:
    """Read the call ``name(a=1, b="x")`` and emit its arguments as JSON.

    Raises:
        NotAToolCallError: the text is not a call of this form, or the request has no tool of this name.
    """
    name = yield from parser.stream.take_run(_NAME, _MAX_NAME_LENGTH)
    yield from parser.stream.expect("(")
    if not parser.has_tool(name):
        raise NotAToolCallError
    yield from read_keywords(parser, name)


def read_keywords(parser: ReasoningToolParser, name: str) -> Reader[None]:
    """Read ``a=1, b="x")`` after the opening parenthesis of a call. Emit the call with its arguments as JSON.

    Raises:
        NotAToolCallError: the text does not have this form.
    """
    stream = parser.stream
    separator = "{"
    yield from stream.skip_space()
    while not (yield from stream.accept(")")):
        keyword = yield from stream.take_run(_NAME, _MAX_NAME_LENGTH)
        yield from stream.skip_space()
        yield from stream.expect("=")
        yield from stream.skip_space()
        # A call begins after the first "=", because content can also contain a tool name and a parenthesis.
        if separator == "{":
            parser.start_call(name)
        parser.add_arguments(f"{separator}{json.dumps(keyword, ensure_ascii=False)}: ")
        separator = ", "
        yield from scan_value(stream, PythonScanner(), parser.add_arguments)
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            yield from stream.expect(")")
            break
        yield from stream.skip_space()
    if separator == "{":
        parser.start_call(name)
        parser.add_arguments("{")
    parser.add_arguments("}")
    parser.end_call()


def call_grammar(name: str, schema: Schema) -> Tag:
    """Return the grammar of one call: keyword arguments with JSON values.

    Required arguments come first, then optional arguments, both in schema order. If the schema does not
    restrict the arguments, up to 64 arguments with any names are allowed.

    Raises:
        UnsupportedSchemaError: a keyword of the schema restricts the object as a whole.
    """
    arguments = Arguments.from_schema(schema)
    parts = [constant(f"{name}(")]
    if arguments.is_unrestricted:
        keyword = sequence(pattern("[A-Za-z_][A-Za-z0-9_]{0,63}"), constant("="), by_schema(True))
        further_keywords = any_number(sequence(constant(", "), keyword))
        return sequence(*parts, optional(sequence(keyword, further_keywords)), constant(")"))
    keyword_tags = {
        key: sequence(constant(f"{key}="), by_schema(value)) for key, value in arguments.schemas.items()
    }
    required_tags = [tag for key, tag in keyword_tags.items() if key in arguments.required]
    optional_tags = [tag for key, tag in keyword_tags.items() if key not in arguments.required]
    return sequence(*parts, comma_separated(required_tags, optional_tags, ", "), constant(")"))
