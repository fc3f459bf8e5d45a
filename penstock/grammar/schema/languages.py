"""The strings of a shape, as one expression or one automaton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import TypeAlias

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema import regex
from penstock.grammar.schema.automata import Automaton, Bound, TooLargeError, intersection
from penstock.grammar.schema.counted import Counting, counting_of
from penstock.grammar.schema.formats import simple_tree
from penstock.grammar.schema.shapes import StringShape


@dataclass(frozen=True, slots=True)
class Counted:
    """The strings of an automaton up to a length, and those of an expression."""

    counting: Counting
    beside: regex.Node | None


Language: TypeAlias = regex.Node | Automaton | Counted
_SHORT = 63  # for which the simple expressions of all formats are right


@lru_cache(maxsize=128)
def language_of(text: StringShape) -> Language | None:
    """The strings of a shape with conditions; None where there are none.

    The result is exact where its automaton is small. Otherwise it leaves some strings out: those near a
    maximum length, and rare forms of a format (`formats.SIMPLE`).

    Raises:
        UnsupportedSchemaError: the automaton is too large.
    """
    wanted = [condition.tree for condition in text.conditions if not condition.is_negated]
    excluded = [condition.tree for condition in text.conditions if condition.is_negated]
    bound = Bound(text.least, text.most)
    if len(wanted) == 1 and not excluded:
        simple = _with_length(wanted[0], bound)
        if simple is not None:
            return simple
    for tree in wanted:
        low, high = regex.lengths(tree)
        if (bound.most is not None and low > bound.most) or (high is not None and high < bound.least):
            return None
    if bound.most is not None and bound.least > bound.most:
        return None
    try:
        return intersection(wanted, excluded, bound)
    except TooLargeError:
        pass
    found = _narrowed(text, wanted, excluded)
    if found is None:
        condition = text.conditions[-1]
        raise UnsupportedSchemaError(
            condition.keyword,
            condition.said_by.where,
            "its grammar is too large together with the other bounds, patterns and formats of the string: "
            "use shorter lengths or a single pattern",
        )
    return found


def _narrowed(text: StringShape, wanted: list[regex.Node], excluded: list[regex.Node]) -> Language | None:
    """Most of the strings of a shape; None where that fails."""
    beside = None
    if len(wanted) == 1 and not excluded and text.most is not None:
        beside = shortened(wanted[0], text.most)
        if regex.lengths(beside)[0] < text.least:
            beside = None
    for most in dict.fromkeys((text.most, _SHORT)):
        if most is None or (most >= text.least and most <= (text.most or most)):
            trees = [
                (simple_tree(condition.format, most) if condition.format else None) or condition.tree
                for condition in text.conditions
                if not condition.is_negated
            ]
            try:
                automaton = intersection(trees, excluded, Bound(text.least))
            except TooLargeError:
                continue
            if automaton is None:
                continue
            if most is None:
                return automaton
            counting = counting_of(automaton, most)
            if counting is not None:
                return Counted(counting, beside)
    return beside


def _with_length(tree: regex.Node, bound: Bound) -> regex.Node | None:
    """The expression, where its length is in the bound or can be written into its only repetition."""
    while isinstance(tree, regex.Seq) and len(tree.parts) == 1:
        tree = tree.parts[0]
    low, high = regex.lengths(tree)
    if low >= bound.least and (bound.most is None or (high is not None and high <= bound.most)):
        return tree
    if isinstance(tree, regex.Repeat) and isinstance(tree.part, regex.Char):
        least = max(tree.least, bound.least)
        most = tree.most if bound.most is None else min(bound.most, tree.most or bound.most)
        if most is None or least <= most:
            return regex.Repeat(tree.part, least, most)
    return None


def shortened(node: regex.Node, most: int) -> regex.Node:
    """Texts of an expression that have at most so many characters.

    Args:
        node: the expression, whose shortest text fits.
        most: the characters, which are shared out among the repetitions.
    """
    low, high = regex.lengths(node)
    assert low <= most
    if high is not None and high <= most:
        return node
    if isinstance(node, regex.Alt):
        fitting = [option for option in node.options if regex.lengths(option)[0] <= most]
        return regex.Alt(tuple(shortened(option, most) for option in fitting))
    if isinstance(node, regex.Repeat):
        return _shortened_repeat(node, most)
    assert isinstance(node, regex.Seq)
    lengths = [regex.lengths(part) for part in node.parts]
    wishes = {i: None if b is None else b - a for i, (a, b) in enumerate(lengths) if a != b}
    spare = most - low
    budgets = {i: a for i, (a, _) in enumerate(lengths)}
    # Those that need least get all they need; the rest is shared evenly.
    for done, i in enumerate(sorted(wishes, key=lambda i: (wishes[i] is None, wishes[i] or 0))):
        share = spare // (len(wishes) - done)
        wish = wishes[i]
        given = share if wish is None else min(wish, share)
        budgets[i] += given
        spare -= given
    return regex.Seq(tuple(shortened(part, budgets[i]) for i, part in enumerate(node.parts)))


def _shortened_repeat(node: regex.Repeat, most: int) -> regex.Node:
    low, high = regex.lengths(node.part)
    if low == high == 1:
        return regex.Repeat(node.part, node.least, most if node.most is None else min(node.most, most))
    at_most = most if node.most is None else node.most
    # A part of middling size, as often as it fits.
    size = max(low, most if at_most <= 1 else isqrt(most * max(low, 1)))
    if high is not None:
        size = min(size, high)
    if node.least > 0:
        size = max(min(size, most // node.least), low)
    times = min(at_most, most // size) if size else node.least
    return regex.Repeat(shortened(node.part, size), node.least, times)
