"""Calls whose arguments are plain text in tags. The schema or the tag determines the type of an argument."""

from __future__ import annotations

import json
import re

from penstock.serve.parsers.json_scanner import JsonScanner
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import MarkerSearch, NotAToolCallError, Reader

_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_STRING_ONLY = frozenset({"string"})
_TYPES_BY_FIRST_CHARACTER = {
    "{": {"object"},
    "[": {"array"},
    "t": {"boolean"},
    "f": {"boolean"},
    "n": {"null"},
}
_INTEGER = re.compile(r"-?[0-9]+(?:\.0+)?")


class ArgumentWriter:
    """Emits the arguments of one call as a JSON object, argument by argument.

    `ToolCallStart` is emitted with the first argument, or at the end of a call without arguments. A call of
    an unknown tool emits no events.
    """

    def __init__(self, parser: ReasoningToolParser, name: str) -> None:
        self._parser = parser
        self._name = name
        self._separator = "{"
        self._is_known = parser.has_tool(name)
        if not self._is_known:
            parser.mark_unknown_tool()

    def read_argument(
        self, key: str, end: MarkerSearch, *, is_padded: bool, is_string: bool | None = None
    ) -> Reader[None]:
        """Read the value and the end marker of an argument, and emit the argument.

        Args:
            key: the name of the argument.
            end: the end marker.
            is_padded: whether a line end before and after the value is not part of the value.
            is_string: whether the model declares the value a string. None means that the schema determines
                the type.

        Raises:
            NotAToolCallError: the text ends inside the value.
        """
        types = self._parser.schema_types(self._name, key) if self._is_known else None
        if is_string is not None:
            types = _STRING_ONLY if is_string else None
        self._write(f"{json.dumps(key, ensure_ascii=False)}: ")
        if types == _STRING_ONLY:
            yield from self._read_string(end, is_padded)
        else:
            yield from self._read_typed(end, is_padded, types)

    def close(self) -> None:
        """End the arguments object and the call."""
        if not self._is_known:
            return
        self._write("}" if self._separator == ", " else "{}", without_separator=True)
        self._parser.end_call()

    def _write(self, text: str, *, without_separator: bool = False) -> None:
        if not self._is_known:
            return
        if self._separator == "{":
            self._parser.start_call(self._name)
        self._parser.add_arguments(text if without_separator else self._separator + text)
        self._separator = ", "

    def _emit(self, text: str) -> None:
        if self._is_known:
            self._parser.add_arguments(text)

    def _read_string(self, end: MarkerSearch, is_padded: bool) -> Reader[None]:
        """Emit a string incrementally. A line end may be padding and is emitted only if text follows."""
        stream = self._parser.stream
        self._emit('"')
        line_end, is_first, marker = "", is_padded, ""
        while not marker:
            text, marker = yield from stream.take_text_or_marker(end)
            if not text and not marker:
                raise NotAToolCallError
            if is_first and text:
                text, is_first = text.removeprefix("\n"), False
            text = line_end + text
            line_end = "\n" if is_padded and text.endswith("\n") else ""
            self._emit(_json_escaped(text[: len(text) - len(line_end)]))
        self._emit('"')

    def _read_typed(self, end: MarkerSearch, is_padded: bool, types: frozenset[str] | None) -> Reader[None]:
        stream = self._parser.stream
        parts, marker = [], ""
        while not marker:
            text, marker = yield from stream.take_text_or_marker(end)
            parts.append(text)
            if not text and not marker:
                # The text has ended inside the value. A string without closing quote marks the JSON as
                # incomplete.
                self._emit(f'"{_json_escaped("".join(parts))}')
                raise NotAToolCallError
        value = "".join(parts)
        if is_padded:
            value = value.removeprefix("\n").removesuffix("\n")
        self._emit(typed_json(value, types))


def _json_escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed_json(text: str, types: frozenset[str] | None) -> str:
    """Return an argument as JSON: the JSON value of the text, or the text as a string.

    The result is a string if the text is not JSON. If the schema allows strings, the result is also a string
    if the JSON value is a string, or has a type that the schema does not allow. If the schema allows no
    strings, or ``types`` is None, every JSON value is accepted.
    """
    stripped_text = text.strip()
    stripped_text = _PYTHON_NAMES.get(stripped_text, stripped_text)
    scanner = JsonScanner()
    end, json_text = scanner.feed(f"{stripped_text} ")  # a number ends only when another character follows
    if not scanner.is_complete or scanner.is_invalid or end < len(stripped_text):
        return json.dumps(text, ensure_ascii=False)
    if types is None or "string" not in types:
        return json_text
    number_types = {"number", "integer"} if _INTEGER.fullmatch(stripped_text) else {"number"}
    is_allowed = not types.isdisjoint(_TYPES_BY_FIRST_CHARACTER.get(stripped_text[0], number_types))
    # These formats write strings without quotes, so a leading quote is part of the string.
    return json_text if is_allowed and stripped_text[0] != '"' else json.dumps(text, ensure_ascii=False)
