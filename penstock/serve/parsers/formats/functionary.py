"""Calls as ``<function=f>{"a": 1}</function>``."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_arguments, read_end_marker, read_name
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Reader
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, sequence
from penstock.serve.parsers.tools import Tools


@dataclass(frozen=True)
class FunctionaryCalls(ToolFormat):
    """Calls with the name in the begin tag and the arguments as JSON."""

    @property
    def markers(self) -> tuple[str, ...]:
        return ("<function=",)

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        name = yield from read_name(parser)
        yield from parser.stream.expect(">")
        yield from parser.stream.skip_space()
        yield from read_arguments(parser, name)
        yield from read_end_marker(parser, "</function>")

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        return either(
            [
                sequence(constant(f"{name}>"), by_schema(schema), constant("</function>"))
                for name, schema in tools.schemas.items()
            ]
        )
