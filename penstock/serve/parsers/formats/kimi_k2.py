"""Calls as ``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>``.

A section encloses all calls; models sometimes omit the begin marker of the section. The text before the
arguments is the id of the call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_arguments, read_end_marker
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import MarkerSearch, Reader
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

_SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL_BEGIN, _CALL_END, _ARGUMENTS_BEGIN = (
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_COMPLETE_ID = re.compile(r"functions\..+:[0-9]+")
_ID_END = MarkerSearch([_ARGUMENTS_BEGIN])


@dataclass(frozen=True)
class KimiK2Calls(ToolFormat):
    """Calls with the tool name inside the call id and the arguments as JSON."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (_SECTION_BEGIN, _CALL_BEGIN)  # models sometimes omit the outer marker

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        yield from stream.skip_space()
        while marker == _CALL_BEGIN or (yield from stream.accept(_CALL_BEGIN)):
            marker = ""
            model_id = (yield from stream.take_until(_ID_END, 256)).strip()
            name = _tool_name(parser, model_id)
            yield from stream.skip_space()
            yield from read_arguments(parser, name, _call_id(parser, model_id, name))
            yield from read_end_marker(parser, _CALL_END)
            yield from stream.skip_space()
        yield from read_end_marker(parser, _SECTION_END)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        index_tag = pattern("[0-9]{1,4}")
        begin = "" if marker == _CALL_BEGIN else _CALL_BEGIN
        calls = [
            sequence(
                constant(f"{begin}functions.{name}:"),
                index_tag,
                constant(_ARGUMENTS_BEGIN),
                by_schema(schema),
                constant(_CALL_END),
            )
            for name, schema in tools.schemas.items()
        ]
        if marker == _CALL_BEGIN:
            return either(calls)
        return sequence(repeated(either(calls), "", parallel), constant(_SECTION_END))


def _tool_name(parser: ReasoningToolParser, model_id: str) -> str:
    """Return the name of the tool in a call id; "" if the request has no such tool.

    Models sometimes omit the prefix or the number of the id.
    """
    without_prefix = model_id.removeprefix("functions.")
    names = (without_prefix.rpartition(":")[0], without_prefix, model_id)
    return next(filter(parser.has_tool, names), "")


def _call_id(parser: ReasoningToolParser, model_id: str, name: str) -> str:
    """Return the model's call id, or an id with a new number if the model's id is incomplete or repeated.

    The chat template copies call ids into later prompts, so a new id has the form of the model's ids.
    """
    if _COMPLETE_ID.fullmatch(model_id) and not parser.has_id(model_id):
        return model_id
    number = parser.num_calls
    while parser.has_id(f"functions.{name}:{number}"):
        number += 1
    return f"functions.{name}:{number}"
