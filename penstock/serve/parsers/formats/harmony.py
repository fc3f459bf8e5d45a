"""Calls as ``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>``.

The name may also stand before the channel:
``<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}``.
The output begins after ``<|start|>assistant``. The first call ends the turn, so a turn has at most one call.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_arguments, read_end_marker
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import MarkerSearch, NotAToolCallError, Reader
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, sequence
from penstock.serve.parsers.tools import Tools

_RECIPIENT, _TOOL_PREFIX = "to=", "functions."
_START, _CHANNEL, _MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
_HEADER_END = MarkerSearch([_MESSAGE])
_MAX_HEADER_LENGTH = 256


@dataclass(frozen=True)
class HarmonyCalls(ToolFormat):
    """Calls as messages that are addressed to a tool, with the arguments as JSON."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (
            f"{_CHANNEL}commentary {_RECIPIENT}",
            f"{_CHANNEL}analysis {_RECIPIENT}",
            f"{_START} {_RECIPIENT}",
        )

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        if not marker:
            yield from stream.expect(_RECIPIENT)
        call_header = yield from stream.take_until(_HEADER_END, _MAX_HEADER_LENGTH)
        words = call_header.split("<", 1)[0].split()
        if not words:
            raise NotAToolCallError
        yield from stream.skip_space()
        yield from read_arguments(parser, words[0].removeprefix(_TOOL_PREFIX))
        yield from read_end_marker(parser, "<|call|>", "<|end|>", is_single_token=True)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        # The grammar has no end marker, because the token that ends a call also ends the output.
        call_header = f"{_CHANNEL}commentary json" if marker.startswith(_START) else " <|constrain|>json"
        return either(
            [
                sequence(constant(f"{_TOOL_PREFIX}{name}{call_header}{_MESSAGE}"), by_schema(schema))
                for name, schema in tools.schemas.items()
            ]
        )
