"""Calls of DeepSeek V3.2 and V4, where each bar is U+FF5C.

V3.2 writes ``<|DSML|function_calls>\\n<|DSML|invoke name="f">\\n
<|DSML|parameter name="a" string="false">1</|DSML|parameter>\\n</|DSML|invoke>\\n</|DSML|function_calls>``.
The outer tag of V4 is ``tool_calls``.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.arguments import TaggedArguments
from penstock.serve.parsers.formats.json_calls import read_end
from penstock.serve.parsers.formats.tagged_calls import ArgumentWriter
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Markers, Steps
from penstock.serve.parsers.structural_tags import Tag, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools

_TOKEN = "\uff5cDSML\uff5c"
_INVOKE, _INVOKE_END = f'<{_TOKEN}invoke name="', f"</{_TOKEN}invoke>"
_PARAMETER = f'<{_TOKEN}parameter name="'
_NAME_END = Markers(['">'])
_KEY_END = Markers(['" string="'])
_VALUE_END = Markers([f"</{_TOKEN}parameter>"])


@dataclass(frozen=True, kw_only=True)
class DsmlCalls(ToolFormat):
    """Arguments in tags that state whether the value is a string."""

    tag: str
    """The name of the outer tag."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (f"<{_TOKEN}{self.tag}>",)

    def read(self, parser: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = parser.stream
        yield from stream.skip_space()
        while (yield from stream.accept(_INVOKE)):
            writer = ArgumentWriter(parser, (yield from stream.until(_NAME_END, 256)))
            yield from stream.skip_space()
            while (yield from stream.accept(_PARAMETER)):
                key = yield from stream.until(_KEY_END, 256)
                is_string = (yield from stream.expect('true">', 'false">')) == 'true">'
                yield from writer.argument(key, _VALUE_END, padded=False, is_string=is_string)
                yield from stream.skip_space()
            yield from stream.expect(_INVOKE_END)
            writer.close()
            parser.commit()
            yield from stream.skip_space()
        yield from read_end(parser, f"</{_TOKEN}{self.tag}>")

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        calls = [
            sequence(constant(f'{_INVOKE}{name}">\n'), _ARGUMENTS.grammar(schema), constant(_INVOKE_END))
            for name, schema in tools.schemas.items()
        ]
        end = constant(f"\n</{_TOKEN}{self.tag}>")
        return sequence(constant("\n"), repeated(either(calls), "\n", parallel), end)


def _head(name: Tag, is_string: bool) -> Tag:
    return sequence(constant(_PARAMETER), name, constant(f'" string="{"true" if is_string else "false"}">'))


_ARGUMENTS = TaggedArguments(_head, f"</{_TOKEN}parameter>", has_type=True)
