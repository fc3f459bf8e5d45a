"""DeepSeek V3.2 and V4, with wide bars (U+FF5C): ``<|DSML|function_calls>\\n<|DSML|invoke name="f">\\n
<|DSML|parameter name="a" string="false">1</|DSML|parameter>\\n</|DSML|invoke>\\n</|DSML|function_calls>``.
V4 has ``tool_calls`` outside."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.arguments import TaggedArguments
from penstock.serve.parsers.formats.json_calls import read_end
from penstock.serve.parsers.formats.tagged_calls import ArgumentWriter
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


@dataclass(frozen=True)
class _Dsml:
    name: str
    outside: str
    bare: str = ""
    bare_in_text: bool = False
    id_length: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        return (f"<{_TOKEN}{self.outside}>",)

    def suits(self, template: str) -> bool:
        return _TOKEN in template and f"dsml_token + '{self.outside}>" in template

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = answer.stream
        yield from stream.skip_space()
        while (yield from stream.accept(_INVOKE)):
            writer = ArgumentWriter(answer, (yield from stream.until(_NAME_END, 256)))
            yield from stream.skip_space()
            while (yield from stream.accept(_PARAMETER)):
                key = yield from stream.until(_KEY_END, 256)
                is_string = (yield from stream.expect('true">', 'false">')) == 'true">'
                yield from writer.argument(key, _VALUE_END, padded=False, is_string=is_string)
                yield from stream.skip_space()
            yield from stream.expect(_INVOKE_END)
            writer.close()
            answer.commit()
            yield from stream.skip_space()
        yield from read_end(answer, f"</{_TOKEN}{self.outside}>")

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        [marker] = self.markers
        return sequence(constant(marker), self.behind(marker, tools, parallel))

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        calls = [
            sequence(constant(f'{_INVOKE}{name}">\n'), _ARGUMENTS.grammar(schema), constant(_INVOKE_END))
            for name, schema in tools.schemas.items()
        ]
        end = constant(f"\n</{_TOKEN}{self.outside}>")
        return sequence(constant("\n"), repeated(either(calls), "\n", parallel), end)


def _head(name: Tag, is_string: bool) -> Tag:
    return sequence(constant(_PARAMETER), name, constant(f'" string="{"true" if is_string else "false"}">'))


_ARGUMENTS = TaggedArguments(_head, f"</{_TOKEN}parameter>", says_strings=True)


FORMAT = _Dsml("deepseek_v32", "function_calls")
V4_FORMAT = _Dsml("deepseek_v4", "tool_calls")
