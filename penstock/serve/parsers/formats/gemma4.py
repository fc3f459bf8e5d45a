"""Calls of Gemma 4: ``<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>``.

Arguments look like JSON with two differences: keys have no quotes, and ``<|"|>`` stands on both sides of a
string, which has no escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import UnsupportedSchemaError
from penstock.serve.parsers.formats.arguments import Arguments, comma_separated
from penstock.serve.parsers.formats.json_calls import read_end_marker
from penstock.serve.parsers.formats.tool_format import ToolFormat
from penstock.serve.parsers.json_scanner import JsonScanner
from penstock.serve.parsers.output_parser import ReasoningToolParser
from penstock.serve.parsers.stream import IncrementalText, MarkerSearch, NotAToolCallError, Reader
from penstock.serve.parsers.structural_tags import (
    Tag,
    any_number,
    by_schema,
    constant,
    either,
    optional,
    pattern,
    sequence,
    text_until,
)
from penstock.serve.parsers.tools import Schema, Tools
from penstock.serve.parsers.value_scanner import MAX_DEPTH, MAX_WORD_LENGTH, NUMBER, scan_value

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[\w.\-]+")
_WORD = re.compile(r"[0-9A-Za-z_+\-.]+")
_MAX_NAME_LENGTH = 256
_QUOTE_SEARCH, _KEY_END = MarkerSearch([_QUOTE]), MarkerSearch([":"])
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ANNOTATIONS = frozenset("title description default examples deprecated readOnly writeOnly nullable".split())
_DEFINITIONS = ("$defs", "definitions")
_MAX_ITEMS = 63
_SCALARS = ("boolean", "integer", "null", "number")

Write = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Gemma4Calls(ToolFormat):
    """Calls of Gemma 4. Each call has its own markers."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (_BEGIN,)

    def read(self, parser: ReasoningToolParser, marker: str) -> Reader[None]:
        stream = parser.stream
        yield from stream.skip_space()
        yield from stream.expect("call:")
        name = yield from stream.take_run(_NAME, _MAX_NAME_LENGTH)
        yield from stream.skip_space()
        yield from stream.expect("{")
        if parser.has_tool(name):
            parser.start_call(name)
            parser.add_arguments("{")
            yield from _read_members(stream, parser.add_arguments, 1)
            parser.end_call()
        else:
            parser.mark_unknown_tool()
            yield from _read_members(stream, lambda text: None, 1)
        yield from read_end_marker(parser, _END)

    def after_marker(self, marker: str, tools: Tools, parallel: bool) -> Tag:
        return either(
            [
                sequence(
                    constant(f"call:{name}{{"),
                    _Grammar(schema).members(schema, "#", 0),
                    constant("}" + _END),
                )
                for name, schema in tools.schemas.items()
            ]
        )


def _read_members(stream: IncrementalText, write: Write, depth: int) -> Reader[None]:
    """Read ``a:1,b:2}`` after the opening brace of an object, and write its JSON text."""
    separator = ""
    yield from stream.skip_space()
    is_end = bool((yield from stream.accept("}")))
    while not is_end:
        if (yield from stream.accept(_QUOTE)):
            key = yield from stream.take_until(_QUOTE_SEARCH, _MAX_NAME_LENGTH)
            yield from stream.skip_space()
            yield from stream.expect(":")
        else:
            key = (yield from stream.take_until(_KEY_END, _MAX_NAME_LENGTH)).strip()
        yield from stream.skip_space()
        write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _read_value(stream, write, depth)
        separator = ", "
        is_end = yield from _read_separator(stream, "}")
    write("}")


def _read_items(stream: IncrementalText, write: Write, depth: int) -> Reader[None]:
    """Read ``1,2]`` after the opening bracket of an array, and write its JSON text."""
    separator = ""
    yield from stream.skip_space()
    is_end = bool((yield from stream.accept("]")))
    while not is_end:
        write(separator)
        yield from _read_value(stream, write, depth)
        separator = ", "
        is_end = yield from _read_separator(stream, "]")
    write("]")


def _read_separator(stream: IncrementalText, bracket: str) -> Reader[bool]:
    """Read a comma, the closing bracket, or both. Return whether the bracket was there."""
    yield from stream.skip_space()
    if (yield from stream.accept(",")):
        yield from stream.skip_space()
        return bool((yield from stream.accept(bracket)))
    yield from stream.expect(bracket)
    return True


def _read_value(stream: IncrementalText, write: Write, depth: int) -> Reader[None]:
    """Read a value and write its JSON text as it arrives.

    Raises:
        NotAToolCallError: the text is not a value, or it is nested too deeply.
    """
    if (yield from stream.accept(_QUOTE)):
        write('"')
        while True:
            text, marker = yield from stream.take_text_or_marker(_QUOTE_SEARCH)
            if marker:
                break
            if not text:
                raise NotAToolCallError
            write(json.dumps(text, ensure_ascii=False)[1:-1])
        write('"')
        return
    char = yield from stream.peek()
    if char in ("{", "["):
        if depth == MAX_DEPTH:
            raise NotAToolCallError
        yield from stream.expect(char)
        write(char)
        yield from (_read_members if char == "{" else _read_items)(stream, write, depth + 1)
    elif char == '"':  # some models write JSON strings
        yield from scan_value(stream, JsonScanner(), write)
    else:
        word = yield from stream.take_run(_WORD, MAX_WORD_LENGTH)
        if word not in _WORDS and not NUMBER.fullmatch(word):
            raise NotAToolCallError
        write(_WORDS.get(word, word))


class _Grammar:
    """Grammars of the values that the schema of a tool allows, in the notation of Gemma 4.

    Args:
        root: the schema of the arguments, which contains the definitions.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root

    def members(self, schema: Schema, path: str, depth: int) -> Tag:
        """Return the grammar of the members of an object, without braces.

        Required members come first, then optional members, both in schema order. If the schema names no
        member, up to 64 members with any names are allowed.

        Raises:
            UnsupportedSchemaError: a keyword of the schema cannot be enforced.
        """
        arguments = Arguments.from_schema(schema)
        if arguments.is_unrestricted:
            member = sequence(pattern("[A-Za-z_][A-Za-z0-9_]{0,63}"), constant(":"), self._any_value())
            return optional(sequence(member, any_number(sequence(constant(","), member))))
        tags = {
            key: sequence(constant(f"{key}:"), self._value(value, f"{path}/properties/{key}", depth + 1))
            for key, value in arguments.schemas.items()
        }
        required = [tag for key, tag in tags.items() if key in arguments.required]
        optionals = [tag for key, tag in tags.items() if key not in arguments.required]
        return comma_separated(required, optionals, ",")

    def _any_value(self) -> Tag:
        """Return the grammar of strings, numbers, booleans and null."""
        return either([_string(), by_schema({"type": list(_SCALARS)})])

    def _value(self, schema: Schema | bool, path: str, depth: int) -> Tag:
        """Return the grammar of a value.

        Raises:
            UnsupportedSchemaError: a keyword of the schema cannot be enforced.
        """
        if depth > MAX_DEPTH:
            raise UnsupportedSchemaError("$ref", path, "the schema is nested too deeply for this model")
        if schema is False:
            raise UnsupportedSchemaError("properties", path, "no value satisfies the schema false")
        if schema is True:
            return self._any_value()
        keywords = {
            key: value for key, value in schema.items() if key not in _ANNOTATIONS and key not in _DEFINITIONS
        }
        if not keywords:
            return self._any_value()
        for key in ("enum", "const"):
            if key in keywords:
                values = keywords[key] if key == "enum" else [keywords[key]]
                return either([self._constant(value, path) for value in values])
        if len(keywords) == 1 and "$ref" in keywords:
            return self._value(self._target(str(keywords["$ref"]), path), path, depth + 1)
        if len(keywords) == 1 and "anyOf" in keywords:
            parts = keywords["anyOf"]
            assert isinstance(parts, list)
            return either([self._value(part, path, depth + 1) for part in parts])
        types = keywords.pop("type", None)
        if isinstance(types, list):
            return either(
                [self._typed(str(type_), _keywords_of(str(type_), keywords), path, depth) for type_ in types]
            )
        if not isinstance(types, str):
            raise UnsupportedSchemaError(
                next(iter(keywords)), path, "this model's calls need a type, an enum or anyOf"
            )
        return self._typed(types, keywords, path, depth)

    def _typed(self, type_: str, keywords: Schema, path: str, depth: int) -> Tag:
        if type_ in _SCALARS:
            return by_schema({"type": type_, **keywords})
        if type_ == "string":
            return _string(keywords, path)
        if type_ == "object":
            definitions = {key: self._root[key] for key in _DEFINITIONS if key in self._root}
            members = self.members({"type": "object", **keywords, **definitions}, path, depth)
            return sequence(constant("{"), members, constant("}"))
        if type_ == "array":
            return self._array(keywords, path, depth)
        raise UnsupportedSchemaError("type", path, f"{type_!r} is not a type of JSON")

    def _array(self, keywords: Schema, path: str, depth: int) -> Tag:
        minimum, maximum = keywords.get("minItems", 0), keywords.get("maxItems", _MAX_ITEMS + 1)
        unsupported = keywords.keys() - {"items", "minItems", "maxItems"}
        if unsupported or not isinstance(minimum, int) or not isinstance(maximum, int):
            raise UnsupportedSchemaError(
                min(unsupported, default="minItems"), path, "in calls of this model it cannot be enforced"
            )
        if maximum < max(minimum, 1):
            if minimum > maximum:
                raise UnsupportedSchemaError("maxItems", path, "is less than minItems")
            return constant("[]")
        items = keywords.get("items", True)
        item = self._value(items, f"{path}/items", depth + 1)
        further = {
            "type": "repeat",
            "min": max(minimum - 1, 0),
            "max": min(maximum, _MAX_ITEMS + 1) - 1,
            "content": sequence(constant(","), item),
        }
        elements = sequence(item, further) if further["max"] else item
        return sequence(constant("["), elements if minimum else optional(elements), constant("]"))

    def _constant(self, value: object, path: str) -> Tag:
        return constant(_render(value, path))

    def _target(self, reference: str, path: str) -> Schema | bool:
        target: object = self._root
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        if not isinstance(target, dict | bool):
            raise UnsupportedSchemaError("$ref", path, f"{reference!r} names no schema in the arguments")
        return target


def _keywords_of(type_: str, keywords: Schema) -> Schema:
    """Return the keywords that apply to a type, for a schema with several types."""
    groups = {
        "string": ("minLength", "maxLength", "pattern", "format"),
        "array": ("items", "minItems", "maxItems", "uniqueItems", "prefixItems", "contains"),
        "object": ("properties", "required", "additionalProperties"),
    }
    others = {key for name, keys in groups.items() if name != type_ for key in keys}
    return {key: value for key, value in keywords.items() if key not in others}


def _string(keywords: Schema | None = None, path: str = "#") -> Tag:
    """Return the grammar of a string with quotes. Lengths are enforced for strings without ``<``."""
    keywords = keywords or {}
    unsupported = keywords.keys() - {"minLength", "maxLength"}
    if unsupported:
        raise UnsupportedSchemaError(
            min(unsupported),
            path,
            "this model writes strings without escapes: only enum, const and lengths work",
        )
    if not keywords:
        return sequence(constant(_QUOTE), text_until(_QUOTE))
    lengths = f"{{{keywords.get('minLength', 0)},{keywords.get('maxLength', '')}}}"
    return sequence(constant(_QUOTE), pattern(f"[^<]{lengths}"), constant(_QUOTE))


def _render(value: object, path: str) -> str:
    """Return a JSON value in the notation of Gemma 4."""
    if isinstance(value, str):
        if _QUOTE in value:
            raise UnsupportedSchemaError("enum", path, f"{value!r} contains the quotes of this model")
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_render(member, path)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_render(item, path) for item in value) + "]"
    return json.dumps(value)
