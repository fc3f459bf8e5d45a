"""Llama 3.1 to 3.3: an answer that is ``{"name": "f", "parameters": {"a": 1}}``, with or without
``<|python_tag|>`` before it, several with ``;`` between them; and ``<|python_tag|>f.call(a="b")``."""

from __future__ import annotations

from penstock.serve.parsers.answer import Answer
from penstock.serve.parsers.formats.json_calls import JsonCalls, read_json_call, read_name
from penstock.serve.parsers.formats.pythonic import read_keywords
from penstock.serve.parsers.stream import NotACallError, Steps
from penstock.serve.parsers.structural_tags import Tag, repeated
from penstock.serve.parsers.tools import Tools


class _Llama3(JsonCalls):
    def read(self, answer: Answer, marker: str) -> Steps[None]:
        stream = answer.stream
        yield from stream.skip_space()
        if marker and (yield from stream.peek()) != "{":
            yield from self._built_in(answer)
            return
        while True:
            yield from read_json_call(answer, bare=True)
            yield from stream.skip_space()
            if not (yield from stream.accept(";")):
                break
            yield from stream.skip_space()
            yield from stream.accept(self.begin)
            yield from stream.skip_space()
        if stream.taken:
            raise NotACallError  # white space before text

    def _built_in(self, answer: Answer) -> Steps[None]:
        name = yield from read_name(answer)
        method = ".call"
        if not name.endswith(method) or not answer.knows(name.removesuffix(method)):
            raise NotACallError
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
    bare="{",
    hints=('{"name": function name, "parameters": dictionary',),
)
