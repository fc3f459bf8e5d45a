"""Converts JSON schemas to EBNF. The grammar accepts only valid JSON that satisfies the schema.

The grammar does not accept every JSON text of every value (`schema_ebnf` lists the differences). It never
accepts a value that the schema forbids. `reader` rejects keywords that cannot be enforced.
"""

from __future__ import annotations

import json
from dataclasses import replace

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema.ebnf import EMPTY, EbnfRules, choice, literal, repeated, sequence
from penstock.grammar.schema.members import Members
from penstock.grammar.schema.numbers import integers_between, numbers_between
from penstock.grammar.schema.reader import Reader
from penstock.grammar.schema.satisfiability import Satisfiability, is_possible
from penstock.grammar.schema.shapes import (
    Array,
    Conjunction,
    Literal,
    Numeric,
    Object,
    Shape,
    StringShape,
    conjunction_key,
    is_closed,
)
from penstock.grammar.schema.strings import ESCAPE, StringWriter
from penstock.grammar.schema.unique import UniqueWriter

_MAX_NAMED_PROPERTIES = 200  # of an object with minProperties or maxProperties
_MAX_UNBOUNDED_FACTOR = 100  # maximum multipleOf of integers without bounds
_MAX_LISTED_MULTIPLES = 1000  # maximum number of multiples between two bounds


def schema_ebnf(schema: object, *, compact: bool = False, escaped: str = "") -> str:
    """Return the grammar of a JSON schema. ``root`` is its start rule.

    The grammar is stricter than the schema in these respects:

    - Properties come in the order of the schema. If the schema names properties and does not have
      ``additionalProperties`` or ``patternProperties``, no other properties are allowed.
    - Integers have no decimal point and no exponent; bounded numbers have no exponent.
    - Names, and strings with a pattern or a format, use the shortest escapes. Strings with a maximum length
      above 256 have no escapes, and strings with a minimum length above 256 have none up to this length.
    - White space is allowed only after ``{ [ , :`` and before ``] }``, at most 20 characters in each place.
    - Unique items with more than 8 values come in the order of the schema, except in short arrays.
    - Rare forms of formats are excluded (`formats`). If the exact grammar of a format or pattern with a
      maximum length would be large, strings near the maximum length are excluded (`languages`).

    Args:
        schema: the result of ``json.loads``.
        compact: allow no white space.
        escaped: characters that strings contain only as escapes, because the surrounding format gives them a
            meaning.

    Raises:
        UnsupportedSchemaError: a keyword is not supported.
        InputError: the schema is malformed or too large, or no value satisfies it.
    """
    return _Writer(Reader(schema), compact, escaped).text()


class _Writer:
    def __init__(self, reader: Reader, compact: bool, escaped: str) -> None:
        self._reader = reader
        self._escaped_code_points = [ord(character) for character in escaped]
        self._rules = EbnfRules()
        self._strings = StringWriter(self._rules, self._escaped_code_points)
        self._space = "" if compact else self._rules.add("space", "[ \\n\\t\\r]{0,20}")
        self._rule_names: dict[tuple[str, ...], str] = {}
        self._pending_rules: list[tuple[Conjunction, str]] = []
        self._satisfiability = Satisfiability(reader)

    def text(self) -> str:
        root = self._reader.root
        if not self._satisfiability.is_satisfiable(root):
            raise InputError("no value satisfies the JSON schema: its parts exclude each other")
        root_rule = self._value(root)
        while self._pending_rules:
            conjunction, name = self._pending_rules.pop()
            expressions = [self._shape(shape) for shape in self._reader.shapes(conjunction)]
            options = [option for option in expressions if option is not None]
            if not options:
                where = conjunction[0].where
                raise InputError(f"no value satisfies the JSON schema at {where}: bounds exclude each other")
            self._rules.define(name, choice(options))
        return self._rules.text(root_rule)

    def _value(self, conjunction: Conjunction) -> str:
        """Return the name of the rule of a value. The first call for a conjunction creates the rule."""
        key = conjunction_key(conjunction)
        name = self._rule_names.get(key)
        if name is None:
            name = self._rule_names[key] = self._rules.reserve("value")
            self._pending_rules.append((conjunction, name))
        return name

    def _shape(self, shape: Shape) -> str | None:
        """Return the expression of a shape; None if no value matches it."""
        if not self._satisfiability.has_value(shape):
            return None
        if isinstance(shape, Literal):
            return self._literal(shape.value)
        if isinstance(shape, Numeric):
            return self._numeric(shape)
        if isinstance(shape, StringShape):
            return self._strings.text(shape)
        return self._array(shape) if isinstance(shape, Array) else self._object(shape)

    def _literal(self, value: object) -> str:
        """Return the expression of a constant value, with optional white space in the same places as other
        values.
        """
        if not isinstance(value, list | dict) or not value:
            return self._scalar_text(value)
        space = self._space or EMPTY
        comma = sequence(literal(","), space)
        if isinstance(value, list):
            elements = f" {comma} ".join(map(self._literal, value))
            return sequence(literal("["), space, elements, space, literal("]"))
        pairs = [
            sequence(self._scalar_text(name), literal(":"), space, self._literal(member))
            for name, member in value.items()
        ]
        return sequence(literal("{"), space, f" {comma} ".join(pairs), space, literal("}"))

    def _scalar_text(self, value: object) -> str:
        """Return the literal of a scalar, an empty container or a property name."""
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        for code_point in self._escaped_code_points:
            text = text.replace(chr(code_point), f"{ESCAPE}u{code_point:04x}")
        return literal(text)

    # -- Scalars ----------------------------------------------------------------------------------------

    def _numeric(self, shape: Numeric) -> str | None:
        if shape.multiple_of > 1:
            return self._multiples(shape)
        body = (
            integers_between(*shape.bounds.integers()) if shape.is_integer else numbers_between(shape.bounds)
        )
        return None if body is None else self._rules.add("number", body)

    def _multiples(self, shape: Numeric) -> str | None:
        factor = shape.multiple_of
        low, high = shape.bounds.integers()
        if low is not None and high is not None and (high - low) // factor <= _MAX_LISTED_MULTIPLES:
            first = -(-low // factor) * factor
            values = [literal(str(value)) for value in range(first, high + 1, factor)]
            return self._rules.add("multiple", choice(values)) if values else None
        if (low, high) != (None, None) or factor > _MAX_UNBOUNDED_FACTOR:
            assert factor > 1
            reason = (
                f"{factor} with these bounds: only without bounds and up to {_MAX_UNBOUNDED_FACTOR}, "
                f"or with both bounds and up to {_MAX_LISTED_MULTIPLES} multiples between them"
            )
            raise UnsupportedSchemaError("multipleOf", shape.location, reason)
        names = [self._rules.reserve("remainder") for _ in range(factor)]
        for remainder, name in enumerate(names):
            steps = [
                sequence(literal(str(digit)), names[(10 * remainder + digit) % factor]) for digit in range(10)
            ]
            self._rules.define(name, choice([*([EMPTY] if remainder == 0 else []), *steps]))
        starts = [sequence(literal(str(digit)), names[digit % factor]) for digit in range(1, 10)]
        return self._rules.add("multiple", choice([literal("0"), f'"-"? {choice(starts)}']))

    # -- Arrays -----------------------------------------------------------------------------------------

    def _array(self, shape: Array) -> str | None:
        length = len(shape.prefix)
        max_count = shape.max_count
        for index, item in enumerate(shape.prefix):
            if not self._satisfiability.is_satisfiable(item):
                max_count = index if max_count is None else min(max_count, index)
                break
        if not self._satisfiability.is_satisfiable(shape.items):
            max_count = length if max_count is None else min(max_count, length)
        if max_count is not None and shape.min_count > max_count:
            return None
        if max_count == 0:
            return sequence(literal("["), self._space or EMPTY, literal("]"))
        comma = sequence(literal(","), self._space or EMPTY)
        if shape.unique_items_node is not None and (max_count is None or max_count > 1):
            return self._unique(replace(shape, max_count=max_count), comma)
        # The expression is built from its end. `following_items` is the expression after the item at `index`.
        end = length if max_count is None else min(max_count, length)
        following_items = EMPTY
        if max_count is None or max_count > length:
            further_item = sequence(comma, self._value(shape.items))
            num_leading_items = max(length, 1)  # number of items before the repeated items
            following_items = repeated(
                further_item,
                max(shape.min_count - num_leading_items, 0),
                None if max_count is None else max_count - num_leading_items,
            )
        for index in range(end - 1, 0, -1):
            next_items = sequence(comma, self._value(shape.prefix[index]), following_items)
            following_items = next_items if shape.min_count > index else repeated(next_items, 0, 1)
        first_item = self._value(shape.item(0))
        elements = sequence(first_item, following_items, self._space or EMPTY)
        content = elements if shape.min_count > 0 else repeated(elements, 0, 1)
        return sequence(literal("["), self._space or EMPTY, content, literal("]"))

    def _unique(self, shape: Array, comma: str) -> str | None:
        """Return the expression of an array with unique items."""
        items = UniqueWriter(self._rules, self._reader, self._literal, comma).items(shape)
        if items is None:
            return None
        space = self._space or EMPTY
        return sequence(literal("["), space, items, space, literal("]"))

    # -- Objects ----------------------------------------------------------------------------------------

    def _object(self, shape: Object) -> str | None:
        names = [
            *(name for name in shape.properties if self._satisfiability.is_satisfiable(shape.property(name))),
            *sorted(shape.required - shape.properties.keys()),
        ]
        unnamed_pair = (
            None
            if is_closed(shape) or not self._satisfiability.is_satisfiable(shape.additional_properties)
            else self._unnamed_pair(shape)
        )
        is_counted = shape.min_count > len(shape.required) or shape.max_count is not None
        if is_counted and len(names) > _MAX_NAMED_PROPERTIES:
            reason = f"a schema with such bounds can name at most {_MAX_NAMED_PROPERTIES} properties"
            raise UnsupportedSchemaError("minProperties", shape.location, reason)
        if shape.min_count > len(names) + (unnamed_pair is not None):
            if unnamed_pair is None:
                return None
            reason = (
                "unnamed properties may repeat a name, so they count as one property: name them in properties"
            )
            raise UnsupportedSchemaError("minProperties", shape.location, reason)
        space = self._space or EMPTY
        members = Members(self._rules, shape, names, is_counted, sequence(literal(","), space), space)
        pairs = [self._pair(self._scalar_text(name), shape.property(name)) for name in names]
        content = members.write(pairs, unnamed_pair)
        return None if content is None else sequence(literal("{"), space, content, literal("}"))

    def _pair(self, name: str, value: Conjunction) -> str:
        return sequence(name, literal(":"), self._space or EMPTY, self._value(value))

    def _unnamed_pair(self, shape: Object) -> str | None:
        """Return the expression of a property that the schema does not name; None if it is impossible."""
        if shape.names is not None:
            name = self._strings.text(shape.names) if is_possible(shape.names) else None
            if name is None:
                return None
        else:
            name = sequence(
                literal('"'), self._strings.new_name(sorted({*shape.properties, *shape.required}))
            )
        return self._pair(name, shape.additional_properties)
