"""DeepSeek V3 and R1, V3.1, V3.2.

V3.1, with wide bars (U+FF5C) and U+2581 for low lines, and no line end:
``<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|><|tool_calls_end|>``.
V3 and R1 have ``function<|tool_sep|>f`` and the arguments in a fence of ``json``.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_arguments, read_end, read_name
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Markers, NotAToolCallError, Steps
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools

_BEGIN, _END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL, _CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_NAME_END = Markers([_SEPARATOR])


@dataclass(frozen=True)
class _DeepSeek:
    """Reads both; they differ in what the grammar forces."""

    name: str
    fenced: bool
    bare: str = ""
    bare_in_text: bool = False
    id_length: int = 0
    markers: tuple[str, ...] = (_BEGIN, _CALL)  # the outer one is sometimes forgotten

    def suits(self, template: str) -> bool:
        return _BEGIN in template and self.fenced == ("```" in template)

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = answer.stream
        yield from stream.skip_space()
        while marker == _CALL or (yield from stream.accept(_CALL)):
            marker = ""
            name = (yield from stream.until(_NAME_END, 256)).strip()
            yield from stream.skip_space()
            fenced = False
            if (yield from stream.peek()) != "{":
                if name != "function":
                    raise NotAToolCallError
                name = yield from read_name(answer)
                yield from stream.skip_space()
                fenced = bool((yield from stream.accept("```json")))
                yield from stream.skip_space()
            yield from read_arguments(answer, name)
            if fenced:
                yield from read_end(answer, "```")
            yield from read_end(answer, _CALL_END)
            yield from stream.skip_space()
        yield from read_end(answer, _END)

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        return sequence(constant(_BEGIN), self.behind(_BEGIN, tools, parallel))

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        def head(name: str) -> str:
            return f"function{_SEPARATOR}{name}\n```json\n" if self.fenced else f"{name}{_SEPARATOR}"

        begin = "" if marker == _CALL else _CALL
        calls = [
            sequence(
                constant(begin + head(name)),
                by_schema(schema),
                constant(("\n```" if self.fenced else "") + _CALL_END),
            )
            for name, schema in tools.schemas.items()
        ]
        if marker == _CALL:
            return either(calls)
        separator = "\n" if self.fenced else ""
        return sequence(repeated(either(calls), separator, parallel), constant(_END))


FORMAT = _DeepSeek("deepseek_v3", fenced=True)
V31_FORMAT = _DeepSeek("deepseek_v31", fenced=False)
