"""Divides a grammar into lexemes, which are regular expressions, and rules over lexemes.

llguidance matches lexemes with lazily built automata, which is fast, and rules with an Earley parser, which
is slow for single characters. Its lexer takes the longest match of all lexemes that may come next. A division
is exact if the longest match is the only one after which the rules can continue (`conflicts`).
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
from penstock.grammar.lark.simplify import order

MAX_LEXEME_SIZE = 1_000  # maximum nodes of a lexeme, with its rules expanded
MAX_ONLY_LEXEME_SIZE = 50_000  # maximum nodes of a lexeme that is the whole grammar
MAX_LEXEME_DEPTH = 300  # maximum nesting of rules in a lexeme: the library recurses over them
ANY_SIZE = 1 << 59
_TOO_LARGE = 1 << 60


@dataclass(slots=True)
class Division:
    """A grammar as rules over lexemes.

    Attributes:
        rules: rules over lexemes and tokens.
        lexemes: name -> node, which refers to rules of ``parts``.
        parts: the rules that lexemes refer to.
        root: the name of the start rule.
    """

    rules: Rules
    lexemes: dict[str, Node]
    parts: Rules
    root: str


class FreeTextConflict(Exception):
    """Free text is adjacent to an expression that it may contain; a lexer cannot distinguish them."""


def divide(
    rules: Rules, root: str, check_time: Callable[[], None], max_only_size: int = MAX_ONLY_LEXEME_SIZE
) -> Division:
    """Divide simplified rules. The division matches the same texts as the rules.

    Raises:
        FreeTextConflict: free text, which cannot be divided, is next to an expression that it may contain.
    """
    regular = _Regular(rules)
    if regular.is_lexeme(Ref(root), max_only_size):
        return Division({"start": Ref("lexeme_0")}, {"lexeme_0": rules[root]}, rules, "start")
    split: dict[Node, list[Node]] = {}
    total = 0
    while total <= MAX_WORK:
        division = _Divider(rules, regular, split).divide(root)
        found, work = find_conflicts(division.rules, division.lexemes, rules, division.root, check_time)
        total += work
        if not found and work <= MAX_WORK:
            return division
        for name, other in found.items():
            node = division.lexemes[name]
            split[node] = _pieces(node, division.lexemes[other])
    # Lexemes of one character need no search: none of them can continue after another one ends.
    regular.max_size = 1
    return _Divider(rules, regular, {}).divide(root)


def _pieces(node: Node, beginning: Node) -> list[Node]:
    """Return the parts of a lexeme. A common prefix with another lexeme becomes a part."""
    parts = node.parts if isinstance(node, Seq) else (node,)
    if beginning != node:
        heads = beginning.parts if isinstance(beginning, Seq) else (beginning,)
        *common, last = heads or (node,)
        size = len(common)
        if len(parts) > size and list(parts[:size]) == common:
            if parts[size] == last and len(parts) > size + 1:
                return [beginning, sequence(parts[size + 1 :])]
            if isinstance(last, Text) and isinstance(whole := parts[size], Text):
                if whole.text.startswith(last.text):
                    rest = Text(whole.text[len(last.text) :])
                    return [beginning, sequence([rest, *parts[size + 1 :]])]
    return list(children(node))


class _Regular:
    """Decides which nodes can be a lexeme, and computes their size with rules expanded."""

    def __init__(self, rules: Rules) -> None:
        self.max_size = MAX_LEXEME_SIZE
        self._sizes: dict[str, int] = {}
        self._depths: dict[str, int] = {}
        names, recursive, _ = order(rules)
        for name in names:
            node = rules[name]
            self._sizes[name] = _TOO_LARGE if name in recursive else self.size(node)
            below = [one.name for one in walk(node) if isinstance(one, Ref)]
            self._depths[name] = 1 + max((self._depths.get(one, 0) for one in below), default=0)

    def is_lexeme(self, node: Node, max_count: int | None = None) -> bool:
        """Return whether a regular expression of at most this size can match the node."""
        max_count = self.max_size if max_count is None else max_count
        if isinstance(node, Ref) and max_count == 1:
            return False
        depth = max((self._depths[one.name] for one in walk(node) if isinstance(one, Ref)), default=0)
        return self.size(node) <= max_count and depth <= MAX_LEXEME_DEPTH

    def size(self, node: Node) -> int:
        """Return the number of nodes and characters, with rules expanded."""
        if isinstance(node, Ref):
            return self._sizes.get(node.name, _TOO_LARGE)
        if isinstance(node, Tokens):
            return _TOO_LARGE
        return min(_own_size(node) + sum(map(self.size, children(node))), _TOO_LARGE)


def _own_size(node: Node) -> int:
    if isinstance(node, Text):
        return len(node.text)
    if isinstance(node, FreeText):
        return 1 + sum(map(len, node.excludes))
    if isinstance(node, TextUntil):
        return len(node.end) + sum(map(len, node.others + node.excludes))
    return 1


class _Divider:
    def __init__(self, rules: Rules, regular: _Regular, split: dict[Node, list[Node]]) -> None:
        self._source = rules
        self._regular = regular
        self._split = split
        self._names: dict[Node, str] = {}
        self._placed: Rules = {}
        self._pending: list[str] = []

    def divide(self, root: str) -> Division:
        self._pending.append(root)
        while self._pending:
            name = self._pending.pop()
            if f"rule_{name}" not in self._placed:
                self._placed[f"rule_{name}"] = self._rule(self._source[name])
        lexemes = {name: node for node, name in self._names.items()}
        return Division(self._placed, lexemes, self._source, f"rule_{root}")

    def _rule(self, node: Node) -> Node:
        """Return the node over lexemes, with as few lexemes as possible."""
        if node == EMPTY:
            return node
        if self._regular.is_lexeme(node) and node not in self._split:
            return self._lexeme(node)
        if isinstance(node, Seq):
            return sequence(map(self._rule, self._split.get(node) or self._runs(node.parts)))
        if isinstance(node, Alt):
            if node in self._split:
                return choice(map(self._rule, node.options))
            regular = [option for option in node.options if self._regular.is_lexeme(option)]
            joined = choice(regular) if regular else None
            if joined is None or joined in self._split or not self._regular.is_lexeme(joined):
                return choice(map(self._rule, node.options))
            others = [option for option in node.options if not self._regular.is_lexeme(option)]
            return choice([self._lexeme(joined), *map(self._rule, others)])
        if isinstance(node, Repeat):
            return self._repeat_rule(node)
        if isinstance(node, Ref):
            self._pending.append(node.name)
            return Ref(f"rule_{node.name}")
        if isinstance(node, Text):
            pieces = self._split.get(node) or [Text(char) for char in node.text]
            return sequence(self._rule(piece) for piece in pieces)
        if node == FreeText():
            return Repeat(self._lexeme(Chars(ANY_CHARACTER)), 0, None)
        if isinstance(node, FreeText | TextUntil):
            raise FreeTextConflict
        assert isinstance(node, Tokens | Chars)
        return node if isinstance(node, Tokens) else self._lexeme(node)

    def _repeat_rule(self, node: Repeat) -> Node:
        """Return a repetition with one lexeme for all regular options between two other options.

        With a regular option r and a non-regular option n, ``(r | n)*`` becomes ``r* (n r*)*``.
        """
        options = node.part.options if isinstance(node.part, Alt) else (node.part,)
        regular = [option for option in options if self._regular.is_lexeme(option)]
        others = [option for option in options if option not in regular]
        if (
            not regular
            or not others
            or node.max_count is not None
            or node.min_count > 1
            or self._regular.max_size == 1
        ):
            return Repeat(self._rule(node.part), node.min_count, node.max_count)
        between = repeated(choice(regular), 0, None)
        part = self._rule(sequence([choice(others), between]))
        whole = sequence([self._rule(between), repeated(part, node.min_count, None)])
        return (
            whole if node.min_count == 0 else choice([whole, self._rule(repeated(choice(regular), 1, None))])
        )

    def _runs(self, parts: tuple[Node, ...]) -> list[Node]:
        """Join adjacent regular parts while they fit into a lexeme."""
        result: list[Node] = []
        run: list[Node] = []
        for part in parts:
            is_lexeme = self._regular.is_lexeme(part)
            longer = sequence([*run, part])
            if is_lexeme and self._regular.is_lexeme(longer):
                run.append(part)
                continue
            result += [sequence(run)] if run else []
            run = [part] if is_lexeme else []
            if not is_lexeme:
                result.append(part)
        return [*result, sequence(run)] if run else result

    def _lexeme(self, node: Node) -> Node:
        return Ref(self._name(node))

    def _name(self, node: Node) -> str:
        return self._names.setdefault(node, f"lexeme_{len(self._names)}")
