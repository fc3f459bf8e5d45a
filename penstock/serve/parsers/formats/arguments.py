"""Grammars of call arguments, for formats that do not write all arguments as one JSON object.

The schema of the arguments object is split into one schema per argument. Keywords that cannot be enforced
for each argument alone are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    """Name -> schema of each argument: first the ``properties``, then the other required arguments.

    Schemas that are objects include all definitions.
    """
    required: frozenset[str]
    is_unrestricted: bool
    """Whether the schema names no argument and allows arguments of any name."""
    root: Schema
    """The schema of the whole object, which contains the definitions."""

    @classmethod
    def from_schema(cls, schema: Schema) -> Arguments:
        """Split the schema of an arguments object.

        Raises:
            UnsupportedSchemaError: a keyword restricts the object as a whole, such as ``minProperties``.
        """
        for keyword in schema:
            if keyword not in _OBJECT_KEYWORDS:
                reason = "this model writes arguments one by one: only schemas of arguments can be enforced"
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
    """A format in which a begin tag with the name and an end marker enclose each argument.

    Strings are written without quotes.

    Args:
        begin_tag: returns the text before a value, given the argument's name and whether the value is a
            string.
        end: the marker after a value.
        text_after: text after the end marker, as chat templates write it.
        padding: text on both sides of a value that is not part of the value, such as a line end.
        has_type: whether the begin tag states if the value is a string. If not, the schema determines the
            type of the value.
    """

    begin_tag: Callable[[Tag, bool], Tag]
    end: str
    text_after: str = "\n"
    padding: str = ""
    has_type: bool = False

    def grammar(self, schema: Schema) -> Tag:
        """Return the grammar of the arguments in schema order. Optional arguments can be left out.

        If the schema does not restrict the arguments, up to 63 arguments with any names are allowed.

        Raises:
            UnsupportedSchemaError: a keyword restricts the object as a whole or cannot be enforced in text
                that is not JSON, or the text of an enum value is ambiguous.
        """
        arguments = Arguments.from_schema(schema)
        if arguments.is_unrestricted:
            alternatives = [
                self._string_tag(_ANY_NAME),
                *([self._json_tag(_ANY_NAME, True)] if self.has_type else []),
            ]
            return any_number(either(alternatives))
        argument_tags = [
            tag if name in arguments.required else optional(tag)
            for name, argument_schema in arguments.schemas.items()
            for tag in [self._argument_tag(name, argument_schema, schema)]
        ]
        return sequence(*argument_tags) if argument_tags else constant("")

    def _string_tag(self, name: Tag) -> Tag:
        return self._enclosed_tag(name, True, text_until(self.end))

    def _enclosed_tag(self, name: Tag, is_string: bool, *value: Tag) -> Tag:
        return sequence(
            self.begin_tag(name, is_string), constant(self.padding), *value, constant(self.text_after)
        )

    def _json_tag(self, name: Tag, schema: Schema | bool) -> Tag:
        value = by_schema(schema, escaped=self.end[0])  # an end marker in a string would end the value
        return self._enclosed_tag(name, False, value, constant(self.padding + self.end))

    def _argument_tag(self, name: str, schema: Schema | bool, root: Schema) -> Tag:
        types = types_of(schema, root)
        name_tag = constant(name)
        if types is None or "string" not in types:
            return self._json_tag(name_tag, schema)
        alternatives = self._string_tags(name_tag, schema, types, root, f"#/properties/{name}")
        other_types = sorted(types - {"string"})
        if other_types:
            assert isinstance(schema, dict)
            other_schema: Schema = {"allOf": [schema, {"type": other_types}]}
            other_schema |= {
                keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema
            }
            alternatives.append(self._json_tag(name_tag, other_schema))
        return either(alternatives)

    def _string_tags(
        self, name_tag: Tag, schema: object, types: frozenset[str], root: Schema, path: str, depth: int = 0
    ) -> list[Tag]:
        """Return the structural tags of the strings that a schema allows, without quotes.

        The tags match only texts that the parser reads as strings, not as values of another type.

        Raises:
            UnsupportedSchemaError: a keyword cannot be enforced in unquoted text, or the text of an enum
                value is ambiguous.
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
                    return self._string_tags(name_tag, target, types, root, path, depth + 1)
            elif keyword == "anyOf" and "type" not in schema:
                return [
                    tag
                    for part in value
                    if "string" in (types_of(part, root) or ())
                    for tag in self._string_tags(name_tag, part, types, root, path, depth + 1)
                ]
            elif keyword in ("const", "enum"):
                texts = [text for text in (value if keyword == "enum" else [value]) if isinstance(text, str)]
                return [self._fixed_text_tag(name_tag, text, types, path) for text in texts]
        if set(keywords) <= {"minLength", "maxLength"} and keywords:
            minimum, maximum = schema.get("minLength", 0), schema.get("maxLength", "")
            end_character = self.end[0]
            text = pattern(f"[^{end_character}]{{{minimum},{maximum}}}")
            if len(types) == 1 or self.has_type:
                return [self._enclosed_tag(name_tag, True, text, constant(self.padding + self.end))]
        elif not keywords:
            return [self._free_text_tag(name_tag, types)]
        raise UnsupportedSchemaError(
            keywords[0], path, "this model writes strings as plain text: only enum, const and lengths work"
        )

    def _free_text_tag(self, name_tag: Tag, types: frozenset[str]) -> Tag:
        if len(types) == 1 or self.has_type:
            return self._string_tag(name_tag)
        # The parser reads a text that begins like a value of another allowed type as that type.
        first_characters = "".join(sorted({_FIRST_CHARACTERS[type_] for type_ in types if type_ != "string"}))
        first_character_tag = pattern(f'[^"\\s{first_characters}{self.end[0]}]')
        return self._enclosed_tag(name_tag, True, first_character_tag, text_until(self.end))

    def _fixed_text_tag(self, name_tag: Tag, text: str, types: frozenset[str], path: str) -> Tag:
        is_always_string = len(types) == 1 or self.has_type
        if self.end in text or not (
            is_always_string or typed_json(text, types) == json.dumps(text, ensure_ascii=False)
        ):
            raise UnsupportedSchemaError("enum", path, f"{text!r} as text is ambiguous")
        return self._enclosed_tag(name_tag, True, constant(text + self.padding + self.end))


def comma_separated(required_tags: Sequence[Tag], optional_tags: Sequence[Tag], separator: str) -> Tag:
    """Return the grammar of a list of arguments with a separator.

    Required arguments come first, so that every optional argument can begin with the separator.
    """
    parts = [sequence(constant(separator), tag) if index else tag for index, tag in enumerate(required_tags)]
    if required_tags:
        parts += [optional(sequence(constant(separator), tag)) for tag in optional_tags]
    elif optional_tags:
        parts.append(optional(_any_of_in_order(optional_tags, separator)))
    return sequence(*parts)


def _any_of_in_order(tags: Sequence[Tag], separator: str) -> Tag:
    """Return the tag of a text that matches one or more of the tags in their order, with a separator."""
    return either(
        [
            sequence(first_tag, *(optional(sequence(constant(separator), tag)) for tag in tags[index + 1 :]))
            for index, first_tag in enumerate(tags)
        ]
    )


def _reference_target(reference: object, root: Mapping[str, object]) -> object:
    target: object = root
    steps = reference.removeprefix("#/").split("/") if isinstance(reference, str) else [""]
    for step in steps:
        target = target.get(step) if isinstance(target, dict) else None
    return target
