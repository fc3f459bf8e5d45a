"""Grammars of a call's arguments for formats that do not write them as one JSON object.

The schema of the object is taken apart into one schema an argument. A keyword that speaks of the object in a
way that this would lose is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import UnsupportedSchemaError
from penstock.serve.parsers.formats.tagged_calls import typed_json
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
from penstock.serve.parsers.tools import Schema, types_of

_REMARKS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $id".split()
)
_OF_OBJECTS = _REMARKS | frozenset("type properties required additionalProperties $defs definitions".split())
_OF_STRINGS = _REMARKS | {"type"}
_ANY_NAME = pattern("[A-Za-z0-9_.\\-]{1,64}")
_BEGINS = {
    "object": "{",
    "array": "\\[",
    "boolean": "tfTF",
    "null": "nN",
    "number": "\\-0-9",
    "integer": "\\-0-9",
}


@dataclass(frozen=True)
class Arguments:
    """What a schema says about single arguments."""

    schemas: dict[str, Schema | bool]
    """In the order in which they are written; each stands alone, with the definitions that it refers to."""
    required: frozenset[str]
    any_others: bool
    """Nothing is said about arguments: there may be any."""
    root: Schema

    @classmethod
    def of(cls, schema: Schema) -> Arguments:
        """Of the schema of a call's object.

        Raises:
            UnsupportedSchemaError: it says something that is about no single argument.
        """
        for keyword in schema:
            if keyword not in _OF_OBJECTS:
                reason = "this model writes arguments one by one: only their own schemas can be honoured"
                raise UnsupportedSchemaError(keyword, "#", reason)
        properties: dict[str, Any] = {**schema.get("properties", {})}
        required = frozenset(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        for name in sorted(required - properties.keys()):
            properties[name] = others
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        alone = {
            name: {**one, **definitions} if isinstance(one, dict) else one for name, one in properties.items()
        }
        return cls(alone, required, not alone and others is True, schema)


@dataclass(frozen=True)
class TaggedArguments:
    """Each argument between a head with its name and an end marker; strings stand there as they are.

    Args:
        head: what stands before a value: of the argument's name, and whether the text is a string.
        end: the marker behind it.
        after: stands behind that, as templates write it.
        line: stands on both sides of a value, and is not the value's.
        says_strings: the head tells strings from JSON; else the reader asks the schema.
    """

    head: Callable[[Tag, bool], Tag]
    end: str
    after: str = "\n"
    line: str = ""
    says_strings: bool = False

    def grammar(self, schema: Schema) -> Tag:
        """The arguments by a schema, in its order, optional ones present or not.

        Raises:
            UnsupportedSchemaError: a keyword cannot be honoured in text that is not JSON.
        """
        arguments = Arguments.of(schema)
        if arguments.any_others:
            texts = [self._text(_ANY_NAME), *([self._json(_ANY_NAME, True)] if self.says_strings else [])]
            return any_number(either(texts))
        parts = [
            part if name in arguments.required else optional(part)
            for name, one in arguments.schemas.items()
            for part in [self._argument(name, one, schema)]
        ]
        return sequence(*parts) if parts else constant("")

    def _text(self, name: Tag) -> Tag:
        return self._around(name, True, text_until(self.end))

    def _around(self, name: Tag, is_string: bool, *value: Tag) -> Tag:
        return sequence(self.head(name, is_string), constant(self.line), *value, constant(self.after))

    def _json(self, name: Tag, schema: Schema | bool) -> Tag:
        value = by_schema(schema, escaped=self.end[0])  # an end marker in a string would be the value's
        return self._around(name, False, value, constant(self.line + self.end))

    def _argument(self, name: str, schema: Schema | bool, root: Schema) -> Tag:
        types = types_of(schema, root)
        key = constant(name)
        if types is None or "string" not in types:
            return self._json(key, schema)
        options = self._strings(key, schema, types, root, f"#/properties/{name}")
        others = sorted(types - {"string"})
        if others:
            assert isinstance(schema, dict)
            parts: Schema = {"allOf": [schema, {"type": others}]}
            parts |= {one: schema[one] for one in ("$defs", "definitions") if one in schema}
            options.append(self._json(key, parts))
        return either(options)

    def _strings(
        self, key: Tag, schema: object, types: frozenset[str], root: Schema, where: str, depth: int = 0
    ) -> list[Tag]:
        """The ways to write what of the schema is a string, as text that reads as the same string."""
        assert isinstance(schema, dict)
        schema = {one: value for one, value in schema.items() if one not in ("$defs", "definitions")}
        said = [keyword for keyword in schema if keyword not in _OF_STRINGS]
        if len(said) == 1 and depth < 8:
            [keyword] = said
            value = schema[keyword]
            if keyword == "$ref":
                target = _referenced(value, root)
                if isinstance(target, dict) and "type" not in schema:
                    return self._strings(key, target, types, root, where, depth + 1)
            elif keyword == "anyOf" and "type" not in schema:
                return [
                    option
                    for part in value
                    if "string" in (types_of(part, root) or ())
                    for option in self._strings(key, part, types, root, where, depth + 1)
                ]
            elif keyword in ("const", "enum"):
                texts = [one for one in (value if keyword == "enum" else [value]) if isinstance(one, str)]
                return [self._exactly(key, text, types, where) for text in texts]
        if set(said) <= {"minLength", "maxLength"} and said:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            first = self.end[0]
            text = pattern(f"[^{first}]{{{least},{most}}}")
            if len(types) == 1 or self.says_strings:
                return [self._around(key, True, text, constant(self.line + self.end))]
        elif not said:
            return [self._free(key, types)]
        raise UnsupportedSchemaError(
            said[0], where, "this model writes strings as plain text: only enum, const and lengths are held"
        )

    def _free(self, key: Tag, types: frozenset[str]) -> Tag:
        if len(types) == 1 or self.says_strings:
            return self._text(key)
        # What begins like a value of another type may be read as one.
        begins = "".join(sorted({_BEGINS[one] for one in types if one != "string"}))
        first = pattern(f'[^"\\s{begins}{self.end[0]}]')
        return self._around(key, True, first, text_until(self.end))

    def _exactly(self, key: Tag, text: str, types: frozenset[str], where: str) -> Tag:
        is_text = len(types) == 1 or self.says_strings
        if self.end in text or not (
            is_text or typed_json(text, types) == json.dumps(text, ensure_ascii=False)
        ):
            raise UnsupportedSchemaError("enum", where, f"{text!r} cannot be told from other values as text")
        return self._around(key, True, constant(text + self.line + self.end))


def _referenced(reference: object, root: Mapping[str, Any]) -> object:
    target: object = root
    steps = reference.removeprefix("#/").split("/") if isinstance(reference, str) else [""]
    for step in steps:
        target = target.get(step) if isinstance(target, dict) else None
    return target
