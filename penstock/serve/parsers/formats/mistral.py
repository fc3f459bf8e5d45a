"""Mistral: ``[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]``; since the tokenizer's version 11
``[TOOL_CALLS]f[ARGS]{"a": 1}``, once a call, perhaps with ``[CALL_ID]123456789`` before ``[ARGS]``."""

from __future__ import annotations

import re

from penstock.serve.parsers.formats.json_calls import (
    JsonCalls,
    end_of_calls,
    read_arguments,
    read_json_calls,
    read_name,
)
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Steps
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, repeated, sequence
from penstock.serve.parsers.tools import Tools

_CALL_ID = re.compile(r"[A-Za-z0-9]+")


class _Mistral(JsonCalls):
    """Reads all of them; the older ``mistral_v3`` differs only in what its grammar forces."""

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = answer.stream
        yield from stream.skip_space()
        if (yield from stream.peek()) in ("[", "{"):
            yield from read_json_calls(answer, more="{")  # "[" may begin the next marker
            end_of_calls(answer)
            return
        name = yield from read_name(answer)
        call_id = ""
        if (yield from stream.accept("[CALL_ID]")):
            call_id = yield from stream.run(_CALL_ID, 64)
        yield from stream.accept("[ARGS]")
        yield from stream.skip_space()
        yield from read_arguments(answer, name, call_id)

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        if self.is_list:
            return super().grammar(tools, parallel)
        one = sequence(constant(self.begin), self.behind(self.begin, tools, parallel))
        return repeated(one, "", parallel)

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        if self.is_list:
            return super().behind(marker, tools, parallel)
        return either(
            [sequence(constant(f"{name}[ARGS]"), by_schema(schema)) for name, schema in tools.schemas.items()]
        )


FORMAT = _Mistral("mistral", "[TOOL_CALLS]", hints=("[TOOL_CALLS]", "[ARGS]"), id_length=9)
LIST_FORMAT = _Mistral("mistral_v3", "[TOOL_CALLS]", is_list=True, hints=("[TOOL_CALLS]",), id_length=9)
