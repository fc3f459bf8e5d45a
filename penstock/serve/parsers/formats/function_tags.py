"""Calls as ``<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>``."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.arguments import TaggedArguments
from penstock.serve.parsers.formats.json_calls import read_end_marker, read_name
from penstock.serve.parsers.formats.tagged_calls import ArgumentWriter
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import MarkerSearch, Reader
from penstock.serve.parsers.structural_tags import Tag, constant, either, sequence
from penstock.serve.parsers.tools import Tools

_TAG_END = MarkerSearch([">"])
_VALUE_END = MarkerSearch(["</parameter>"])
_FUNCTION_BEGIN = "<function="


@dataclass(frozen=True, kw_only=True)
class FunctionTags(ToolFormat):
    """Calls in a tag ``<function=name>``, with each value in a tag ``<parameter=key>``."""

    begin: str
    end: str
    is_padded: bool
    """Whether each value is between two line ends that are not part of the value."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, _FUNCTION_BEGIN)  # models often omit the outer tag

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        if marker == self.begin:
            yield from stream.skip_space()
            yield from stream.expect(_FUNCTION_BEGIN)
        name = yield from read_name(parser)
        yield from stream.expect(">")
        writer = ArgumentWriter(parser, name)
        yield from stream.skip_space()
        while (yield from stream.accept("<parameter=")):
            key = yield from stream.take_until(_TAG_END, 256)
            yield from writer.read_argument(key, _VALUE_END, is_padded=self.is_padded)
            yield from stream.skip_space()
        end = yield from stream.expect("</function>", self.end)
        writer.close()
        parser.commit()
        if end == self.end:  # models sometimes omit the inner end tag
            return
        if marker == self.begin:
            yield from read_end_marker(parser, self.end)
            return
        yield from stream.skip_space()
        yield from stream.accept(self.end)
        parser.commit()

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        arguments = TaggedArguments(_begin_tag, "</parameter>", padding="\n" if self.is_padded else "")
        begin, end = ("", "") if marker == _FUNCTION_BEGIN else (f"\n{_FUNCTION_BEGIN}", f"\n{self.end}")
        return either(
            [
                sequence(
                    constant(f"{begin}{name}>\n"), arguments.grammar(schema), constant(f"</function>{end}")
                )
                for name, schema in tools.schemas.items()
            ]
        )


def _begin_tag(name: Tag, is_string: bool) -> Tag:
    return sequence(constant("<parameter="), name, constant(">"))
