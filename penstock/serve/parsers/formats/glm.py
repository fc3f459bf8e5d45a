"""Calls as ``<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>``."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.arguments import TaggedArguments
from penstock.serve.parsers.formats.json_calls import read_name
from penstock.serve.parsers.formats.tagged_calls import ArgumentWriter
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import MarkerSearch, Reader
from penstock.serve.parsers.structural_tags import Tag, constant, either, sequence
from penstock.serve.parsers.tools import Tools

_KEY_END = MarkerSearch(["</arg_key>"])
_VALUE_END = MarkerSearch(["</arg_value>"])


@dataclass(frozen=True)
class GlmCalls(ToolFormat):
    """Calls with the name as plain text, and two tags per argument: one for the key, one for the value.

    The reader accepts calls without the line ends between tags. The grammar forces some of the line ends.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        return ("<tool_call>",)

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        yield from stream.skip_space()
        writer = ArgumentWriter(parser, (yield from read_name(parser)))
        yield from stream.skip_space()
        while (yield from stream.accept("<arg_key>")):
            key = yield from stream.take_until(_KEY_END, 256)
            yield from stream.skip_space()
            yield from stream.expect("<arg_value>")
            yield from writer.read_argument(key.strip(), _VALUE_END, is_padded=False)
            yield from stream.skip_space()
        yield from stream.expect("</tool_call>")
        writer.close()
        parser.commit()

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        return either(
            [
                sequence(constant(f"{name}\n"), _ARGUMENTS.grammar(schema), constant("</tool_call>"))
                for name, schema in tools.schemas.items()
            ]
        )


def _begin_tag(name: Tag, is_string: bool) -> Tag:
    return sequence(constant("<arg_key>"), name, constant("</arg_key>\n<arg_value>"))


_ARGUMENTS = TaggedArguments(_begin_tag, "</arg_value>")
