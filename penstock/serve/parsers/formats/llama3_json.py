"""Llama 3.1 to 3.3: ``{"name": "f", "parameters": {"a": 1}}``, with or without ``<|python_tag|>`` before it,
several with ``;``, white space or nothing between them; and ``<|python_tag|>f.call(a="b")``."""

from __future__ import annotations

from penstock.serve.parsers.formats.json_calls import (
    JsonCalls,
    another_follows,
    end_of_calls,
    read_json_call,
    read_json_list,
    read_name,
)
from penstock.serve.parsers.formats.pythonic import read_keywords
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import NotAToolCallError, Steps
from penstock.serve.parsers.structural_tags import Tag, repeated
from penstock.serve.parsers.tools import Tools


class _Llama3(JsonCalls):
    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = answer.stream
        yield from stream.skip_space()
        if marker and (yield from stream.peek()) not in ("{", "["):
            yield from self._built_in(answer)
            return
        while True:
            if (yield from stream.accept("[")):
                yield from read_json_list(answer, bare=True)
            else:
                yield from read_json_call(answer, bare=True)
            if not (yield from another_follows(answer, self.bare, self.begin)):
                break
        end_of_calls(answer)

    def _built_in(self, answer: ReasoningToolParser) -> Steps[None]:
        name = yield from read_name(answer)
        method = ".call"
        if not name.endswith(method) or not answer.knows(name.removesuffix(method)):
            raise NotAToolCallError
        yield from answer.stream.expect("(")
        yield from read_keywords(answer, name.removesuffix(method))

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        return repeated(self.calls(tools), "; ", parallel)

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        return self.grammar(tools, parallel)


FORMAT = _Llama3(
    "llama3_json",
    "<|python_tag|>",
    arguments_key="parameters",
    bare="{[",
    bare_in_text=True,
    hints=('{"name": function name, "parameters": dictionary',),
)
