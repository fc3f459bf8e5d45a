"""Calls of DeepSeek V3, R1 and V3.1.

V3.1 writes
``<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|><|tool_calls_end|>``
without line ends, where each bar is U+FF5C and each underscore U+2581. V3 and R1 write
``function<|tool_sep|>f`` and put the arguments into a ``json`` code fence.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_arguments, read_end_marker, read_name
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import MarkerSearch, NotAToolCallError, Reader
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools

_CALLS_BEGIN, _CALLS_END = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
_CALL_BEGIN, _CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_NAME_END = MarkerSearch([_SEPARATOR])


@dataclass(frozen=True, kw_only=True)
class DeepSeekCalls(ToolFormat):
    """Calls of DeepSeek V3, R1 and V3.1.

    The reader accepts arguments with and without a code fence, whatever `is_fenced` is.
    """

    is_fenced: bool
    """Whether the model writes the arguments in a code fence. The grammar forces this variant."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (_CALLS_BEGIN, _CALL_BEGIN)  # models sometimes omit the outer marker

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        yield from stream.skip_space()
        while marker == _CALL_BEGIN or (yield from stream.accept(_CALL_BEGIN)):
            marker = ""
            name = (yield from stream.take_until(_NAME_END, 256)).strip()
            yield from stream.skip_space()
            is_fenced = False
            if (yield from stream.peek()) != "{":
                if name != "function":
                    raise NotAToolCallError
                name = yield from read_name(parser)
                yield from stream.skip_space()
                is_fenced = bool((yield from stream.accept("```json")))
                yield from stream.skip_space()
            yield from read_arguments(parser, name)
            if is_fenced:
                yield from read_end_marker(parser, "```")
            yield from read_end_marker(parser, _CALL_END)
            yield from stream.skip_space()
        yield from read_end_marker(parser, _CALLS_END)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        def call_begin(name: str) -> str:
            return f"function{_SEPARATOR}{name}\n```json\n" if self.is_fenced else f"{name}{_SEPARATOR}"

        begin = "" if marker == _CALL_BEGIN else _CALL_BEGIN
        calls = [
            sequence(
                constant(begin + call_begin(name)),
                by_schema(schema),
                constant(("\n```" if self.is_fenced else "") + _CALL_END),
            )
            for name, schema in tools.schemas.items()
        ]
        if marker == _CALL_BEGIN:
            return either(calls)
        separator = "\n" if self.is_fenced else ""
        return sequence(repeated(either(calls), separator, parallel), constant(_CALLS_END))
