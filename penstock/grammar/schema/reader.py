"""Reads JSON schemas: converts each schema to a union of shapes, each of one JSON type.

This module and `types` read all keywords. An unsupported keyword raises an error that names the keyword.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from urllib.parse import unquote

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema.intersections import intersect_all, union
from penstock.grammar.schema.keywords import (
    array_index,
    equality_key,
    escape_pointer,
    invalid_keyword,
    is_finite,
    read_branches,
    read_mapping,
    read_strings,
)
from penstock.grammar.schema.one_of import exactly_one
from penstock.grammar.schema.shapes import (
    REFUSED_KEYWORDS,
    Conjunction,
    Literal,
    SchemaNode,
    Shape,
    conjunction_key,
)
from penstock.grammar.schema.types import all_types, typed_shapes
from penstock.grammar.schema.validator import Validator

_MAX_DEPTH = 64  # maximum nesting of $ref and allOf; a schema's location has at most 4 * 64 slashes


class Reader:
    """Reads one schema document.

    Args:
        document: the result of ``json.loads``.

    Every method raises UnsupportedSchemaError with the location of an unsupported keyword, and InputError for
    an invalid schema.
    """

    def __init__(self, document: object) -> None:
        self.root: Conjunction = (SchemaNode(document, "#"),)
        self._document = document
        self._shapes: dict[tuple[str, ...], list[Shape]] = {}
        self._keys_in_progress: set[tuple[str, ...]] = set()
        self._validator = Validator(self._resolve, REFUSED_KEYWORDS)

    def shapes(self, conjunction: Conjunction) -> list[Shape]:
        """Return the values of a conjunction as a union of shapes; empty if no value satisfies it."""
        key = conjunction_key(conjunction)
        if key not in self._shapes:
            if key in self._keys_in_progress:
                where = conjunction[0].where
                raise UnsupportedSchemaError("$ref", where, "the reference is cyclic")
            self._keys_in_progress.add(key)
            try:
                self._shapes[key] = self._read_conjunction(conjunction)
            finally:
                self._keys_in_progress.discard(key)
        return self._shapes[key]

    def accepts(self, conjunction: Conjunction, value: object) -> bool:
        """Return whether a value satisfies a conjunction."""
        return all(self._validator.accepts(node, value) for node in conjunction)

    def _read_conjunction(self, conjunction: Conjunction) -> list[Shape]:
        listed_values = next(
            (values for node in conjunction if (values := self._listed_values(node)) is not None), None
        )
        if listed_values is not None:
            # The validator also evaluates keywords that grammars do not support.
            return [Literal(value) for value in listed_values if self.accepts(conjunction, value)]
        shapes = all_types()
        for node in conjunction:
            shapes = intersect_all(self, shapes, self._read(node), node)
        return shapes

    def _listed_values(self, node: SchemaNode, depth: int = 0) -> list[object] | None:
        """Return the values of ``const`` or ``enum`` of the schema, or else of its ``$ref`` or ``allOf``.

        Values that UTF-8 cannot encode are left out. Returns None if none of these schemas has ``const`` or
        ``enum``. Schemas nested deeper than `_MAX_DEPTH` are not searched.
        """
        schema = node.schema
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return None
        for keyword in ("const", "enum"):
            if keyword in schema and not is_finite(schema[keyword]):
                raise invalid_keyword(node, keyword, "without infinities and NaN, which JSON does not have")
        if "const" in schema:
            return [value for value in [schema["const"]] if _is_encodable(value)]
        if "enum" in schema:
            if not isinstance(schema["enum"], list):
                raise invalid_keyword(node, "enum", "an array")
            distinct_values: dict[object, object] = {}
            for value in schema["enum"]:
                distinct_values.setdefault(equality_key(value), value)
            return [value for value in distinct_values.values() if _is_encodable(value)]
        subschemas = [self._resolve(node)] if "$ref" in schema else []
        subschemas += read_branches(node, "allOf")
        return next(
            (
                values
                for subschema in subschemas
                if (values := self._listed_values(subschema, depth + 1)) is not None
            ),
            None,
        )

    def _read(self, node: SchemaNode) -> list[Shape]:
        schema = node.schema
        if schema is True:
            return all_types()
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise InputError(f"the JSON schema at {node.where} is {schema!r}, not an object, true or false")
        if node.where.count("/") > 4 * _MAX_DEPTH:
            raise InputError(f"the JSON schema is nested too deeply, at {node.where[:80]}...")
        for keyword, reason in REFUSED_KEYWORDS.items():
            if keyword in schema and not (keyword == "if" and not {"then", "else"} & schema.keys()):
                raise UnsupportedSchemaError(keyword, node.where, reason)
        if "$id" in schema and node.where != "#":
            raise UnsupportedSchemaError("$id", node.where, "only the outermost schema may have one")
        shapes = typed_shapes(self, node, self._is_of_older_draft)
        for applied_shapes in self._applied_shapes(node):
            shapes = intersect_all(self, shapes, applied_shapes, node)
        return exactly_one(self, node, shapes) if "oneOf" in schema else shapes

    def _applied_shapes(self, node: SchemaNode) -> Iterator[list[Shape]]:
        """Yield the union of shapes of each condition on the same value: $ref, allOf, anyOf, dependencies."""
        schema = node.schema
        if "$ref" in schema:
            yield self.shapes((self._resolve(node),))
        for branch in read_branches(node, "allOf"):
            yield self.shapes((branch,))
        if "anyOf" in schema:
            yield union([self.shapes((branch,)) for branch in read_branches(node, "anyOf")], node)
        dependencies: list[tuple[str, object]] = [
            (name, {"required": [name, *read_strings(node, "dependentRequired", names)]})
            for name, names in read_mapping(node, "dependentRequired").items()
        ]
        dependencies += [
            (name, {"required": [name], "allOf": [value]})
            for name, value in read_mapping(node, "dependentSchemas").items()
        ]
        for index, (name, consequence) in enumerate(dependencies):
            where = f"{node.where}#dependent/{index}"  # unique, for `conjunction_key`; not a JSON pointer
            absent_property = SchemaNode({"properties": {name: False}}, f"{where}/absent")
            yield union(
                [self.shapes((absent_property,)), self.shapes((SchemaNode(consequence, where),))], node
            )

    def _resolve(self, node: SchemaNode) -> SchemaNode:
        reference = node.schema["$ref"]
        if not isinstance(reference, str):
            raise invalid_keyword(node, "$ref", "a string")
        base_uri = self._document.get("$id") if isinstance(self._document, dict) else None
        if isinstance(base_uri, str) and reference.startswith(f"{base_uri.rstrip('#')}#"):
            reference = reference[len(base_uri.rstrip("#")) :]
        if reference != "#" and not reference.startswith("#/"):
            reason = f"only locations in the same schema are resolved, written #/... (was {reference!r})"
            raise UnsupportedSchemaError("$ref", node.where, reason)
        referenced_schema: object = self._document
        where = "#"
        for part in unquote(reference).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                if not isinstance(referenced_schema, dict | list):
                    raise KeyError(name)
                referenced_schema = (
                    referenced_schema[array_index(name)]
                    if isinstance(referenced_schema, list)
                    else referenced_schema[name]
                )
            except (KeyError, IndexError, ValueError):
                message = f"the JSON schema's $ref {reference!r} (at {node.where}) does not exist"
                raise InputError(message) from None
            where = f"{where}/{escape_pointer(name)}"
        return SchemaNode(referenced_schema, where)

    @cached_property
    def _is_of_older_draft(self) -> bool:
        """Whether ``$schema`` of the document names a draft before 2020-12, which has no ``prefixItems``."""
        name = self._document.get("$schema") if isinstance(self._document, dict) else None
        return isinstance(name, str) and ("/draft-0" in name or "/draft/2019-09/" in name)


def _is_encodable(value: object) -> bool:
    """Return whether UTF-8 can encode a value. UTF-8 cannot encode unpaired surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
