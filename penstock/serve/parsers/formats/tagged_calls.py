"""Calls whose arguments are plain text in tags. Their types come from the schema."""

from __future__ import annotations

import json
import re

from penstock.serve.parsers.json_scanner import JsonScanner
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import MarkerSearch, NotAToolCallError, Steps

_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_STRING = frozenset({"string"})
_KINDS = {"{": {"object"}, "[": {"array"}, "t": {"boolean"}, "f": {"boolean"}, "n": {"null"}}
_INTEGER = re.compile(r"-?[0-9]+(?:\.0+)?")


class ArgumentWriter:
    """Writes the arguments of one call as a JSON object, argument by argument.

    The call starts with its first argument or its end. Calls of an unknown tool are not written.
    """

    def __init__(self, parser: ReasoningToolParser, name: str) -> None:
        self._parser = parser
        self._name = name
        self._before = "{"
        self._known = parser.has_tool(name)
        if not self._known:
            parser.refuse()

    def argument(
        self, key: str, end: MarkerSearch, *, padded: bool, is_string: bool | None = None
    ) -> Steps[None]:
        """Read the value of an argument and its end marker.

        Args:
            key: the name of the argument.
            end: the end marker.
            padded: the value is between two line ends, which are not part of the value.
            is_string: whether the text declares the value a string; None means that the schema decides.
        """
        types = self._parser.schema_types(self._name, key) if self._known else None
        if is_string is not None:
            types = _STRING if is_string else None
        self._write(f"{json.dumps(key, ensure_ascii=False)}: ")
        if types == _STRING:
            yield from self._string(end, padded)
        else:
            yield from self._typed(end, padded, types)

    def close(self) -> None:
        if not self._known:
            return
        self._write("}" if self._before == ", " else "{}", alone=True)
        self._parser.end_call()

    def _write(self, text: str, *, alone: bool = False) -> None:
        if not self._known:
            return
        if self._before == "{":
            self._parser.start_call(self._name)
        self._parser.add_arguments(text if alone else self._before + text)
        self._before = ", "

    def _add(self, text: str) -> None:
        if self._known:
            self._parser.add_arguments(text)

    def _string(self, end: MarkerSearch, padded: bool) -> Steps[None]:
        """Emit the text incrementally, except for a line end that may be the padding."""
        stream = self._parser.stream
        self._add('"')
        held, is_first, marker = "", padded, ""
        while not marker:
            text, marker = yield from stream.piece(end)
            if not text and not marker:
                raise NotAToolCallError
            if is_first and text:
                text, is_first = text.removeprefix("\n"), False
            text = held + text
            held = "\n" if padded and text.endswith("\n") else ""
            self._add(_escaped(text[: len(text) - len(held)]))
        self._add('"')

    def _typed(self, end: MarkerSearch, padded: bool, types: frozenset[str] | None) -> Steps[None]:
        stream = self._parser.stream
        pieces, marker = [], ""
        while not marker:
            text, marker = yield from stream.piece(end)
            pieces.append(text)
            if not text and not marker:
                # Emit an unterminated string, so that the value is visibly incomplete.
                self._add(f'"{_escaped("".join(pieces))}')
                raise NotAToolCallError
        value = "".join(pieces)
        if padded:
            value = value.removeprefix("\n").removesuffix("\n")
        self._add(typed_json(value, types))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed_json(text: str, types: frozenset[str] | None) -> str:
    """Return an argument as JSON: the JSON value of the text if the schema allows its type, else a string."""
    stripped = text.strip()
    stripped = _PYTHON_NAMES.get(stripped, stripped)
    value = JsonScanner()
    end, checked = value.feed(f"{stripped} ")  # a number ends at what follows it
    if not value.done or value.broken or end < len(stripped):
        return json.dumps(text, ensure_ascii=False)
    if types is None or "string" not in types:
        return checked
    number = {"number", "integer"} if _INTEGER.fullmatch(stripped) else {"number"}
    is_allowed = not types.isdisjoint(_KINDS.get(stripped[0], number))
    # Strings are written without quotes, so quotes are part of the string.
    return checked if is_allowed and stripped[0] != '"' else json.dumps(text, ensure_ascii=False)
