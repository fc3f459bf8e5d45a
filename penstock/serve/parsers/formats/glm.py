"""GLM 4.5 and later: ``<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>``,
the line ends in some versions only."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.arguments import TaggedArguments
from penstock.serve.parsers.formats.json_calls import read_name
from penstock.serve.parsers.formats.tagged_calls import ArgumentWriter
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Markers, Steps
from penstock.serve.parsers.structural_tags import Tag, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools

_KEY_END = Markers(["</arg_key>"])
_VALUE_END = Markers(["</arg_value>"])


@dataclass(frozen=True)
class _Glm:
    name: str = "glm"
    bare: str = ""
    bare_in_text: bool = False
    id_length: int = 0
    markers: tuple[str, ...] = ("<tool_call>",)

    def suits(self, template: str) -> bool:
        return "<arg_key>" in template

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = answer.stream
        yield from stream.skip_space()
        writer = ArgumentWriter(answer, (yield from read_name(answer)))
        yield from stream.skip_space()
        while (yield from stream.accept("<arg_key>")):
            key = yield from stream.until(_KEY_END, 256)
            yield from stream.skip_space()
            yield from stream.expect("<arg_value>")
            yield from writer.argument(key.strip(), _VALUE_END, padded=False)
            yield from stream.skip_space()
        yield from stream.expect("</tool_call>")
        writer.close()
        answer.commit()

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        one = sequence(constant("<tool_call>"), self.behind("<tool_call>", tools, parallel))
        return repeated(one, "\n", parallel)

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        return either(
            [
                sequence(constant(f"{name}\n"), _ARGUMENTS.grammar(schema), constant("</tool_call>"))
                for name, schema in tools.schemas.items()
            ]
        )


def _head(name: Tag, is_string: bool) -> Tag:
    return sequence(constant("<arg_key>"), name, constant("</arg_key>\n<arg_value>"))


_ARGUMENTS = TaggedArguments(_head, "</arg_value>")


FORMAT = _Glm()
