"""Divides a grammar into lexemes and rules, and writes them in llguidance's Lark notation."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import InputError, UnsupportedFeatureError
from penstock.grammar.lark.lexemes import ANY_SIZE, Division, FreeTextConflict, divide
from penstock.grammar.lark.nodes import (
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
    references,
    walk,
)
from penstock.grammar.lark.simplify import post_order, simplified, unrolled

MAX_UNROLLED = 12  # maximum levels of recursion in a grammar that is written without recursion
MAX_RULE_DEPTH = 3_000  # maximum length of a chain of rules; llguidance recurses once per rule


def _no_time_limit() -> None:
    pass


def lark_text(rules: Rules, root: str = "root", *, check_time: Callable[[], None] = _no_time_limit) -> str:
    """Return the grammar of ``root`` in llguidance's Lark notation.

    Args:
        rules: all rules by name.
        root: the name of the start rule.
        check_time: called regularly; raises at the time limit.

    Raises:
        InputError: the grammar matches no finite text, or a chain of references is too long.
        UnsupportedFeatureError: a lexer cannot separate free text from the adjacent expressions, and the
            grammar cannot be written as one lexeme.
    """
    simple_rules = simplified(rules, root)
    check_time()
    try:
        division = divide(simple_rules, root, check_time)
    except FreeTextConflict:
        check_time()
        division = _as_one_lexeme(simple_rules, root, check_time)
    return _Writer(division).text()


def _as_one_lexeme(rules: Rules, root: str, check_time: Callable[[], None]) -> Division:
    """Return the division of the grammar without recursion, as one lexeme if possible.

    Texts with more than `MAX_UNROLLED` levels of recursion are excluded.
    """
    try:
        bounded_rules = simplified(unrolled(rules, root, MAX_UNROLLED), root)
        return divide(bounded_rules, root, check_time, ANY_SIZE)
    except (FreeTextConflict, InputError):
        raise UnsupportedFeatureError(
            "a structural tag with free text next to formats that it may contain",
            "end the free text with a marker that is not a token, or make the formats flatter",
        ) from None


class _Writer:
    def __init__(self, division: Division) -> None:
        self._division = division
        self._symbol_numbers: dict[str, int] = {}

    def text(self) -> str:
        division = self._division
        _check_depth(division.rules)
        lines = [f"start: {self._symbol_name(division.root)}"]
        lines += [
            f"{self._symbol_name(name)}: {self._rule_text(node)}" for name, node in division.rules.items()
        ]
        lines += [
            f"{self._symbol_name(name)}: {self._lexeme_text(node)}" for name, node in division.lexemes.items()
        ]
        pending = [name for node in division.lexemes.values() for name in references(node)]
        written_names: set[str] = set()
        while pending:
            name = pending.pop()
            if name not in written_names:
                written_names.add(name)
                node = division.lexeme_rules[name]
                lines.append(f"{self._lexeme_rule_name(name)}: {self._lexeme_text(node)}")
                pending += references(node)
        return "\n".join([*lines, ""])

    def _symbol_name(self, name: str) -> str:
        number = self._symbol_numbers.setdefault(name, len(self._symbol_numbers))
        return f"L{number}" if name in self._division.lexemes else f"r{number}"

    def _lexeme_rule_name(self, name: str) -> str:
        return f"P{self._symbol_numbers.setdefault(f'part {name}', len(self._symbol_numbers))}"

    def _rule_text(self, node: Node) -> str:
        """Return the text of a node of a rule, which refers to lexemes, rules and tokens."""
        if isinstance(node, Ref):
            return self._symbol_name(node.name)
        if isinstance(node, Tokens):
            ranges = ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in node.ranges)
            return f"<[{'^' if node.is_negated else ''}{ranges}]>"
        return _operator_text(node, self._rule_text)

    def _lexeme_text(self, node: Node) -> str:
        """Return the text of a node of a lexeme: a regex if the node has no references and no free text."""
        if node == EMPTY:
            return '""'
        if not any(isinstance(part, Ref | FreeText | TextUntil) for part in walk(node)):
            return f"/{_regex(node)}/"
        if isinstance(node, Ref):
            return self._lexeme_rule_name(node.name)
        if isinstance(node, FreeText):
            return f"{_ANY_TEXT} & {_text_without(node.excludes)}" if node.excludes else _ANY_TEXT
        if isinstance(node, TextUntil):
            parts = [
                f"({_ANY_TEXT} /{_string_literal(node.end)}/)",
                _text_without((node.end, *node.other_ends), "(?s:.+)"),
            ]
            return " & ".join([*parts, *([_text_without(node.excludes)] if node.excludes else [])])
        return _operator_text(node, self._lexeme_text)


_ANY_TEXT = "/(?s:.*)/"  # any text


def _text_without(words: tuple[str, ...], suffix_regex: str = "(?s:.*)") -> str:
    """Return an expression for texts that do not end with one of the words and a match of ``suffix_regex``.

    By default, these are the texts that contain none of ``words``.
    """
    return f"~/(?s:.*)(?:{'|'.join(map(_string_literal, words))}){suffix_regex}/"


def _operator_text(node: Node, write_node: object) -> str:
    if node == EMPTY:
        return '""'
    if isinstance(node, Seq):
        return " ".join(_grouped_text(part, write_node) for part in node.parts)
    if isinstance(node, Alt):
        return " | ".join(_grouped_text(option, write_node) for option in node.options)
    assert isinstance(node, Repeat)
    return f"({write_node(node.part)}){_quantifier(node)}"  # type: ignore[operator]


def _grouped_text(node: Node, write_node: object) -> str:
    text: str = write_node(node)  # type: ignore[operator]
    return text if isinstance(node, Ref | Tokens | Chars | Text) else f"({text})"


def _quantifier(node: Repeat) -> str:
    if (node.min_count, node.max_count) == (0, 1):
        return "?"
    if node.max_count is None and node.min_count < 2:
        return "+" if node.min_count else "*"
    if node.min_count == node.max_count:
        return f"{{{node.min_count}}}"
    return f"{{{node.min_count},{'' if node.max_count is None else node.max_count}}}"


def _regex(node: Node) -> str:
    if isinstance(node, Text):
        return _string_literal(node.text)
    if isinstance(node, Chars):
        parts = (
            _escaped_character(low)
            if low == high
            else f"{_escaped_character(low)}-{_escaped_character(high)}"
            for low, high in node.ranges
        )
        return f"[{''.join(parts)}]"
    if isinstance(node, Seq):
        return "".join(
            f"(?:{_regex(part)})" if isinstance(part, Alt) else _regex(part) for part in node.parts
        )
    if isinstance(node, Alt):
        return "|".join(map(_regex, node.options))
    assert isinstance(node, Repeat)
    return f"(?:{_regex(node.part)}){_quantifier(node)}"


def _string_literal(text: str) -> str:
    return "".join(
        char if char.isascii() and char.isalnum() else _escaped_character(ord(char)) for char in text
    )


def _escaped_character(code_point: int) -> str:
    is_plain = 0 <= code_point < 128 and chr(code_point).isalnum()
    return chr(code_point) if is_plain else f"\\x{{{code_point:x}}}"


def _check_depth(rules: Rules) -> None:
    depth = post_order(rules)[2]
    if depth > MAX_RULE_DEPTH:
        raise InputError(
            f"the grammar has a chain of {depth} rules that refer to each other, the maximum is "
            f"{MAX_RULE_DEPTH}: make it flatter"
        )
