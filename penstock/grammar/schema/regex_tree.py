"""The tree of a regular expression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Char:
    """One character of these ranges."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Seq:
    """Parts one behind the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part ``least`` to ``most`` times, None without an end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``."""

    sign: str


Node: TypeAlias = Char | Seq | Alt | Repeat | Anchor
