"""The tree of a regular expression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Char:
    """One character in ``ranges``."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RegexSeq:
    """A sequence of parts."""

    parts: tuple[RegexNode, ...]


@dataclass(frozen=True, slots=True)
class RegexAlt:
    """Any one of several options."""

    options: tuple[RegexNode, ...]


@dataclass(frozen=True, slots=True)
class RegexRepeat:
    """``min_count`` to ``max_count`` repetitions of a part. If ``max_count`` is None, there is no maximum."""

    part: RegexNode
    min_count: int
    max_count: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``."""

    char: str


RegexNode: TypeAlias = Char | RegexSeq | RegexAlt | RegexRepeat | Anchor
