"""gpt-oss: ``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>``, or with the
name before the channel: ``<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}``.

The text begins behind ``<|start|>assistant``. A turn ends with its first call, so there is never a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.serve.parsers.formats.json_calls import read_arguments, read_end
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import Markers, NotAToolCallError, Steps
from penstock.serve.parsers.structural_tags import Tag, by_schema, constant, either, sequence
from penstock.serve.parsers.tools import Tools

_TO, _PREFIX = "to=", "functions."
_START, _CHANNEL, _MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
_HEAD = Markers([_MESSAGE])
_MAX_HEAD = 256


@dataclass(frozen=True)
class _Harmony:
    name: str = "harmony"
    bare: str = _TO[0]
    bare_in_text: bool = False
    id_length: int = 0
    markers: tuple[str, ...] = (
        f"{_CHANNEL}commentary {_TO}",
        f"{_CHANNEL}analysis {_TO}",
        f"{_START} {_TO}",
    )

    def suits(self, template: str) -> bool:
        return f"{_CHANNEL}analysis{_MESSAGE}" in template

    def read(self, answer: ReasoningToolParser, marker: str) -> Steps[None]:
        stream = answer.stream
        if not marker:
            yield from stream.expect(_TO)
        head = yield from stream.until(_HEAD, _MAX_HEAD)
        name = head.split("<", 1)[0].split()[:1]
        if not name:
            raise NotAToolCallError
        yield from stream.skip_space()
        yield from read_arguments(answer, name[0].removeprefix(_PREFIX))
        yield from read_end(answer, "<|call|>", "<|end|>", one_token=True)

    def grammar(self, tools: Tools, parallel: bool) -> Tag:
        marker = self.markers[0]
        return sequence(constant(marker), self.behind(marker, tools, parallel))

    def behind(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        # What ends the call ends the output.
        head = f"{_CHANNEL}commentary json" if marker.startswith(_START) else " <|constrain|>json"
        return either(
            [
                sequence(constant(f"{_PREFIX}{name}{head}{_MESSAGE}"), by_schema(schema))
                for name, schema in tools.schemas.items()
            ]
        )


FORMAT = _Harmony()
