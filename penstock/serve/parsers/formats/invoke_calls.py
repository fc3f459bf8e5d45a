"""Calls of DeepSeek V3.2, DeepSeek V4 and MiniMax M2, in tags ``invoke`` and ``parameter``.

DeepSeek V3.2 writes ``<|DSML|function_calls>\\n<|DSML|invoke name="f">\\n
<|DSML|parameter name="a" string="false">1</|DSML|parameter>\\n</|DSML|invoke>\\n</|DSML|function_calls>``,
where each bar is U+FF5C. The outer tag of V4 is ``tool_calls``. MiniMax M2 writes
``<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="a">1</parameter>\\n</invoke>\\n
</minimax:tool_call>``.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.arguments import TaggedArguments
from penstock.serve.parsers.formats.json_calls import read_end_marker
from penstock.serve.parsers.formats.tagged_calls import ArgumentWriter
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import MarkerSearch, Reader
from penstock.serve.parsers.structural_tags import Tag, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools

DSML = "\uff5cDSML\uff5c"
"""Prefix of the tags of DeepSeek."""
_NAME_END = MarkerSearch(['">'])
_TYPED_KEY_END = MarkerSearch(['" string="'])


@dataclass(frozen=True, kw_only=True)
class InvokeCalls(ToolFormat):
    """Calls with one tag per argument. DeepSeek's tags state whether the value is a string."""

    tag: str
    """The name of the outer tag."""
    prefix: str = ""
    """Prefix of the names of all other tags."""
    is_typed: bool = False
    """Whether the tag of an argument states if the value is a string. If not, the schema determines the type.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        return (f"<{self.tag}>",)

    @property
    def _invoke(self) -> str:
        return f'<{self.prefix}invoke name="'

    @property
    def _parameter(self) -> str:
        return f'<{self.prefix}parameter name="'

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream, value_end = parser.stream, MarkerSearch([f"</{self.prefix}parameter>"])
        yield from stream.skip_space()
        while (yield from stream.accept(self._invoke)):
            writer = ArgumentWriter(parser, (yield from stream.take_until(_NAME_END, 256)))
            yield from stream.skip_space()
            while (yield from stream.accept(self._parameter)):
                key = yield from stream.take_until(_TYPED_KEY_END if self.is_typed else _NAME_END, 256)
                is_string = None
                if self.is_typed:
                    is_string = (yield from stream.expect('true">', 'false">')) == 'true">'
                yield from writer.read_argument(key, value_end, is_padded=False, is_string=is_string)
                yield from stream.skip_space()
            yield from stream.expect(f"</{self.prefix}invoke>")
            writer.close()
            parser.commit()
            yield from stream.skip_space()
        yield from read_end_marker(parser, f"</{self.tag}>")

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        arguments = TaggedArguments(self._begin_tag, f"</{self.prefix}parameter>", has_type=self.is_typed)
        invoke_end = constant(f"</{self.prefix}invoke>")
        calls = [
            sequence(constant(f'{self._invoke}{name}">\n'), arguments.grammar(schema), invoke_end)
            for name, schema in tools.schemas.items()
        ]
        return sequence(constant("\n"), repeated(either(calls), "\n", parallel), constant(f"\n</{self.tag}>"))

    def _begin_tag(self, name: Tag, is_string: bool) -> Tag:
        end = f'" string="{"true" if is_string else "false"}">' if self.is_typed else '">'
        return sequence(constant(self._parameter), name, constant(end))
