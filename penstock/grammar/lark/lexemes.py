"""Divides a grammar into lexemes, which are regular expressions, and rules over lexemes.

llguidance matches lexemes with automata, which are fast. It matches rules with an Earley parser, which is
slow if the lexemes are single characters. llguidance's lexer takes the longest match among the lexemes that
the rules allow next. The division into lexemes therefore keeps the language of the grammar only if there are
no conflicts (see `conflicts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.grammar.lark.conflicts import MAX_WORK, find_conflicts
from penstock.grammar.lark.nodes import (
    ANY_CHARACTER,
    EMPTY,
    Alt,
    Chars,
    FreeText,
    Node,
    Ref,
    Repeat,
    Rules,
    Seq,
    Text,
    TextUntil,
    Tokens,
    children,
    choice,
    repeated,
    sequence,
    walk,
)
from penstock.grammar.lark.simplify import post_order

MAX_LEXEME_SIZE = 1_000  # maximum nodes and characters of a lexeme, with its rules expanded
MAX_SINGLE_LEXEME_SIZE = 50_000  # the same maximum for a lexeme that is the whole grammar
MAX_LEXEME_DEPTH = 300  # maximum nesting of rules in a lexeme; llguidance recurses once per level
ANY_SIZE = 1 << 59  # a maximum that every node satisfies, except nodes of size `_TOO_LARGE`
_TOO_LARGE = 1 << 60  # the size of nodes that cannot be a lexeme


@dataclass(slots=True)
class Division:
    """A grammar divided into lexemes and rules over lexemes.

    Attributes:
        rules: rules over lexemes and tokens.
        lexemes: name -> node, which may refer to rules of ``lexeme_rules``.
        lexeme_rules: the rules that lexemes refer to.
        root: the name of the start rule.
    """

    rules: Rules
    lexemes: dict[str, Node]
    lexeme_rules: Rules
    root: str


class FreeTextConflict(Exception):
    """A lexeme of free text has a conflict or is too large, and free text cannot be split."""


def divide(
    rules: Rules, root: str, check_time: Callable[[], None], max_single_size: int = MAX_SINGLE_LEXEME_SIZE
) -> Division:
    """Divide simplified rules into lexemes and rules over lexemes. The language stays the same.

    Args:
        rules: the rules of the grammar.
        root: the name of the start rule.
        check_time: called regularly; raises at the time limit.
        max_single_size: maximum nodes and characters of a lexeme that is the whole grammar.

    Raises:
        FreeTextConflict: a lexeme of free text has a conflict or is too large, and free text cannot be split.
    """
    limits = _LexemeLimits(rules)
    if limits.is_lexeme(Ref(root), max_single_size):
        return Division({"start": Ref("lexeme_0")}, {"lexeme_0": rules[root]}, rules, "start")
    split_nodes: dict[Node, list[Node]] = {}
    total_work = 0
    while total_work <= MAX_WORK:
        division = _Divider(rules, limits, split_nodes).divide(root)
        conflicts, work = find_conflicts(division.rules, division.lexemes, rules, division.root, check_time)
        total_work += work
        if not conflicts and work <= MAX_WORK:
            return division
        for name, prefix_name in conflicts.items():
            node = division.lexemes[name]
            split_nodes[node] = _split_lexeme(node, division.lexemes[prefix_name])
    # Lexemes of one character have no conflicts, because no lexeme can continue after one character.
    limits.max_size = 1
    return _Divider(rules, limits, {}).divide(root)


def _split_lexeme(node: Node, prefix: Node) -> list[Node]:
    """Split a lexeme that has a conflict with `prefix` into parts.

    If the lexeme begins with `prefix` and is longer than `prefix`, the parts are `prefix` and the rest of the
    lexeme. Otherwise the parts are the children of the lexeme's node. A node without children, such as a
    text, gives an empty list; `_Divider` splits a text into characters.
    """
    parts = node.parts if isinstance(node, Seq) else (node,)
    if prefix != node:
        prefix_parts = prefix.parts if isinstance(prefix, Seq) else (prefix,)
        *common_parts, last_prefix_part = prefix_parts or (node,)
        size = len(common_parts)
        if len(parts) > size and list(parts[:size]) == common_parts:
            if parts[size] == last_prefix_part and len(parts) > size + 1:
                return [prefix, sequence(parts[size + 1 :])]
            if isinstance(last_prefix_part, Text) and isinstance(first_part := parts[size], Text):
                if first_part.text.startswith(last_prefix_part.text):
                    remaining_text = Text(first_part.text[len(last_prefix_part.text) :])
                    return [prefix, sequence([remaining_text, *parts[size + 1 :]])]
    return list(children(node))


class _LexemeLimits:
    """Decides which nodes can be a lexeme, and computes the size of nodes with their rules expanded."""

    def __init__(self, rules: Rules) -> None:
        self.max_size = MAX_LEXEME_SIZE
        self._sizes: dict[str, int] = {}
        self._depths: dict[str, int] = {}
        names, recursive_rules, _ = post_order(rules)
        for name in names:
            node = rules[name]
            self._sizes[name] = _TOO_LARGE if name in recursive_rules else self.size(node)
            referenced_names = [ref.name for ref in walk(node) if isinstance(ref, Ref)]
            self._depths[name] = 1 + max(
                (self._depths.get(referenced_name, 0) for referenced_name in referenced_names), default=0
            )

    def is_lexeme(self, node: Node, max_size: int | None = None) -> bool:
        """Return whether the node can be a lexeme.

        A lexeme is a regular expression of size at most ``max_size`` (by default `max_size`) and with rules
        nested at most `MAX_LEXEME_DEPTH` deep. With ``max_size`` 1, a reference is not a lexeme.
        """
        max_size = self.max_size if max_size is None else max_size
        if isinstance(node, Ref) and max_size == 1:
            return False
        depth = max((self._depths[ref.name] for ref in walk(node) if isinstance(ref, Ref)), default=0)
        return self.size(node) <= max_size and depth <= MAX_LEXEME_DEPTH

    def size(self, node: Node) -> int:
        """Return the number of nodes and characters, with rules expanded.

        The result is at most `_TOO_LARGE`, which is also the size of tokens and of recursive rules.
        """
        if isinstance(node, Ref):
            return self._sizes.get(node.name, _TOO_LARGE)
        if isinstance(node, Tokens):
            return _TOO_LARGE
        return min(_node_size(node) + sum(map(self.size, children(node))), _TOO_LARGE)


def _node_size(node: Node) -> int:
    if isinstance(node, Text):
        return len(node.text)
    if isinstance(node, FreeText):
        return 1 + sum(map(len, node.excludes))
    if isinstance(node, TextUntil):
        return len(node.end) + sum(map(len, node.other_ends + node.excludes))
    return 1


class _Divider:
    """Divides rules into lexemes. `split_nodes` maps lexemes with conflicts to their parts."""

    def __init__(self, rules: Rules, limits: _LexemeLimits, split_nodes: dict[Node, list[Node]]) -> None:
        self._rules = rules
        self._limits = limits
        self._split_nodes = split_nodes
        self._lexeme_names: dict[Node, str] = {}
        self._divided_rules: Rules = {}
        self._pending_rules: list[str] = []

    def divide(self, root: str) -> Division:
        self._pending_rules.append(root)
        while self._pending_rules:
            name = self._pending_rules.pop()
            if f"rule_{name}" not in self._divided_rules:
                self._divided_rules[f"rule_{name}"] = self._divided_node(self._rules[name])
        lexemes = {name: node for node, name in self._lexeme_names.items()}
        return Division(self._divided_rules, lexemes, self._rules, f"rule_{root}")

    def _divided_node(self, node: Node) -> Node:
        """Return the node with its regular parts replaced by references to lexemes; prefers long lexemes."""
        if node == EMPTY:
            return node
        if self._limits.is_lexeme(node) and node not in self._split_nodes:
            return self._lexeme(node)
        if isinstance(node, Seq):
            return sequence(
                map(self._divided_node, self._split_nodes.get(node) or self._joined_parts(node.parts))
            )
        if isinstance(node, Alt):
            if node in self._split_nodes:
                return choice(map(self._divided_node, node.options))
            regular_options = [option for option in node.options if self._limits.is_lexeme(option)]
            regular_choice = choice(regular_options) if regular_options else None
            if (
                regular_choice is None
                or regular_choice in self._split_nodes
                or not self._limits.is_lexeme(regular_choice)
            ):
                return choice(map(self._divided_node, node.options))
            context_free_options = [option for option in node.options if not self._limits.is_lexeme(option)]
            return choice([self._lexeme(regular_choice), *map(self._divided_node, context_free_options)])
        if isinstance(node, Repeat):
            return self._divided_repeat(node)
        if isinstance(node, Ref):
            self._pending_rules.append(node.name)
            return Ref(f"rule_{node.name}")
        if isinstance(node, Text):
            parts = self._split_nodes.get(node) or [Text(char) for char in node.text]
            return sequence(self._divided_node(part) for part in parts)
        if node == FreeText():
            return Repeat(self._lexeme(Chars(ANY_CHARACTER)), 0, None)
        if isinstance(node, FreeText | TextUntil):
            raise FreeTextConflict
        assert isinstance(node, Tokens | Chars)
        return node if isinstance(node, Tokens) else self._lexeme(node)

    def _divided_repeat(self, node: Repeat) -> Node:
        """Return the repetition divided so that, if possible, each run of regular options is one lexeme.

        With a regular option r and a non-regular option n, ``(r | n)*`` becomes ``r* (n r*)*``.
        """
        options = node.part.options if isinstance(node.part, Alt) else (node.part,)
        regular_options = [option for option in options if self._limits.is_lexeme(option)]
        context_free_options = [option for option in options if option not in regular_options]
        if (
            not regular_options
            or not context_free_options
            or node.max_count is not None
            or node.min_count > 1
            or self._limits.max_size == 1
        ):
            return Repeat(self._divided_node(node.part), node.min_count, node.max_count)
        regular_run = repeated(choice(regular_options), 0, None)
        part = self._divided_node(sequence([choice(context_free_options), regular_run]))
        loop = sequence([self._divided_node(regular_run), repeated(part, node.min_count, None)])
        return (
            loop
            if node.min_count == 0
            else choice([loop, self._divided_node(repeated(choice(regular_options), 1, None))])
        )

    def _joined_parts(self, parts: tuple[Node, ...]) -> list[Node]:
        """Join adjacent regular parts as long as the result can be a lexeme."""
        result: list[Node] = []
        lexeme_parts: list[Node] = []
        for part in parts:
            is_lexeme = self._limits.is_lexeme(part)
            extended_lexeme = sequence([*lexeme_parts, part])
            if is_lexeme and self._limits.is_lexeme(extended_lexeme):
                lexeme_parts.append(part)
                continue
            result += [sequence(lexeme_parts)] if lexeme_parts else []
            lexeme_parts = [part] if is_lexeme else []
            if not is_lexeme:
                result.append(part)
        return [*result, sequence(lexeme_parts)] if lexeme_parts else result

    def _lexeme(self, node: Node) -> Node:
        return Ref(self._name(node))

    def _name(self, node: Node) -> str:
        return self._lexeme_names.setdefault(node, f"lexeme_{len(self._lexeme_names)}")
