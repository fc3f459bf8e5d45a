"""Grammars of arguments for formats that do not write the arguments as one JSON object.

The schema of the arguments object is split into one schema per argument. A keyword that cannot be enforced
per argument is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

_ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $id".split()
)
_OBJECT_KEYWORDS = _ANNOTATIONS.union(
    "type properties required additionalProperties $defs definitions".split()
)
_STRING_KEYWORDS = _ANNOTATIONS | {"type"}
_ANY_NAME = pattern("[A-Za-z0-9_.\\-]{1,64}")
_FIRST_CHARACTERS = {
    "object": "{",
    "array": "\\[",
    "boolean": "tfTF",
    "null": "nN",
    "number": "\\-0-9",
    "integer": "\\-0-9",
}


@dataclass(frozen=True)
class Arguments:
    """The schema of an arguments object, split into one schema per argument."""

    schemas: dict[str, Schema | bool]
    """Name -> schema of each argument, in the order of the output. Each schema includes all definitions."""
    required: frozenset[str]
    is_unrestricted: bool
    """Whether the schema names no argument and allows arguments of any name."""
    root: Schema

    @classmethod
    def of(cls, schema: Schema) -> Arguments:
        """Split the schema of an arguments object.

        Raises:
            UnsupportedSchemaError: a keyword restricts the object as a whole, such as ``minProperties``.
        """
        for keyword in schema:
            if keyword not in _OBJECT_KEYWORDS:
                reason = "this model writes arguments one by one: only their own schemas can be enforced"
                raise UnsupportedSchemaError(keyword, "#", reason)
        properties: dict[str, Schema | bool] = {**schema.get("properties", {})}
        required = frozenset(schema.get("required", ()))
        additional = schema.get("additionalProperties", True)
        for name in sorted(required - properties.keys()):
            properties[name] = additional
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        schemas = {
            name: {**property_schema, **definitions} if isinstance(property_schema, dict) else property_schema
            for name, property_schema in properties.items()
        }
        return cls(schemas, required, not schemas and additional is True, schema)


@dataclass(frozen=True)
class TaggedArguments:
    """A format in which a head with the name and an end marker enclose each argument. Strings have no quotes.

    Args:
        head: returns the text before a value, given the argument's name and whether the value is a string.
        end: the marker after a value.
        after: text after the end marker, as chat templates write it.
        padding: text before and after a value that is not part of the value, such as a line end.
        has_type: whether the head states if the value is a string. Otherwise the type follows from the
            schema.
    """

    head: Callable[[Tag, bool], Tag]
    end: str
    after: str = "\n"
    padding: str = ""
    has_type: bool = False

    def grammar(self, schema: Schema) -> Tag:
        """Return the grammar of the arguments of a schema, in schema order. Optional arguments may be absent.

        Raises:
            UnsupportedSchemaError: a keyword cannot be enforced in text that is not JSON.
        """
        arguments = Arguments.of(schema)
        if arguments.is_unrestricted:
            texts = [self._text(_ANY_NAME), *([self._json(_ANY_NAME, True)] if self.has_type else [])]
            return any_number(either(texts))
        parts = [
            part if name in arguments.required else optional(part)
            for name, argument_schema in arguments.schemas.items()
            for part in [self._argument(name, argument_schema, schema)]
        ]
        return sequence(*parts) if parts else constant("")

    def _text(self, name: Tag) -> Tag:
        return self._argument_tag(name, True, text_until(self.end))

    def _argument_tag(self, name: Tag, is_string: bool, *value: Tag) -> Tag:
        return sequence(self.head(name, is_string), constant(self.padding), *value, constant(self.after))

    def _json(self, name: Tag, schema: Schema | bool) -> Tag:
        value = by_schema(schema, escaped=self.end[0])  # an end marker in a string would end the value
        return self._argument_tag(name, False, value, constant(self.padding + self.end))

    def _argument(self, name: str, schema: Schema | bool, root: Schema) -> Tag:
        types = types_of(schema, root)
        key = constant(name)
        if types is None or "string" not in types:
            return self._json(key, schema)
        options = self._strings(key, schema, types, root, f"#/properties/{name}")
        other_types = sorted(types - {"string"})
        if other_types:
            assert isinstance(schema, dict)
            other_schema: Schema = {"allOf": [schema, {"type": other_types}]}
            other_schema |= {
                keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema
            }
            options.append(self._json(key, other_schema))
        return either(options)

    def _strings(
        self, key: Tag, schema: object, types: frozenset[str], root: Schema, where: str, depth: int = 0
    ) -> list[Tag]:
        """Return the tags of the strings that a schema allows, without quotes.

        The parser reads each of these texts as the same string.
        """
        assert isinstance(schema, dict)
        schema = {
            keyword: value for keyword, value in schema.items() if keyword not in ("$defs", "definitions")
        }
        keywords = [keyword for keyword in schema if keyword not in _STRING_KEYWORDS]
        if len(keywords) == 1 and depth < 8:
            [keyword] = keywords
            value = schema[keyword]
            if keyword == "$ref":
                target = _reference_target(value, root)
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
                texts = [text for text in (value if keyword == "enum" else [value]) if isinstance(text, str)]
                return [self._fixed_text(key, text, types, where) for text in texts]
        if set(keywords) <= {"minLength", "maxLength"} and keywords:
            minimum, maximum = schema.get("minLength", 0), schema.get("maxLength", "")
            first = self.end[0]
            text = pattern(f"[^{first}]{{{minimum},{maximum}}}")
            if len(types) == 1 or self.has_type:
                return [self._argument_tag(key, True, text, constant(self.padding + self.end))]
        elif not keywords:
            return [self._free_text(key, types)]
        raise UnsupportedSchemaError(
            keywords[0], where, "this model writes strings as plain text: only enum, const and lengths work"
        )

    def _free_text(self, key: Tag, types: frozenset[str]) -> Tag:
        if len(types) == 1 or self.has_type:
            return self._text(key)
        # A string must not begin like a value of another allowed type, or it would be read as that type.
        first_characters = "".join(sorted({_FIRST_CHARACTERS[type_] for type_ in types if type_ != "string"}))
        first = pattern(f'[^"\\s{first_characters}{self.end[0]}]')
        return self._argument_tag(key, True, first, text_until(self.end))

    def _fixed_text(self, key: Tag, text: str, types: frozenset[str], where: str) -> Tag:
        is_text = len(types) == 1 or self.has_type
        if self.end in text or not (
            is_text or typed_json(text, types) == json.dumps(text, ensure_ascii=False)
        ):
            raise UnsupportedSchemaError("enum", where, f"{text!r} as text is ambiguous")
        return self._argument_tag(key, True, constant(text + self.padding + self.end))


def _reference_target(reference: object, root: Mapping[str, object]) -> object:
    target: object = root
    steps = reference.removeprefix("#/").split("/") if isinstance(reference, str) else [""]
    for step in steps:
        target = target.get(step) if isinstance(target, dict) else None
    return target
