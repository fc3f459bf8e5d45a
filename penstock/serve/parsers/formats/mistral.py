"""Calls of Mistral: a list after one marker, ``[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]``.

Since tokenizer version 11, each call is ``[TOOL_CALLS]f[ARGS]{"a": 1}``, optionally with
``[CALL_ID]123456789`` before ``[ARGS]``.
"""

from __future__ import annotations

import re

from penstock.serve.parsers.formats.json_calls import (
    JsonCalls,
    check_no_text_after_calls,
    read_arguments,
    read_json_calls,
    read_name,
)
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Reader
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, sequence
from penstock.serve.parsers.tools import Tools

_CALL_ID = re.compile(r"[A-Za-z0-9]+")


class MistralCalls(JsonCalls):
    """Reads all variants. The grammar forces a list if ``separator`` is None, otherwise ``f[ARGS]{...}``."""

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        yield from stream.skip_space()
        if (yield from stream.peek()) in ("[", "{"):
            yield from read_json_calls(parser, call_starts="{")  # "[" may be the beginning of the next marker
            check_no_text_after_calls(parser)
            return
        name = yield from read_name(parser)
        call_id = ""
        if (yield from stream.accept("[CALL_ID]")):
            call_id = yield from stream.take_run(_CALL_ID, 64)
        yield from stream.accept("[ARGS]")
        yield from stream.skip_space()
        yield from read_arguments(parser, name, call_id)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        if self.separator is None:
            return super().after_marker(marker, tools, parallel)
        return either(
            [sequence(constant(f"{name}[ARGS]"), by_schema(schema)) for name, schema in tools.schemas.items()]
        )
