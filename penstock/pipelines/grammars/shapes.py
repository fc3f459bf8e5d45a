"""JSON schemas, taken apart: which shapes a value may have, each of one JSON type.

A value must satisfy a *conjunction* of schemas (``allOf``, ``$ref`` beside other keywords, the same property
in two schemas). `Reader.shapes` multiplies it out into alternatives of single types, which is where every
keyword is read, and where those that no grammar can be made of are refused by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, TypeAlias
from urllib.parse import unquote

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.pipelines.grammars import formats, regex
from penstock.pipelines.grammars.numbers import NO_BOUNDS, Bounds

MAX_SHAPES = 1000
_MAX_DEPTH = 64
_LARGEST_COUNT = 1_000_000_000

REFUSED = {
    "not": "what is left out cannot be told from what is let in, token by token",
    "if": "use anyOf with a const that tells the cases apart",
    "then": "use anyOf with a const that tells the cases apart",
    "else": "use anyOf with a const that tells the cases apart",
    "contains": "which item it is cannot be told in advance: describe the items with prefixItems",
    "minContains": "use minItems",
    "maxContains": "use maxItems",
    "dependencies": "use dependentRequired or dependentSchemas",
    "additionalItems": "use prefixItems and items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "divisibleBy": "use multipleOf",
    "disallow": "use anyOf with the types that are let in",
    "extends": "use allOf",
}
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependentRequired")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A schema and where it stands."""

    schema: Any
    where: str


Conjunction: TypeAlias = tuple[Node, ...]
ANYTHING: Conjunction = ()
NEVER: Conjunction = (Node(False, "#false"),)


@dataclass(frozen=True, slots=True)
class Literal:
    """One value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Numeric:
    """Numbers in an interval."""

    bounds: Bounds = NO_BOUNDS
    is_integer: bool = False
    multiple_of: int = 1
    said_at: str = "#"


@dataclass(frozen=True, slots=True)
class Text:
    """Strings of some length that match a regular expression."""

    least: int = 0
    most: int | None = None
    tree: regex.Node | None = None
    said_by: Node | None = None  # whose expression or format it is, and the keyword
    keyword: str = ""


@dataclass(frozen=True, slots=True)
class Array:
    """Arrays: the first items, then others."""

    prefix: tuple[Conjunction, ...] = ()
    items: Conjunction = ANYTHING
    least: int = 0
    most: int | None = None

    def item(self, index: int) -> Conjunction:
        """What the item at an index must satisfy."""
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True, slots=True)
class Object:
    """Objects: properties by name, and others."""

    properties: dict[str, Conjunction] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: Conjunction = ANYTHING
    says_others: bool = False  # whether a schema says anything about them
    names: Text | None = None  # how the names of the others are written
    least: int = 0
    most: int | None = None
    minimum_at: str = "#"

    def property(self, name: str) -> Conjunction:
        """What the property of a name must satisfy."""
        return self.properties.get(name, self.others)


Shape: TypeAlias = Literal | Numeric | Text | Array | Object


class Reader:
    """Reads one schema document.

    Args:
        document: the schema as ``json.loads`` gives it.

    Every method raises UnsupportedSchemaError for a keyword that cannot be honoured, with its place, and
    InputError for what is no schema.
    """

    def __init__(self, document: Any) -> None:
        self.root: Conjunction = (Node(document, "#"),)
        self._document = document
        self._shapes: dict[tuple[str, ...], list[Shape]] = {}
        self._open: set[tuple[str, ...]] = set()

    def shapes(self, conjunction: Conjunction) -> list[Shape]:
        """The alternatives of a conjunction; none where nothing satisfies it."""
        key = key_of(conjunction)
        if key not in self._shapes:
            if key in self._open:
                where = conjunction[0].where
                raise UnsupportedSchemaError("$ref", where, "it refers to itself without end")
            self._open.add(key)
            try:
                found = self._all_types()
                for node in conjunction:
                    found = self._meet_all(found, self._read(node), node)
            finally:
                self._open.discard(key)
            self._shapes[key] = found
        return self._shapes[key]

    def accepts(self, conjunction: Conjunction, value: Any) -> bool:
        """Whether a value satisfies a conjunction."""
        return any(self._has(shape, value) for shape in self.shapes(conjunction))

    # -- One schema -------------------------------------------------------------------------------------

    def _read(self, node: Node) -> list[Shape]:
        schema = node.schema
        if schema is True:
            return self._all_types()
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise InputError(f"the JSON schema at {node.where} is {schema!r}, not an object, true or false")
        if node.where.count("/") > 4 * _MAX_DEPTH:
            raise InputError(f"the JSON schema is nested too deeply, at {node.where[:80]}...")
        for keyword, reason in REFUSED.items():
            if keyword in schema and not (keyword == "if" and not {"then", "else"} & schema.keys()):
                raise UnsupportedSchemaError(keyword, node.where, reason)
        if "$id" in schema and node.where != "#":
            raise UnsupportedSchemaError("$id", node.where, "only the outermost schema may have one")
        found = self._of_types(node)
        for values in self._enumerations(node):
            found = self._meet_all(found, [Literal(value) for value in values], node)
        for group in self._applied(node):
            found = self._meet_all(found, group, node)
        return self._one_of(node, found) if "oneOf" in schema else found

    def _enumerations(self, node: Node) -> Iterator[list[Any]]:
        for keyword in ("const", "enum"):
            if keyword in node.schema and not _is_finite(node.schema[keyword]):
                raise _wrong(node, keyword, "without infinities and NaN, which JSON cannot write")
        if "const" in node.schema:
            yield [node.schema["const"]]
        if "enum" in node.schema:
            values = node.schema["enum"]
            if not isinstance(values, list):
                raise _wrong(node, "enum", "an array")
            unique: dict[Any, Any] = {}
            for value in values:
                unique.setdefault(_identity(value), value)
            yield list(unique.values())

    def _applied(self, node: Node) -> Iterator[list[Shape]]:
        """The shapes of each schema, or group of schemas, that applies to the same value."""
        schema = node.schema
        if "$ref" in schema:
            yield self.shapes((self._resolve(node),))
        for branch in self._branches(node, "allOf"):
            yield self.shapes((branch,))
        if "anyOf" in schema:
            yield self._union([self.shapes((branch,)) for branch in self._branches(node, "anyOf")], node)
        needed = [
            (name, {"required": [name, *_strings(node, "dependentRequired", names)]})
            for name, names in _mapping(node, "dependentRequired").items()
        ]
        needed += [
            (name, {"required": [name], "allOf": [one]})
            for name, one in _mapping(node, "dependentSchemas").items()
        ]
        for index, (name, consequence) in enumerate(needed):
            where = f"{node.where}#dependent/{index}"  # no pointer of the document
            absent = Node({"properties": {name: False}}, f"{where}/absent")
            yield self._union([self.shapes((absent,)), self.shapes((Node(consequence, where),))], node)

    def _branches(self, node: Node, keyword: str) -> list[Node]:
        branches = node.schema.get(keyword, [])
        if not isinstance(branches, list) or (keyword in node.schema and not branches):
            raise _wrong(node, keyword, "an array that is not empty")
        return [Node(branch, f"{node.where}/{keyword}/{i}") for i, branch in enumerate(branches)]

    def _resolve(self, node: Node) -> Node:
        target = node.schema["$ref"]
        if not isinstance(target, str):
            raise _wrong(node, "$ref", "a string")
        base = self._document.get("$id") if isinstance(self._document, dict) else None
        if isinstance(base, str) and target.startswith(f"{base.rstrip('#')}#"):
            target = target[len(base.rstrip("#")) :]
        if target != "#" and not target.startswith("#/"):
            reason = f"only places in the same schema are looked up, written #/... (was {target!r})"
            raise UnsupportedSchemaError("$ref", node.where, reason)
        found = self._document
        where = "#"
        for part in unquote(target).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[_index(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                message = f"the JSON schema's $ref {target!r} (at {node.where}) leads nowhere"
                raise InputError(message) from None
            where = f"{where}/{_escaped(name)}"
        return Node(found, where)

    # -- Types ------------------------------------------------------------------------------------------

    def _all_types(self) -> list[Shape]:
        return [Literal(None), Literal(True), Literal(False), Numeric(), Text(), Array(), Object()]

    def _of_types(self, node: Node) -> list[Shape]:
        given = node.schema.get("type", list(_TYPES))
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or not all(isinstance(one, str) for one in types):
            raise _wrong(node, "type", "the name of a type or an array of them")
        for one in types:
            if one not in _TYPES:
                raise _wrong(node, "type", f"among {', '.join(_TYPES)}")
        shapes: list[Shape] = []
        if "null" in types:
            shapes.append(Literal(None))
        if "boolean" in types:
            shapes += [Literal(True), Literal(False)]
        if "number" in types or "integer" in types:
            shapes.append(self._numeric(node, is_integer="number" not in types))
        if "string" in types:
            shapes.append(self._text(node))
        if "array" in types:
            shapes.append(self._array(node))
        if "object" in types:
            shapes.append(self._object(node))
        return shapes

    def _numeric(self, node: Node, is_integer: bool) -> Numeric:
        numbers = {
            keyword: _number(node, keyword)
            for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        }
        bounds = Bounds(numbers["minimum"], numbers["maximum"]).both(
            Bounds(numbers["exclusiveMinimum"], numbers["exclusiveMaximum"], True, True)
        )
        factor = numbers["multipleOf"]
        if factor is None:
            return Numeric(bounds, is_integer)
        if factor != int(factor) or factor <= 0:
            raise UnsupportedSchemaError("multipleOf", node.where, f"only whole numbers are, was {factor}")
        return Numeric(bounds, True, int(factor), node.where)

    def _text(self, node: Node) -> Text:
        least, most = _counts(node, "minLength", "maxLength")
        text = Text(least, most)
        pattern = node.schema.get("pattern")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise _wrong(node, "pattern", "a string")
            try:
                tree = regex.parse_regex(pattern, search=True)
            except InputError as error:
                raise UnsupportedSchemaError("pattern", node.where, str(error)) from None
            text = self._meet_text(text, Text(tree=tree, said_by=node, keyword="pattern"))
        name = node.schema.get("format", "")
        if not isinstance(name, str):
            raise _wrong(node, "format", "a string")
        if name in formats.UNSUPPORTED:
            known = ", ".join(formats.SUPPORTED)
            raise UnsupportedSchemaError("format", node.where, f"{name!r} is not among {known}")
        if name in formats.SUPPORTED:
            tree = regex.parse_regex(formats.SUPPORTED[name], search=False)
            text = self._meet_text(text, Text(tree=tree, said_by=node, keyword="format"))
        return text

    def _array(self, node: Node) -> Array:
        schema = node.schema
        if schema.get("uniqueItems", False) is not False:
            raise UnsupportedSchemaError(
                "uniqueItems", node.where, "all items before would have to be remembered"
            )
        least, most = _counts(node, "minItems", "maxItems")
        if "prefixItems" in schema and self._is_of_older_draft():
            reason = "the draft that $schema names does not know it: name draft 2020-12"
            raise UnsupportedSchemaError("prefixItems", node.where, reason)
        given = schema.get("prefixItems", [])
        if not isinstance(given, list):
            raise _wrong(node, "prefixItems", "an array")
        prefix = tuple((Node(one, f"{node.where}/prefixItems/{i}"),) for i, one in enumerate(given))
        items = ANYTHING
        if isinstance(schema.get("items"), list):
            reason = "an array of schemas is an old spelling: use prefixItems"
            raise UnsupportedSchemaError("items", node.where, reason)
        if "items" in schema:
            items = (Node(schema["items"], f"{node.where}/items"),)
        elif self._closes(node, "unevaluatedItems"):
            items = NEVER
        return Array(prefix, items, least, most)

    def _is_of_older_draft(self) -> bool:
        """Whether the document says that ``items`` is for all items."""
        name = self._document.get("$schema") if isinstance(self._document, dict) else None
        return isinstance(name, str) and ("/draft-0" in name or "/draft/2019-09/" in name)

    def _object(self, node: Node) -> Object:
        schema = node.schema
        properties: dict[str, Conjunction] = {
            name: (Node(one, f"{node.where}/properties/{_escaped(name)}"),)
            for name, one in _mapping(node, "properties").items()
        }
        required = frozenset(_strings(node, "required", schema.get("required", [])))
        least, most = _counts(node, "minProperties", "maxProperties")
        others, says_others, names = ANYTHING, False, None
        if "additionalProperties" in schema:
            others = (Node(schema["additionalProperties"], f"{node.where}/additionalProperties"),)
            says_others = True
        elif self._closes(node, "unevaluatedProperties"):
            others, says_others = NEVER, True
        result = Object(properties, required, others, says_others, names, least, most, node.where)
        result = self._with_patterns(node, result)
        return self._with_names(node, result)

    def _closes(self, node: Node, keyword: str) -> bool:
        """Whether ``unevaluated...`` lets nothing else in."""
        if node.schema.get(keyword, True) is True:
            return False
        if node.schema[keyword] is not False:
            raise UnsupportedSchemaError(keyword, node.where, "only true and false are")
        if any(applicator in node.schema for applicator in _APPLICATORS):
            reason = f"not beside {', '.join(_APPLICATORS)}: say it in each branch"
            raise UnsupportedSchemaError(keyword, node.where, reason)
        return True

    def _with_patterns(self, node: Node, result: Object) -> Object:
        patterns = _mapping(node, "patternProperties")
        if not patterns:
            return result

        def refuse(reason: str) -> UnsupportedSchemaError:
            return UnsupportedSchemaError("patternProperties", node.where, reason)

        if len(patterns) > 1:
            raise refuse("with more than one pattern, as a name may match several")
        ((pattern, one),) = patterns.items()
        if result.says_others and self.shapes(result.others):
            raise refuse("only where additionalProperties is false or absent")
        names = self._text(Node({"pattern": pattern}, f"{node.where}/patternProperties"))
        for name in {*result.properties, *result.required}:
            if self._has(names, name):
                raise refuse(f"the property {name!r} matches the pattern {pattern!r} too")
        others = (Node(one, f"{node.where}/patternProperties/{_escaped(pattern)}"),)
        properties = result.properties
        if not result.says_others:  # then names beside the pattern are free, and required ones are written
            unnamed = sorted(result.required - properties.keys())
            properties = properties | dict.fromkeys(unnamed, ANYTHING)
        return replace(result, properties=properties, others=others, says_others=True, names=names)

    def _with_names(self, node: Node, result: Object) -> Object:
        if "propertyNames" not in node.schema:
            return result
        names = (Node(node.schema["propertyNames"], f"{node.where}/propertyNames"),)
        if result.names is not None:
            raise UnsupportedSchemaError("propertyNames", node.where, "not beside patternProperties")
        allowed = [
            shape
            for shape in self.shapes(names)
            if isinstance(shape, Text) or (isinstance(shape, Literal) and isinstance(shape.value, str))
        ]
        properties = {
            name: one if self.accepts(names, name) else NEVER for name, one in result.properties.items()
        }
        if not any(isinstance(shape, Text) for shape in allowed):
            listed = [one.value for one in allowed if isinstance(one, Literal)]
            properties |= {name: properties.get(name, result.others) for name in listed}
            return replace(result, properties=properties, others=NEVER, says_others=True)
        if result.says_others and not self.shapes(result.others):
            return replace(result, properties=properties)
        if len(allowed) > 1 or result.properties or result.required:
            reason = "only by itself, or with names that are listed by enum"
            raise UnsupportedSchemaError("propertyNames", node.where, reason)
        assert isinstance(allowed[0], Text)
        return replace(result, says_others=True, names=allowed[0])

    # -- Both -------------------------------------------------------------------------------------------

    def _meet_all(self, first: Sequence[Shape], second: Sequence[Shape], node: Node) -> list[Shape]:
        """What is in one of the first and in one of the second."""
        return self._union([self._met(first, second)], node)

    def _met(self, first: Sequence[Shape], second: Sequence[Shape]) -> Iterator[Shape]:
        listed = {_identity(b.value) for b in second if isinstance(b, Literal)}
        wide = [b for b in second if not isinstance(b, Literal)]
        for a in first:
            if isinstance(a, Literal):  # of long lists not each with each
                if _identity(a.value) in listed or any(self._has(b, a.value) for b in wide):
                    yield a
            else:
                yield from (met for b in second if (met := self._meet(a, b)) is not None)

    def _union(self, options: Sequence[Iterable[Shape]], node: Node) -> list[Shape]:
        result: list[Shape] = []
        literals: set[Any] = set()
        for shape in (shape for option in options for shape in option):
            if isinstance(shape, Literal):
                identity = _identity(shape.value)
                if identity in literals:
                    continue
                literals.add(identity)
            elif len(result) - len(literals) > MAX_SHAPES:
                raise InputError(
                    f"the JSON schema at {node.where} has more than {MAX_SHAPES} combinations: "
                    "use fewer anyOf and oneOf inside each other"
                )
            result.append(shape)
        return result

    def _meet(self, a: Shape, b: Shape) -> Shape | None:
        if isinstance(b, Literal):
            a, b = b, a
        if isinstance(a, Literal):
            return a if self._has(b, a.value) else None
        if isinstance(a, Numeric) and isinstance(b, Numeric):
            factor = math.lcm(a.multiple_of, b.multiple_of)
            where = a.said_at if a.multiple_of > 1 else b.said_at
            return Numeric(a.bounds.both(b.bounds), a.is_integer or b.is_integer, factor, where)
        if isinstance(a, Text) and isinstance(b, Text):
            return self._meet_text(a, b)
        if isinstance(a, Array) and isinstance(b, Array):
            length = max(len(a.prefix), len(b.prefix))
            prefix = tuple(both(a.item(i), b.item(i)) for i in range(length))
            items = both(a.items, b.items)
            return Array(prefix, items, max(a.least, b.least), _smaller(a.most, b.most))
        if isinstance(a, Object) and isinstance(b, Object):
            return self._meet_object(a, b)
        return None

    def _meet_text(self, a: Text, b: Text) -> Text:
        least, most = max(a.least, b.least), _smaller(a.most, b.most)
        if a.tree is not None and b.tree is not None and a.tree != b.tree:
            assert b.said_by is not None
            reason = "a string cannot be held to two patterns or formats at once"
            raise UnsupportedSchemaError(b.keyword, b.said_by.where, reason)
        source = a if a.tree is not None else b
        return Text(least, most, source.tree, source.said_by, source.keyword)

    def _meet_object(self, a: Object, b: Object) -> Object:
        for one, other in ((a, b), (b, a)):
            if one.names is not None and (other.properties or other.required or other.says_others):
                reason = "not together with propertyNames, nor with a second schema of the same object"
                raise UnsupportedSchemaError("patternProperties", one.minimum_at, reason)
        names = [*a.properties, *(name for name in b.properties if name not in a.properties)]
        return Object(
            {name: both(a.property(name), b.property(name)) for name in names},
            a.required | b.required,
            both(a.others, b.others),
            a.says_others or b.says_others,
            a.names or b.names,
            max(a.least, b.least),
            _smaller(a.most, b.most),
            a.minimum_at if a.least >= b.least else b.minimum_at,
        )

    # -- Values -----------------------------------------------------------------------------------------

    def _has(self, shape: Shape, value: Any) -> bool:
        if isinstance(shape, Literal):
            return bool(_identity(shape.value) == _identity(value))
        if isinstance(shape, Numeric):
            return _is_number(value) and _fits(shape, _decimal(value))
        if isinstance(shape, Text):
            return isinstance(value, str) and (
                shape.least <= len(value) <= _or_endless(shape.most)
                and (shape.tree is None or regex.matches(shape.tree, value))
            )
        if isinstance(shape, Array):
            return isinstance(value, list) and (
                shape.least <= len(value) <= _or_endless(shape.most)
                and all(self.accepts(shape.item(i), one) for i, one in enumerate(value))
            )
        return isinstance(value, dict) and (
            shape.required <= value.keys()
            and shape.least <= len(value) <= _or_endless(shape.most)
            and all(self._has_property(shape, name, one) for name, one in value.items())
        )

    def _has_property(self, shape: Object, name: str, value: Any) -> bool:
        if name not in shape.properties and shape.names is not None and not self._has(shape.names, name):
            return False
        return self.accepts(shape.property(name), value)

    # -- oneOf ------------------------------------------------------------------------------------------

    def _one_of(self, node: Node, found: Sequence[Shape]) -> list[Shape]:
        """What is in ``found`` and in exactly one branch; refused where that cannot be told.

        What two branches have alike is left out of both. Of two objects that may both match, each is taken
        without a property that the other requires.
        """
        options = [
            self._meet_all(found, self.shapes((branch,)), node) for branch in self._branches(node, "oneOf")
        ]
        branches_of = Counter(
            identity
            for option in options
            for identity in {_identity(shape.value) for shape in option if isinstance(shape, Literal)}
        )
        entries = [(index, shape) for index, option in enumerate(options) for shape in option]
        wide = [entry for entry in entries if not isinstance(entry[1], Literal)]
        result: list[Shape] = []
        for index, shape in entries:
            if isinstance(shape, Literal):
                if branches_of[_identity(shape.value)] == 1:
                    result.append(self._only(shape, index, wide, node))
            elif not any(other != index and shape == rival for other, rival in wide):
                result.append(self._only(shape, index, entries, node))
        return self._union([result], node)

    def _only(self, shape: Shape, index: int, rivals: Sequence[tuple[int, Shape]], node: Node) -> Shape:
        """The shape without what its rivals match too."""
        for other, rival in rivals:
            if other != index and not self._are_apart(shape, rival):
                narrowed = self._without(shape, rival)
                if narrowed is None:
                    raise _overlap(node, min(index, other), max(index, other))
                shape = narrowed
        return shape

    def _without(self, shape: Shape, rival: Shape) -> Shape | None:
        """Of an object's shape what the rival does not match: it lacks a property that this requires."""
        if not isinstance(shape, Object) or not isinstance(rival, Object):
            return None
        # A name that the shape's pattern matches would be written all the same.
        missing = [
            name
            for name in sorted(rival.required - shape.required)
            if name in shape.properties or shape.names is None or not self._has(shape.names, name)
        ]
        if not missing:
            return None
        # One that the shape does not name anyway costs it least.
        name = min(missing, key=lambda name: name in shape.properties)
        return replace(shape, properties={**shape.properties, name: NEVER})

    def _is_never(self, conjunction: Conjunction) -> bool:
        return any(node.schema is False for node in conjunction)

    def _are_apart(self, a: Shape, b: Shape, depth: int = 0) -> bool:
        """Whether it is certain that no value that is written for one is one of the other."""
        if isinstance(b, Literal):
            a, b = b, a
        if isinstance(a, Literal):
            return not self._has(b, a.value)
        if type(a) is not type(b):
            return True
        if isinstance(a, Numeric) and isinstance(b, Numeric):
            return a.bounds.both(b.bounds).is_empty
        if isinstance(a, Text) and isinstance(b, Text):
            return a.least > _or_endless(b.most) or b.least > _or_endless(a.most)
        if isinstance(a, Array) and isinstance(b, Array):
            return a.least > _or_endless(b.most) or b.least > _or_endless(a.most)
        assert isinstance(a, Object)
        assert isinstance(b, Object)
        if any(self._is_never(b.property(name)) for name in a.required - b.required):
            return True
        if any(self._is_never(a.property(name)) for name in b.required - a.required):
            return True
        return depth < 3 and any(
            all(
                self._are_apart(one, other, depth + 1)
                for one in self.shapes(a.property(name))
                for other in self.shapes(b.property(name))
            )
            for name in a.required & b.required
        )


def _overlap(node: Node, first: int, second: int) -> UnsupportedSchemaError:
    reason = (
        f"its branches {first} and {second} may both match: use anyOf, or give each a required property "
        "with a const of its own"
    )
    return UnsupportedSchemaError("oneOf", node.where, reason)


def is_closed(shape: Object) -> bool:
    """Whether only its own properties are written: it says so, or it names some and says nothing else."""
    if shape.says_others:
        return shape.others != ANYTHING and any(node.schema is False for node in shape.others)
    return bool(shape.properties or shape.required)


def key_of(conjunction: Conjunction) -> tuple[str, ...]:
    """Equal for conjunctions of the same schemas."""
    return tuple(sorted({node.where for node in conjunction}))


def both(a: Conjunction, b: Conjunction) -> Conjunction:
    """The schemas of both, each once."""
    return tuple({node.where: node for node in (*a, *b)}.values())


def _fits(shape: Numeric, value: Decimal) -> bool:
    if not shape.bounds.contains(value):
        return False
    whole = int(value)  # Decimal's own % knows 28 digits
    return not shape.is_integer or (value == whole and whole % shape.multiple_of == 0)


def _identity(value: Any) -> Any:
    """Equal for values that JSON schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return ("object", frozenset((name, _identity(one)) for name, one in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(_identity, value)))
    return (bool if isinstance(value, bool) else None, value)


def _is_finite(value: Any) -> bool:
    """Whether a value has no float that JSON cannot write."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimal(value: int | float) -> Decimal:
    return Decimal(repr(value))


def _number(node: Node, keyword: str) -> Decimal | None:
    value = node.schema.get(keyword)
    if value is None and keyword not in node.schema:
        return None
    if not _is_number(value) or not _is_finite(value):
        raise _wrong(node, keyword, "a number")
    number = _decimal(value)
    if len(number.as_tuple().digits) > 40 or abs(number.adjusted()) > 40:
        raise UnsupportedSchemaError(keyword, node.where, f"{value} has more than 40 digits")
    return number


def _counts(node: Node, least: str, most: str) -> tuple[int, int | None]:
    low, high = _count(node, least), _count(node, most)
    return low or 0, high


def _count(node: Node, keyword: str) -> int | None:
    value = node.schema.get(keyword)
    if keyword not in node.schema:
        return None
    if not _is_number(value) or not _is_finite(value) or value != int(value) or value < 0:
        raise _wrong(node, keyword, "a whole number of at least 0")
    count = int(value)
    if count > _LARGEST_COUNT and keyword.startswith("min"):
        raise UnsupportedSchemaError(keyword, node.where, f"{count} is more than {_LARGEST_COUNT}")
    return min(count, _LARGEST_COUNT)  # no output is as long as that


def _mapping(node: Node, keyword: str) -> dict[str, Any]:
    value = node.schema.get(keyword, {})
    if not isinstance(value, dict):
        raise _wrong(node, keyword, "an object")
    return value


def _strings(node: Node, keyword: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _wrong(node, keyword, "an array of strings")
    return value


def _wrong(node: Node, keyword: str, legal: str) -> InputError:
    shown = repr(node.schema[keyword])
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return InputError(f"the JSON schema keyword {keyword!r} (at {node.where}) must be {legal}, was {shown}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _index(name: str) -> int:
    """A part of a pointer as the index of an array: no sign, no leading zeros (RFC 6901)."""
    if name != "0" and not (name.isascii() and name.isdigit() and name[0] != "0"):
        raise IndexError(name)
    return int(name)


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _or_endless(most: int | None) -> float:
    return math.inf if most is None else most
