"""JSON schemas -> EBNF. What the grammar lets through is valid JSON that satisfies the schema, nothing else.

It is stricter than the schema in the ways of writing that `schema_ebnf` names, and nowhere looser: a keyword
that would need that is refused (`shapes`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.pipelines.grammars import regex
from penstock.pipelines.grammars.ebnf import (
    ALL_CHARACTERS,
    NOTHING,
    Ranges,
    Rules,
    char_class,
    choice,
    literal,
    repeated,
    sequence,
    without,
)
from penstock.pipelines.grammars.numbers import integers_between, numbers_between
from penstock.pipelines.grammars.shapes import (
    Array,
    Conjunction,
    Literal,
    Numeric,
    Object,
    Reader,
    Shape,
    Text,
    is_closed,
    key_of,
)

_PLAIN = without(ALL_CHARACTERS, [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])  # stand for themselves in a string
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_LONG = without([(0, 0x1F)], [(8, 10), (12, 13)])  # control characters without a short escape
_ESCAPE = "\\"
_MOST_COUNTED_CHARACTERS = 256
_Spelling: TypeAlias = tuple[str | None, str | None]  # a class of characters as they are, a rule of escapes
_MOST_COUNTED = 200  # properties of an object whose number is bounded
_LARGEST_FACTOR = 100
_ENUMERATED = 1000


def schema_ebnf(schema: Any, *, compact: bool = False, escaped: str = "") -> str:
    """The grammar of a JSON schema, ``root`` its first rule.

    Stricter than the schema in this: properties come in the order in which the schema names them; an object
    whose schema names some and does not speak of others has no others; whole numbers are written without
    point and exponent, bounded ones without exponent; names and strings with a pattern are written with the
    shortest escapes, strings of a bounded length above 256 without any; other white space than
    after ``{ [ , :`` and before ``] }`` is not written.

    Args:
        schema: as ``json.loads`` gives it.
        compact: without any white space.
        escaped: characters that no string has as they are, only as escapes: where the text that the value
            stands in gives them a meaning.

    Raises:
        UnsupportedSchemaError: a keyword cannot be honoured.
        InputError: this is no schema, or nothing satisfies it.
    """
    return _Writer(Reader(schema), compact, escaped).text()


class _Writer:
    def __init__(self, reader: Reader, compact: bool, escaped: str) -> None:
        self._reader = reader
        self._escaped = [ord(character) for character in escaped]
        self._plain = without(_PLAIN, [(point, point) for point in self._escaped])
        self._rules = Rules()
        self._space = "" if compact else self._rules.add("space", "[ \\n\\t\\r]{0,20}")
        self._names: dict[tuple[str, ...], str] = {}
        self._to_write: list[tuple[Conjunction, str]] = []
        self._productive = _Productive(reader)

    def text(self) -> str:
        root = self._reader.root
        if not self._productive.holds(root):
            raise InputError("nothing satisfies the JSON schema: its parts exclude each other")
        top = self._value(root)
        while self._to_write:
            conjunction, name = self._to_write.pop()
            written = [self._shape(shape) for shape in self._reader.shapes(conjunction)]
            options = [option for option in written if option is not None]
            if not options:
                where = conjunction[0].where
                raise InputError(f"nothing satisfies the JSON schema at {where}: bounds exclude each other")
            self._rules.define(name, choice(options))
        return self._rules.text(top)

    def _value(self, conjunction: Conjunction) -> str:
        """The rule of a value; whoever asks first has it written."""
        key = key_of(conjunction)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._rules.reserve("value")
            self._to_write.append((conjunction, name))
        return name

    def _shape(self, shape: Shape) -> str | None:
        """The shape's grammar; None where nothing has it."""
        if not self._productive.has(shape):
            return None
        if isinstance(shape, Literal):
            return self._literal(shape.value)
        if isinstance(shape, Numeric):
            return self._numeric(shape)
        if isinstance(shape, Text):
            return self._text(shape)
        return self._array(shape) if isinstance(shape, Array) else self._object(shape)

    def _literal(self, value: Any) -> str:
        """One value, with the white space that any other would have."""
        if not isinstance(value, list | dict) or not value:
            return self._written(value)
        space = self._space or NOTHING
        comma = sequence(literal(","), space)
        if isinstance(value, list):
            inner = f" {comma} ".join(map(self._literal, value))
            return sequence(literal("["), space, inner, space, literal("]"))
        pairs = [
            sequence(self._written(name), literal(":"), space, self._literal(one))
            for name, one in value.items()
        ]
        return sequence(literal("{"), space, f" {comma} ".join(pairs), space, literal("}"))

    def _written(self, value: Any) -> str:
        """A scalar or a name, as it is always written."""
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        for point in self._escaped:
            text = text.replace(chr(point), f"{_ESCAPE}u{point:04x}")
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
        if low is not None and high is not None and (high - low) // factor <= _ENUMERATED:
            first = -(-low // factor) * factor
            values = [literal(str(value)) for value in range(first, high + 1, factor)]
            return self._rules.add("multiple", choice(values)) if values else None
        if (low, high) != (None, None) or factor > _LARGEST_FACTOR:
            assert factor > 1
            reason = (
                f"{factor} with these bounds: only without bounds and up to {_LARGEST_FACTOR}, "
                f"or with both bounds and up to {_ENUMERATED} multiples between them"
            )
            raise UnsupportedSchemaError("multipleOf", shape.said_at, reason)
        names = [self._rules.reserve("remainder") for _ in range(factor)]
        for remainder, name in enumerate(names):
            steps = [
                sequence(literal(str(digit)), names[(10 * remainder + digit) % factor]) for digit in range(10)
            ]
            self._rules.define(name, choice([*([NOTHING] if remainder == 0 else []), *steps]))
        starts = [sequence(literal(str(digit)), names[digit % factor]) for digit in range(1, 10)]
        return self._rules.add("multiple", choice([literal("0"), f'"-"? {choice(starts)}']))

    def _text(self, shape: Text) -> str | None:
        quote = literal('"')
        if shape.tree is None:
            spelling: _Spelling = (char_class(self._plain), self._any_escape())
            content = self._repeated(spelling, shape.least, shape.most, quote)
        else:
            tree = _with_length(shape)
            if tree is None:
                return None
            if isinstance(tree, regex.Repeat) and isinstance(tree.part, regex.Char):
                content = self._repeated(self._spelling(tree.part.ranges), tree.least, tree.most, quote)
            else:
                content = sequence(regex.to_ebnf(tree, self._characters), quote)
        return self._rules.add("string", sequence(quote, content))

    def _any_escape(self) -> str:
        """An escape as any JSON writer may write it; the two halves of a pair are one character."""
        digit = "[0-9a-fA-F]"
        single = f"([0-9a-cA-CefEF] {digit} {digit} {digit} | [dD] [0-7] {digit} {digit})"
        pair = f"[dD] [89abAB] {digit} {digit} {literal(_ESCAPE + 'u')} [dD] [c-fC-F] {digit} {digit}"
        short = '["\\\\/bfnrt]'
        return self._rules.add("escape", f'{literal(_ESCAPE)} ({short} | "u" ({single} | {pair}))')

    def _characters(self, ranges: Ranges, least: int, most: int | None) -> str:
        """So many characters of these, written the shortest way."""
        return self._repeated(self._spelling(ranges), least, most, NOTHING)

    def _spelling(self, ranges: Ranges) -> _Spelling:
        plain = [
            part
            for part in ((max(a, c), min(b, d)) for a, b in ranges for c, d in self._plain)
            if part[0] <= part[1]
        ]
        longs = [*(point for first, last in _LONG for point in range(first, last + 1)), *self._escaped]
        controls = [(point, f"u{point:04x}") for point in longs]
        escapes = [
            literal(f"{_ESCAPE}{written}")
            for point, written in [*_SHORT.items(), *controls]
            if any(low <= point <= high for low, high in ranges)
        ]
        escape = self._rules.add("short_escape", choice(escapes)) if escapes else None
        return char_class(plain) if plain else None, escape

    def _repeated(self, spelling: _Spelling, least: int, most: int | None, end: str) -> str:
        """From ``least`` to ``most`` characters, then ``end``.

        xgrammar prepares a mask for each state of a rule, and finds out token by token what may come behind
        its end. So a class repeats by itself, a number of characters is a rule for each, and the end stands
        in the last: otherwise a mask takes a thousand times longer.
        """
        plain, escape = spelling
        if plain is None or escape is None:
            only = plain or escape
            assert only is not None
            if most is None or end == NOTHING:
                return sequence(repeated(only, least, most), end)
            one_more = [only]
        else:
            if (least, most) == (1, 1) and end == NOTHING:
                return choice([plain, escape])
            one_more = [plain, escape]
        if most is None:
            if least:
                rest = self._repeated(spelling, 0, None, end)
                return self._repeated(spelling, least, least, self._rules.add("rest", rest))
            return sequence(f"{plain}*", f"({escape} {plain}*)*", end)
        if most > _MOST_COUNTED_CHARACTERS:
            return sequence(repeated(one_more[0], least, most), end)  # with escapes each token would be slow
        following = end
        for count in range(most - 1, -1, -1):
            options = [sequence(one, following) for one in one_more]
            following = self._rules.add("counted", choice([*([end] if count >= least else []), *options]))
        return following

    # -- Arrays -----------------------------------------------------------------------------------------

    def _array(self, shape: Array) -> str | None:
        length = len(shape.prefix)
        most = shape.most
        for index, item in enumerate(shape.prefix):
            if not self._productive.holds(item):
                most = index if most is None else min(most, index)
                break
        if not self._productive.holds(shape.items):
            most = length if most is None else min(most, length)
        if most is not None and shape.least > most:
            return None
        if most == 0:
            return sequence(literal("["), self._space or NOTHING, literal("]"))
        comma = sequence(literal(","), self._space or NOTHING)
        # From the last on: what may follow an item.
        end = length if most is None else min(most, length)
        rest = NOTHING
        if most is None or most > length:
            more = sequence(comma, self._value(shape.items))
            started = max(length, 1)  # items before the repeated ones
            rest = repeated(more, max(shape.least - started, 0), None if most is None else most - started)
        for index in range(end - 1, 0, -1):
            following = sequence(comma, self._value(shape.prefix[index]), rest)
            rest = following if shape.least > index else repeated(following, 0, 1)
        first = self._value(shape.item(0))
        inner = sequence(first, rest, self._space or NOTHING)
        content = inner if shape.least > 0 else repeated(inner, 0, 1)
        return sequence(literal("["), self._space or NOTHING, content, literal("]"))

    # -- Objects ----------------------------------------------------------------------------------------

    def _object(self, shape: Object) -> str | None:
        names = [
            *(name for name in shape.properties if self._productive.holds(shape.property(name))),
            *sorted(shape.required - shape.properties.keys()),
        ]
        others = None if is_closed(shape) or not self._productive.holds(shape.others) else self._other(shape)
        counted = shape.least > len(shape.required) or shape.most is not None
        if counted and len(names) > _MOST_COUNTED:
            reason = f"the number of properties is bounded only where at most {_MOST_COUNTED} are named"
            raise UnsupportedSchemaError("minProperties", shape.minimum_at, reason)
        if shape.least > len(names) + (others is not None):
            if others is None:
                return None
            reason = "of properties that may repeat a name only one counts: name them in properties"
            raise UnsupportedSchemaError("minProperties", shape.minimum_at, reason)
        space = self._space or NOTHING
        members = _Members(self._rules, shape, names, counted, sequence(literal(","), space), space)
        pairs = [self._pair(self._written(name), shape.property(name)) for name in names]
        content = members.write(pairs, others)
        return None if content is None else sequence(literal("{"), space, content, literal("}"))

    def _pair(self, name: str, value: Conjunction) -> str:
        return sequence(name, literal(":"), self._space or NOTHING, self._value(value))

    def _other(self, shape: Object) -> str | None:
        """A property that the schema does not name; None where no name is one."""
        if shape.names is not None:
            name = self._text(shape.names) if _is_possible(shape.names) else None
            if name is None:
                return None
        else:
            name = sequence(literal('"'), self._new_name(sorted({*shape.properties, *shape.required})))
        return self._pair(name, shape.others)

    def _new_name(self, taken: list[str]) -> str:
        """The rest of a name behind its quotation mark, with the one at its end; none of those taken.

        Written the shortest way only: in another spelling it would be a name that is taken.
        """
        free = self._rules.add("rest", sequence(self._characters(ALL_CHARACTERS, 0, None), literal('"')))
        return self._name_beside(taken, 0, free)

    def _name_beside(self, taken: list[str], depth: int, free: str) -> str:
        """As `_new_name`, behind ``depth`` characters that all of ``taken`` have in common."""
        if not taken:
            return free
        ends_here = any(len(name) == depth for name in taken)
        branches: dict[str, list[str]] = {}
        for name in taken:
            if len(name) > depth:
                branches.setdefault(name[depth], []).append(name)
        # A chain of single characters would need a rule, and a level of recursion, for each.
        options = [] if ends_here else [literal('"')]
        points = [(ord(character), ord(character)) for character in branches]
        options.append(sequence(self._characters(without(ALL_CHARACTERS, points), 1, 1), free))
        for character, names in branches.items():
            point = ord(character)
            rest = self._name_beside(names, depth + 1, free)
            options.append(sequence(self._characters([(point, point)], 1, 1), rest))
        return self._rules.add("name", choice(options))


class _Members:
    """The members of an object: its named properties in order, each there or not, then others.

    The grammar is a chain of states: which property comes next, whether one came before (then a comma is
    due), and how many did where their number is bounded.
    """

    def __init__(
        self, rules: Rules, shape: Object, names: list[str], counted: bool, comma: str, space: str
    ) -> None:
        self._rules = rules
        self._required = [name in shape.required for name in names]
        self._least = shape.least if counted else 0
        self._most = shape.most
        self._counted = counted
        self._comma = comma
        self._space = space  # before the closing brace, where there are members

    def write(self, pairs: list[str], others: str | None) -> str | None:
        """All members; None where the bounds let none be written."""
        states: dict[int, str | None] = {}
        highest = len(pairs) if self._counted else 1
        for count in range(highest + 1):
            states[count] = self._others(others, count)
        for place in range(len(pairs) - 1, -1, -1):
            before: dict[int, str | None] = {}
            for count in range((place if self._counted else min(place, 1)) + 1):
                following = states[count + 1 if self._counted else 1]
                options = []
                if following is not None:
                    options.append(sequence(self._comma if count else NOTHING, pairs[place], following))
                skipped = states[count]
                if not self._required[place] and skipped is not None:
                    options.append(skipped)
                before[count] = self._rules.add("members", choice(options)) if options else None
            states = before
        return states[0]

    def _others(self, other: str | None, count: int) -> str | None:
        """What follows the last named property when ``count`` came before."""
        least = most = None
        if self._counted:
            least = self._least - count
            most = None if self._most is None else self._most - count
        missing = max(least or 0, 0)  # one other makes up for one, as more may repeat its name
        if missing > (other is not None) or (most is not None and most < missing):
            return None
        if other is None or most == 0:
            return self._space if count else NOTHING
        more = sequence(self._comma, other)
        if count:
            return self._rules.add("others", sequence(repeated(more, missing, most), self._space))
        first = sequence(other, repeated(more, 0, None if most is None else most - 1), self._space)
        return self._rules.add("others", first if missing else repeated(first, 0, 1))


class _Productive:
    """Which conjunctions some finite value satisfies.

    A schema that can only be satisfied by a value that holds such a value again has none; a grammar that went
    into one would never come to an end.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._known: dict[tuple[str, ...], bool] = {}

    def holds(self, conjunction: Conjunction) -> bool:
        key = key_of(conjunction)
        if key not in self._known:
            self._settle(conjunction)
        return self._known[key]

    def has(self, shape: Shape) -> bool:
        """Whether some value has the shape."""
        return all(self.holds(one) for one in _needed(shape)) and _is_possible(shape)

    def _settle(self, conjunction: Conjunction) -> None:
        """All that is reachable from here: at first nothing is satisfiable, then what needs only what is."""
        reached: dict[tuple[str, ...], list[Shape]] = {}
        open_ones = [conjunction]
        while open_ones:
            asked = open_ones.pop()
            key = key_of(asked)
            if key in reached or key in self._known:
                continue
            reached[key] = self._reader.shapes(asked)
            open_ones += [needed for shape in reached[key] for needed in _needed(shape)]
        waiting: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = {}
        holds: set[tuple[str, ...]] = set()
        missing: dict[tuple[tuple[str, ...], int], set[tuple[str, ...]]] = {}
        ready: list[tuple[str, ...]] = []
        for key, shapes in reached.items():
            for place, shape in enumerate(shapes):
                if not _is_possible(shape):
                    continue
                keys = {key_of(one) for one in _needed(shape)}
                if any(self._known.get(one) is False for one in keys):
                    continue
                left = {one for one in keys if one not in self._known}
                missing[key, place] = left
                for one in left:
                    waiting.setdefault(one, []).append((key, place))
                if not left:
                    ready.append(key)
        while ready:
            key = ready.pop()
            if key in holds:
                continue
            holds.add(key)
            for user in waiting.get(key, []):
                missing[user].discard(key)
                if not missing[user]:
                    ready.append(user[0])
        for key in reached:
            self._known[key] = key in holds


def _needed(shape: Shape) -> Iterator[Conjunction]:
    """What every value of a shape holds."""
    if isinstance(shape, Array):
        for index in range(min(shape.least, len(shape.prefix) + 1)):
            yield shape.item(index)
    elif isinstance(shape, Object):
        for name in sorted(shape.required):
            yield shape.property(name)


def _is_possible(shape: Shape) -> bool:
    """Whether a shape's own bounds let some value be."""
    if isinstance(shape, Numeric):
        low, high = shape.bounds.integers()
        none = shape.is_integer and low is not None and high is not None and low > high
        return not (shape.bounds.is_empty or none)
    if isinstance(shape, Literal):
        return True
    if isinstance(shape, Object) and shape.required - shape.properties.keys() and shape.names is not None:
        return False
    return shape.most is None or shape.least <= shape.most


def _with_length(shape: Text) -> regex.Node | None:
    """The expression together with the bounds of the length; None where they exclude each other."""
    assert shape.tree is not None
    only = shape.tree
    while isinstance(only, regex.Seq) and len(only.parts) == 1:
        only = only.parts[0]
    low, high = regex.lengths(only)
    if (shape.most is not None and low > shape.most) or (high is not None and high < shape.least):
        return None
    if low >= shape.least and (shape.most is None or (high is not None and high <= shape.most)):
        return only
    if isinstance(only, regex.Repeat) and isinstance(only.part, regex.Char):
        most = shape.most if only.most is None else min(only.most, shape.most or only.most)
        return regex.Repeat(only.part, max(only.least, shape.least), most)
    assert shape.said_by is not None
    reason = (
        "together with minLength or maxLength only where it implies them, or repeats a single class "
        "(^[a-z]*$): say the length in the pattern"
    )
    raise UnsupportedSchemaError(shape.keyword, shape.said_by.where, reason)
