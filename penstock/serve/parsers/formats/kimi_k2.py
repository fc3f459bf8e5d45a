"""Kimi K2: ``<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
<|tool_call_end|><|tool_calls_section_end|>``. What stands before the arguments is the call's id."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.answer import Answer
from penstock.serve.parsers.formats.json_calls import read_arguments, read_end
from penstock.serve.parsers.stream import Markers, Steps
from penstock.serve.parsers.structural_tags import (
    Tag,
    by_schema,
    constant,
    either,
    pattern,
    repeated,
    sequence,
)
from penstock.serve.parsers.tools import Tools

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID_END = Markers([_ARGUMENTS])


@dataclass(frozen=True)
class _KimiK2:
    name: str = "kimi_k2"
    bare: str = ""
    id_length: int = 0
    markers: tuple[str, ...] = (_BEGIN,)

    def suits(self, template: str) -> bool:
        return _BEGIN in template

    def read(self, answer: Answer, marker: str) -> Steps[None]:
        stream = answer.stream
        yield from stream.skip_space()
        while (yield from stream.accept(_CALL)):
            call_id = (yield from stream.until(_ID_END, 256)).strip()
            name = call_id.removeprefix("functions.").rpartition(":")[0]
            yield from stream.skip_space()
            yield from read_arguments(answer, name, call_id)
            yield from read_end(answer, _CALL_END)
            yield from stream.skip_space()
        yield from read_end(answer, _END)

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        return sequence(constant(_BEGIN), self.behind(_BEGIN, tools, parallel))

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        number = pattern("[0-9]{1,4}")
        calls = [
            sequence(
                constant(f"{_CALL}functions.{name}:"),
                number,
                constant(_ARGUMENTS),
                by_schema(schema),
                constant(_CALL_END),
            )
            for name, schema in tools.schemas.items()
        ]
        return sequence(repeated(either(calls), "", parallel), constant(_END))


FORMAT = _KimiK2()
