"""Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5, and with tags of its own outside and no line ends Seed-OSS:
``<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>``."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.arguments import TaggedArguments
from penstock.serve.parsers.formats.json_calls import read_end, read_name
from penstock.serve.parsers.formats.tagged_calls import ArgumentWriter
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Markers, Steps
from penstock.serve.parsers.structural_tags import Tag, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools

_TAG_END = Markers([">"])
_VALUE_END = Markers(["</parameter>"])
_FUNCTION = "<function="


@dataclass(frozen=True)
class FunctionTags:
    """``<function=name>`` around ``<parameter=key>value</parameter>``."""

    name: str
    begin: str
    end: str
    hints: tuple[str, ...]
    padded: bool
    bare: str = ""
    bare_in_text: bool = False
    id_length: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, _FUNCTION)  # the outer tag is often forgotten

    def suits(self, template: str) -> bool:
        return all(hint in template for hint in self.hints)

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = answer.stream
        if marker == self.begin:
            yield from stream.skip_space()
            yield from stream.expect(_FUNCTION)
        name = yield from read_name(answer)
        yield from stream.expect(">")
        writer = ArgumentWriter(answer, name)
        yield from stream.skip_space()
        while (yield from stream.accept("<parameter=")):
            key = yield from stream.until(_TAG_END, 256)
            yield from writer.argument(key, _VALUE_END, padded=self.padded)
            yield from stream.skip_space()
        end = yield from stream.expect("</function>", self.end)
        writer.close()
        answer.commit()
        if end == self.end:  # the inner end tag is sometimes forgotten
            return
        if marker == self.begin:
            yield from read_end(answer, self.end)
            return
        yield from stream.skip_space()
        yield from stream.accept(self.end)
        answer.commit()

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        one = sequence(constant(self.begin), self.behind(self.begin, tools, parallel))
        return repeated(one, "\n", parallel)

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        arguments = TaggedArguments(_head, "</parameter>", line="\n" if self.padded else "")
        begin, end = ("", "") if marker == _FUNCTION else (f"\n{_FUNCTION}", f"\n{self.end}")
        return either(
            [
                sequence(
                    constant(f"{begin}{name}>\n"), arguments.grammar(schema), constant(f"</function>{end}")
                )
                for name, schema in tools.schemas.items()
            ]
        )


def _head(name: Tag, is_string: bool) -> Tag:
    return sequence(constant("<parameter="), name, constant(">"))


FORMAT = FunctionTags(
    "qwen3_coder", "<tool_call>", "</tool_call>", ("<tool_call>", "<function=", "<parameter="), padded=True
)
SEED_OSS_FORMAT = FunctionTags(
    "seed_oss", "<seed:tool_call>", "</seed:tool_call>", ("<seed:tool_call>",), padded=False
)
