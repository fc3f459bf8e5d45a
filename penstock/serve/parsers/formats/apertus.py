"""Calls of Apertus: a list of objects, each with the tool name as its only key."""

from __future__ import annotations

import json
from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import JsonCalls, read_arguments, read_end_marker, read_string
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Reader
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, sequence


@dataclass(frozen=True, kw_only=True)
class ApertusCalls(JsonCalls):
    """Calls between a begin marker and an end marker, as a list of objects ``{"name": arguments}``."""

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
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

    def _call_tag(self, name: str, schema: dict[str, object]) -> Tag:
        return sequence(constant(f"{{{json.dumps(name)}: "), by_schema(schema), constant("}"))
