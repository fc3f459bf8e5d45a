"""Calls of Llama 3.1 to 3.3: ``{"name": "f", "parameters": {"a": 1}}``, or ``<|python_tag|>f.call(a="b")``.

``<|python_tag|>`` before an object is optional, and objects may be in a list. Between two calls, a
``;`` or ``,`` and white space are optional.
"""

from __future__ import annotations

from penstock.serve.parsers.formats.json_calls import (
    JsonCalls,
    another_call_follows,
    check_no_text_after_calls,
    read_json_call,
    read_json_list,
    read_name,
)
from penstock.serve.parsers.formats.pythonic import read_keywords
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import NotAToolCallError, Reader
from penstock.serve.parsers.structural_tags import Tag, repeated
from penstock.serve.parsers.tools import Tools


class Llama3Calls(JsonCalls):
    """JSON objects with or without a marker, or one call of a built-in tool after ``<|python_tag|>``."""

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        yield from stream.skip_space()
        if marker and (yield from stream.peek()) not in ("{", "["):
            yield from self._read_built_in_call(parser)
            return
        while True:
            if (yield from stream.accept("[")):
                yield from read_json_list(parser, is_unmarked=True)
            else:
                yield from read_json_call(parser, is_unmarked=True)
            if not (yield from another_call_follows(parser, self.unmarked_starts, self.begin)):
                break
        check_no_text_after_calls(parser)

    def _read_built_in_call(self, parser: ReasoningToolParser) -> Reader[None]:
        name = yield from read_name(parser)
        tool_name = name.removesuffix(".call")
        if tool_name == name or not parser.has_tool(tool_name):
            raise NotAToolCallError
        yield from parser.stream.expect("(")
        yield from read_keywords(parser, tool_name)

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        return repeated(self.call_tag(tools), "; ", parallel)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        return self.grammar(tools, parallel)
