"""Expression trees of a grammar, and functions that build them in simplified form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # inclusive ranges of code points, ascending and disjoint
ANY_CHARACTER: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


@dataclass(frozen=True, slots=True)
class Chars:
    """One character in ``ranges``."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Text:
    """A string of at least one character."""

    text: str


@dataclass(frozen=True, slots=True)
class Seq:
    """A sequence of parts that are not `EMPTY`."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the options. A node without options matches no text."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``min_count`` to ``max_count`` repetitions of a part. If ``max_count`` is None, there is no maximum."""

    part: Node
    min_count: int
    max_count: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """One token whose id is in ``ranges``, or not in ``ranges`` if ``is_negated``. It does not match text."""

    ranges: Ranges
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text, possibly empty, that contains none of ``excludes``."""

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextUntil:
    """Any text that ends with the first occurrence of ``end`` and contains none of ``excludes``.

    A string of ``other_ends`` may occur only as a suffix of the whole text.
    """

    end: str
    other_ends: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()


Node: TypeAlias = Chars | Text | Seq | Alt | Repeat | Ref | Tokens | FreeText | TextUntil
Rules: TypeAlias = dict[str, Node]
EMPTY = Seq(())  # matches the empty text
NOTHING = Alt(())  # matches no text


def sequence(parts: Iterable[Node]) -> Node:
    """Return a sequence, with nested sequences and adjacent strings joined.

    Returns `NOTHING` if a part is `NOTHING`.
    """
    result: list[Node] = []
    for part in parts:
        for node in part.parts if isinstance(part, Seq) else (part,):
            if node == NOTHING:
                return NOTHING
            last = result[-1] if result else None
            if isinstance(node, Text) and isinstance(last, Text):
                result[-1] = Text(last.text + node.text)
            else:
                result.append(node)
    return result[0] if len(result) == 1 else Seq(tuple(result))


def choice(options: Iterable[Node]) -> Node:
    """Return a choice, with nested choices joined, equal options removed and common suffixes shared.

    ``a x | b x`` becomes ``(a | b) x`` if ``x`` is a string or a reference. Without this step, in a chain of
    rules that each refer twice to the next rule, expansion would double the size at every level.
    """
    flat_options: dict[Node, None] = {}
    for option in options:
        for node in option.options if isinstance(option, Alt) else (option,):
            flat_options[node] = None
    groups: dict[Node, list[Node]] = {}
    for option in flat_options:
        parts = option.parts if isinstance(option, Seq) else (option,)
        last_part = parts[-1] if parts and isinstance(parts[-1], Ref | Text) else option
        groups.setdefault(last_part, []).append(option)
    result: list[Node] = []
    for last_part, group in groups.items():
        if len(group) == 1:
            result.append(group[0])
        else:
            prefixes = (
                sequence(group_option.parts[:-1]) if isinstance(group_option, Seq) else EMPTY
                for group_option in group
            )
            result.append(sequence([choice(prefixes), last_part]))
    return result[0] if len(result) == 1 else Alt(tuple(result))


def repeated(part: Node, min_count: int, max_count: int | None) -> Node:
    """Return a repetition in its simplest form."""
    if max_count == 0 or part == EMPTY:
        return EMPTY
    if part == NOTHING:
        return EMPTY if min_count == 0 else NOTHING
    if (min_count, max_count) == (1, 1):
        return part
    return Repeat(part, min_count, max_count)


def children(node: Node) -> tuple[Node, ...]:
    """Return the direct children of a node."""
    if isinstance(node, Seq):
        return node.parts
    if isinstance(node, Alt):
        return node.options
    return (node.part,) if isinstance(node, Repeat) else ()


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and all descendants, without following references."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += children(node)


def references(node: Node) -> set[str]:
    """Return the names of the rules that a node refers to directly."""
    return {child.name for child in walk(node) if isinstance(child, Ref)}
