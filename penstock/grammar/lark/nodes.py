"""Expressions of a grammar as a tree, and the operations on them that preserve the language."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # code points, both ends included, ascending and disjoint
ANY_CHARACTER: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Text:
    """This text, at least one character."""

    text: str


@dataclass(frozen=True, slots=True)
class Seq:
    """The parts one after the other; none of them is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the options; without options nothing matches."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part ``least`` to ``most`` times; None is no upper bound."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """What a rule matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """One token with an id in these ranges, or with ``negated`` outside of them; never as text."""

    ranges: Ranges
    negated: bool = False


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text, empty or not, that contains none of ``excludes``."""

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextUntil:
    """Any text that ends with the first occurrence of ``end`` and contains none of ``excludes``.

    None of ``others`` occurs in it before; one may end where ``end`` ends.
    """

    end: str
    others: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()


Node: TypeAlias = Chars | Text | Seq | Alt | Repeat | Ref | Tokens | FreeText | TextUntil
Rules: TypeAlias = dict[str, Node]
EMPTY = Seq(())
NOTHING = Alt(())


def sequence(parts: Iterable[Node]) -> Node:
    """One part after the other, with nested sequences and adjacent texts joined."""
    result: list[Node] = []
    for part in parts:
        for one in part.parts if isinstance(part, Seq) else (part,):
            if one == NOTHING:
                return NOTHING
            last = result[-1] if result else None
            if isinstance(one, Text) and isinstance(last, Text):
                result[-1] = Text(last.text + one.text)
            else:
                result.append(one)
    return result[0] if len(result) == 1 else Seq(tuple(result))


def choice(options: Iterable[Node]) -> Node:
    """One of the options, with nested choices joined, equal options removed and common endings shared.

    ``a x | b x`` becomes ``(a | b) x`` where ``x`` is a rule or a text: rules that each refer twice to the
    next one would otherwise double with every level when they are expanded.
    """
    flat: dict[Node, None] = {}
    for option in options:
        for one in option.options if isinstance(option, Alt) else (option,):
            flat[one] = None
    groups: dict[Node, list[Node]] = {}
    for option in flat:
        parts = option.parts if isinstance(option, Seq) else (option,)
        ending = parts[-1] if parts and isinstance(parts[-1], Ref | Text) else option
        groups.setdefault(ending, []).append(option)
    result: list[Node] = []
    for ending, members in groups.items():
        if len(members) == 1:
            result.append(members[0])
        else:
            heads = (sequence(one.parts[:-1]) if isinstance(one, Seq) else EMPTY for one in members)
            result.append(sequence([choice(heads), ending]))
    return result[0] if len(result) == 1 else Alt(tuple(result))


def repeated(part: Node, least: int, most: int | None) -> Node:
    """A part so many times, in its simplest form."""
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NOTHING:
        return EMPTY if least == 0 else NOTHING
    if (least, most) == (1, 1):
        return part
    return Repeat(part, least, most)


def children(node: Node) -> tuple[Node, ...]:
    """The direct parts of a node."""
    if isinstance(node, Seq):
        return node.parts
    if isinstance(node, Alt):
        return node.options
    return (node.part,) if isinstance(node, Repeat) else ()


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it, references not followed."""
    pending = [node]
    while pending:
        one = pending.pop()
        yield one
        pending += children(one)


def references(node: Node) -> set[str]:
    """Names of the rules that a node refers to directly."""
    return {one.name for one in walk(node) if isinstance(one, Ref)}
