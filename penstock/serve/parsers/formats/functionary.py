"""Functionary 3.1: ``<function=f>{"a": 1}</function>``."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_arguments, read_end, read_name
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Steps
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools


@dataclass(frozen=True)
class _Functionary:
    name: str = "functionary"
    bare: str = ""
    bare_in_text: bool = False
    id_length: int = 0
    markers: tuple[str, ...] = ("<function=",)

    def suits(self, template: str) -> bool:
        return "<function=example_function_name>{" in template

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        name = yield from read_name(answer)
        yield from answer.stream.expect(">")
        yield from answer.stream.skip_space()
        yield from read_arguments(answer, name)
        yield from read_end(answer, "</function>")

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        one = sequence(constant("<function="), self.behind("<function=", tools, parallel))
        return repeated(one, "", parallel)

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        return either(
            [
                sequence(constant(f"{name}>"), by_schema(schema), constant("</function>"))
                for name, schema in tools.schemas.items()
            ]
        )


FORMAT = _Functionary()
