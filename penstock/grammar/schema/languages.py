"""Converts the conditions of a string shape to one expression or one automaton."""

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
    """The union of an automaton's strings up to a length and of an expression's strings."""

    counting: Counting
    expression: regex.RegexNode | None


Language: TypeAlias = regex.RegexNode | Automaton | Counted
_SHORT = 63  # length up to which the simple expressions of all formats are valid


@lru_cache(maxsize=128)
def language_of(text: StringShape) -> Language | None:
    """Return the strings of a shape with conditions; None if no string satisfies them.

    The result is exact if its automaton is small. Otherwise it excludes some strings: those near a maximum
    length, and rare forms of a format (`formats.SIMPLE`).

    Raises:
        UnsupportedSchemaError: the automaton is too large.
    """
    wanted = [condition.tree for condition in text.conditions if not condition.is_negated]
    excluded = [condition.tree for condition in text.conditions if condition.is_negated]
    bound = Bound(text.min_count, text.max_count)
    if len(wanted) == 1 and not excluded:
        simple = _with_length(wanted[0], bound)
        if simple is not None:
            return simple
    for tree in wanted:
        low, high = regex.lengths(tree)
        if (bound.max_count is not None and low > bound.max_count) or (
            high is not None and high < bound.min_count
        ):
            return None
    if bound.max_count is not None and bound.min_count > bound.max_count:
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
            condition.source.where,
            "its grammar is too large together with the other bounds, patterns and formats of the string: "
            "use shorter lengths or a single pattern",
        )
    return found


def _narrowed(
    text: StringShape, wanted: list[regex.RegexNode], excluded: list[regex.RegexNode]
) -> Language | None:
    """Return most strings of a shape; None if that automaton is also too large."""
    expression = None
    if len(wanted) == 1 and not excluded and text.max_count is not None:
        expression = shortened(wanted[0], text.max_count)
        if regex.lengths(expression)[0] < text.min_count:
            expression = None
    for max_count in dict.fromkeys((text.max_count, _SHORT)):
        if max_count is None or (max_count >= text.min_count and max_count <= (text.max_count or max_count)):
            trees = [
                (simple_tree(condition.format, max_count) if condition.format else None) or condition.tree
                for condition in text.conditions
                if not condition.is_negated
            ]
            try:
                automaton = intersection(trees, excluded, Bound(text.min_count))
            except TooLargeError:
                continue
            if automaton is None:
                continue
            if max_count is None:
                return automaton
            counting = counting_of(automaton, max_count)
            if counting is not None:
                return Counted(counting, expression)
    return expression


def _with_length(tree: regex.RegexNode, bound: Bound) -> regex.RegexNode | None:
    """Return the expression if its length is within the bound, or if its only repetition can be limited."""
    while isinstance(tree, regex.RegexSeq) and len(tree.parts) == 1:
        tree = tree.parts[0]
    low, high = regex.lengths(tree)
    if low >= bound.min_count and (bound.max_count is None or (high is not None and high <= bound.max_count)):
        return tree
    if isinstance(tree, regex.RegexRepeat) and isinstance(tree.part, regex.Char):
        min_count = max(tree.min_count, bound.min_count)
        max_count = (
            tree.max_count
            if bound.max_count is None
            else min(bound.max_count, tree.max_count or bound.max_count)
        )
        if max_count is None or min_count <= max_count:
            return regex.RegexRepeat(tree.part, min_count, max_count)
    return None


def shortened(node: regex.RegexNode, max_count: int) -> regex.RegexNode:
    """Return an expression for the texts with at most ``max_count`` characters.

    Args:
        node: the expression, whose shortest text fits.
        max_count: the maximum length, which is distributed among the repetitions.
    """
    low, high = regex.lengths(node)
    assert low <= max_count
    if high is not None and high <= max_count:
        return node
    if isinstance(node, regex.RegexAlt):
        fitting = [option for option in node.options if regex.lengths(option)[0] <= max_count]
        return regex.RegexAlt(tuple(shortened(option, max_count) for option in fitting))
    if isinstance(node, regex.RegexRepeat):
        return _shortened_repeat(node, max_count)
    assert isinstance(node, regex.RegexSeq)
    lengths = [regex.lengths(part) for part in node.parts]
    optional = {i: None if b is None else b - a for i, (a, b) in enumerate(lengths) if a != b}
    spare = max_count - low
    budgets = {i: a for i, (a, _) in enumerate(lengths)}
    # Parts with the fewest optional characters keep all of them; the others divide the rest evenly.
    for done, i in enumerate(sorted(optional, key=lambda i: (optional[i] is None, optional[i] or 0))):
        share = spare // (len(optional) - done)
        count = optional[i]
        granted = share if count is None else min(count, share)
        budgets[i] += granted
        spare -= granted
    return regex.RegexSeq(tuple(shortened(part, budgets[i]) for i, part in enumerate(node.parts)))


def _shortened_repeat(node: regex.RegexRepeat, max_count: int) -> regex.RegexNode:
    low, high = regex.lengths(node.part)
    if low == high == 1:
        return regex.RegexRepeat(
            node.part, node.min_count, max_count if node.max_count is None else min(node.max_count, max_count)
        )
    at_most = max_count if node.max_count is None else node.max_count
    # A part of medium size is repeated as often as it fits.
    size = max(low, max_count if at_most <= 1 else isqrt(max_count * max(low, 1)))
    if high is not None:
        size = min(size, high)
    if node.min_count > 0:
        size = max(min(size, max_count // node.min_count), low)
    times = min(at_most, max_count // size) if size else node.min_count
    return regex.RegexRepeat(shortened(node.part, size), node.min_count, times)
