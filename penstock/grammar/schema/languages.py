"""Converts the length and conditions of a string shape to an expression, an automaton or a union of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import TypeAlias

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema import regex
from penstock.grammar.schema.automata import Automaton, LengthBound, TooLargeError, intersection
from penstock.grammar.schema.counted import Counting, make_counting
from penstock.grammar.schema.formats import simple_tree
from penstock.grammar.schema.shapes import StringShape


@dataclass(frozen=True, slots=True)
class CountedLanguage:
    """The union of the strings of an automaton up to a maximum length and of the strings of an expression.

    Attributes:
        counting: the automaton and the maximum length.
        expression: further strings; None if there are none.
    """

    counting: Counting
    expression: regex.RegexNode | None


Language: TypeAlias = regex.RegexNode | Automaton | CountedLanguage
# Up to this length, all matches of the expressions in `formats.SIMPLE_FORMATS` are valid.
_SIMPLE_LENGTH = 63


@lru_cache(maxsize=128)
def string_language(string_shape: StringShape) -> Language | None:
    """Return the strings of a shape with conditions; None if the shape has no strings.

    The result is exact if `_with_length_bound` returns it or if its automaton is small. Otherwise it may
    exclude strings near a maximum length, rare forms of a format (`formats.SIMPLE_FORMATS`), and strings in
    which one part is very long (`shortened`).

    Raises:
        UnsupportedSchemaError: the automaton is too large, even with these exclusions.
    """
    required_trees = [condition.tree for condition in string_shape.conditions if not condition.is_negated]
    excluded_trees = [condition.tree for condition in string_shape.conditions if condition.is_negated]
    bound = LengthBound(string_shape.min_count, string_shape.max_count)
    if len(required_trees) == 1 and not excluded_trees:
        bounded_tree = _with_length_bound(required_trees[0], bound)
        if bounded_tree is not None:
            return bounded_tree
    for tree in required_trees:
        low, high = regex.lengths(tree)
        if (bound.max_count is not None and low > bound.max_count) or (
            high is not None and high < bound.min_count
        ):
            return None
    if bound.max_count is not None and bound.min_count > bound.max_count:
        return None
    try:
        return intersection(required_trees, excluded_trees, bound)
    except TooLargeError:
        pass
    reduced_language = _reduced_language(string_shape, required_trees, excluded_trees)
    if reduced_language is None:
        condition = string_shape.conditions[-1]
        raise UnsupportedSchemaError(
            condition.keyword,
            condition.source.where,
            "its grammar is too large together with the other bounds, patterns and formats of the string: "
            "use shorter lengths or a single pattern",
        )
    return reduced_language


def _reduced_language(
    string_shape: StringShape, required_trees: list[regex.RegexNode], excluded_trees: list[regex.RegexNode]
) -> Language | None:
    """Return a subset of the strings of a shape; None if each subset is too large or has no string."""
    expression = None
    if len(required_trees) == 1 and not excluded_trees and string_shape.max_count is not None:
        expression = shortened(required_trees[0], string_shape.max_count)
        if regex.lengths(expression)[0] < string_shape.min_count:
            expression = None
    for max_count in dict.fromkeys((string_shape.max_count, _SIMPLE_LENGTH)):
        if max_count is None or (
            max_count >= string_shape.min_count and max_count <= (string_shape.max_count or max_count)
        ):
            trees = [
                (simple_tree(condition.format, max_count) if condition.format else None) or condition.tree
                for condition in string_shape.conditions
                if not condition.is_negated
            ]
            try:
                automaton = intersection(trees, excluded_trees, LengthBound(string_shape.min_count))
            except TooLargeError:
                continue
            if automaton is None:
                continue
            if max_count is None:
                return automaton
            counting = make_counting(automaton, max_count)
            if counting is not None:
                return CountedLanguage(counting, expression)
    return expression


def _with_length_bound(tree: regex.RegexNode, bound: LengthBound) -> regex.RegexNode | None:
    """Return an expression of the texts of ``tree`` whose length is within a bound.

    The result is ``tree`` itself if the bound has no effect, or a single repetition with other counts.
    Returns None if neither of these expressions is possible.
    """
    while isinstance(tree, regex.RegexSeq) and len(tree.parts) == 1:
        tree = tree.parts[0]
    low, high = regex.lengths(tree)
    if low >= bound.min_count and (bound.max_count is None or (high is not None and high <= bound.max_count)):
        return tree
    if isinstance(tree, regex.RegexRepeat) and isinstance(tree.part, regex.Char):
        min_count = max(tree.min_count, bound.min_count)
        max_counts = [count for count in (tree.max_count, bound.max_count) if count is not None]
        max_count = min(max_counts, default=None)
        if max_count is None or min_count <= max_count:
            return regex.RegexRepeat(tree.part, min_count, max_count)
    return None


def shortened(node: regex.RegexNode, max_count: int) -> regex.RegexNode:
    """Return an expression of some texts of `node` with at most ``max_count`` characters.

    Args:
        node: the expression. Its shortest text has at most ``max_count`` characters.
        max_count: the maximum length, which is divided among the repetitions.
    """
    low, high = regex.lengths(node)
    assert low <= max_count
    if high is not None and high <= max_count:
        return node
    if isinstance(node, regex.RegexAlt):
        possible_options = [option for option in node.options if regex.lengths(option)[0] <= max_count]
        return regex.RegexAlt(tuple(shortened(option, max_count) for option in possible_options))
    if isinstance(node, regex.RegexRepeat):
        return _shortened_repeat(node, max_count)
    assert isinstance(node, regex.RegexSeq)
    lengths = [regex.lengths(part) for part in node.parts]
    num_optional = {  # index of a part -> optional characters; None if unbounded
        i: None if max_length is None else max_length - min_length
        for i, (min_length, max_length) in enumerate(lengths)
        if min_length != max_length
    }
    remaining_length = max_count - low
    max_lengths = {i: min_length for i, (min_length, _) in enumerate(lengths)}
    # Parts with few optional characters keep all of them. The other parts get equal shares of the remaining
    # characters.
    for num_done, i in enumerate(
        sorted(num_optional, key=lambda i: (num_optional[i] is None, num_optional[i] or 0))
    ):
        share = remaining_length // (len(num_optional) - num_done)
        num_optional_characters = num_optional[i]
        extra_length = share if num_optional_characters is None else min(num_optional_characters, share)
        max_lengths[i] += extra_length
        remaining_length -= extra_length
    return regex.RegexSeq(tuple(shortened(part, max_lengths[i]) for i, part in enumerate(node.parts)))


def _shortened_repeat(node: regex.RegexRepeat, max_count: int) -> regex.RegexNode:
    low, high = regex.lengths(node.part)
    if low == high == 1:
        return regex.RegexRepeat(
            node.part, node.min_count, max_count if node.max_count is None else min(node.max_count, max_count)
        )
    max_repetitions = max_count if node.max_count is None else node.max_count
    # Use about the square root of the maximum length for one repetition, so that several repetitions fit.
    part_length = max(low, max_count if max_repetitions <= 1 else isqrt(max_count * max(low, 1)))
    if high is not None:
        part_length = min(part_length, high)
    if node.min_count > 0:
        part_length = max(min(part_length, max_count // node.min_count), low)
    repetitions = min(max_repetitions, max_count // part_length) if part_length else node.min_count
    return regex.RegexRepeat(shortened(node.part, part_length), node.min_count, repetitions)
