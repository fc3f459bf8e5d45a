"""Calls written as Python calls, one on each line, between markers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_end_marker
from penstock.serve.parsers.formats.pythonic import call_grammar, read_call
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Reader
from penstock.serve.parsers.structural_tags import Tag, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools


@dataclass(frozen=True, kw_only=True)
class PythonicLines(ToolFormat):
    """Python calls with keyword arguments and literal values, between a begin marker and an end marker."""

    begin: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin,)

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        yield from stream.skip_space()
        while True:
            yield from read_call(parser)
            parser.commit()
            yield from stream.skip_space()
            if (yield from stream.peek()) in ("<", ""):
                break
        yield from read_end_marker(parser, self.end)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        calls = either([call_grammar(name, schema) for name, schema in tools.schemas.items()])
        return sequence(repeated(calls, "\n", parallel), constant(self.end))
