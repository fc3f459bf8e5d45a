"""Calls of Apertus: a list of objects whose only key is the name of the tool."""

from __future__ import annotations

import json
from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import JsonCalls, read_arguments, read_end_marker, read_string
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Steps
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, sequence


@dataclass(frozen=True, kw_only=True)
class ApertusCalls(JsonCalls):
    """A begin marker, a list of objects ``{"name": arguments}``, an end marker."""

    def read(self, parser: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = parser.stream
        yield from stream.skip_space()
        yield from stream.expect("[")
        while True:
            yield from stream.skip_space()
            yield from stream.expect("{")
            yield from stream.skip_space()
            name = yield from read_string(parser)
            yield from stream.skip_space()
            yield from stream.expect(":")
            yield from stream.skip_space()
            yield from read_arguments(parser, name)
            yield from stream.skip_space()
            yield from stream.expect("}")
            parser.commit()
            yield from stream.skip_space()
            if not (yield from stream.accept(",")):
                break
        yield from stream.expect("]")
        parser.commit()
        yield from read_end_marker(parser, self.end)

    def _call(self, name: str, schema: dict[str, object]) -> Tag:
        return sequence(constant(f"{{{json.dumps(name)}: "), by_schema(schema), constant("}"))
