"""Kimi K2: ``<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
<|tool_call_end|><|tool_calls_section_end|>``. What stands before the arguments is the call's id."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_arguments, read_end
from penstock.serve.parsers.output_parser import ReasoningToolParser
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
_WHOLE_ID = re.compile(r"functions\..+:[0-9]+")
_ID_END = Markers([_ARGUMENTS])


@dataclass(frozen=True)
class _KimiK2:
    name: str = "kimi_k2"
    bare: str = ""
    bare_in_text: bool = False
    id_length: int = 0
    markers: tuple[str, ...] = (_BEGIN, _CALL)  # the outer one is sometimes forgotten

    def suits(self, template: str) -> bool:
        return _BEGIN in template

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = answer.stream
        yield from stream.skip_space()
        while marker == _CALL or (yield from stream.accept(_CALL)):
            marker = ""
            written = (yield from stream.until(_ID_END, 256)).strip()
            name = _name(answer, written)
            yield from stream.skip_space()
            yield from read_arguments(answer, name, _id(answer, written, name))
            yield from read_end(answer, _CALL_END)
            yield from stream.skip_space()
        yield from read_end(answer, _END)

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        return sequence(constant(_BEGIN), self.behind(_BEGIN, tools, parallel))

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        number = pattern("[0-9]{1,4}")
        begin = "" if marker == _CALL else _CALL
        calls = [
            sequence(
                constant(f"{begin}functions.{name}:"),
                number,
                constant(_ARGUMENTS),
                by_schema(schema),
                constant(_CALL_END),
            )
            for name, schema in tools.schemas.items()
        ]
        if marker == _CALL:
            return either(calls)
        return sequence(repeated(either(calls), "", parallel), constant(_END))


def _name(answer: ReasoningToolParser, written: str) -> str:
    """The tool that an id names; models leave out the prefix or the number."""
    plain = written.removeprefix("functions.")
    names = (plain.rpartition(":")[0], plain, written)
    return next(filter(answer.knows, names), "")


def _id(answer: ReasoningToolParser, written: str, name: str) -> str:
    """The id as written; one that is not whole or that another call has gets a number of its own.

    The chat template writes it back as it is, so that it has to look like the model's own.
    """
    if _WHOLE_ID.fullmatch(written) and not answer.has_id(written):
        return written
    number = answer.num_calls
    while answer.has_id(f"functions.{name}:{number}"):
        number += 1
    return f"functions.{name}:{number}"


FORMAT = _KimiK2()
