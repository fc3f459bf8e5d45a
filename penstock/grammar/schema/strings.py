"""Writes grammars of JSON strings: plain characters, escapes, bounded lengths, patterns, property names.

The spelling of a character is its text in a JSON string: the plain character or an escape.
"""

from __future__ import annotations

from typing import TypeAlias

from penstock.grammar.schema import regex
from penstock.grammar.schema.automata import Automaton
from penstock.grammar.schema.counted import CountedWriter
from penstock.grammar.schema.ebnf import (
    ALL_CHARACTERS,
    EMPTY,
    EbnfRules,
    Ranges,
    char_class,
    choice,
    literal,
    repeated,
    sequence,
    without,
)
from penstock.grammar.schema.languages import CountedLanguage, string_language
from penstock.grammar.schema.shapes import StringShape

# Characters that need no escape in a JSON string.
_PLAIN_RANGES = without(ALL_CHARACTERS, [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
# Control characters without a short escape.
_CONTROLS_WITHOUT_SHORT_ESCAPE = without([(0, 0x1F)], [(8, 10), (12, 13)])
ESCAPE = "\\"
_MAX_COUNTED_CHARACTERS = 256  # maximum length that is counted by one rule per character
_MAX_INLINE = 60  # maximum number of characters of an expression that is written inside other rules
_Spelling: TypeAlias = tuple[
    str | None, str | None
]  # (class of plain characters, rule of escapes), each may be None


class StringWriter:
    """Writes rules for strings.

    Args:
        rules: receives the new rules.
        escaped_code_points: characters that strings contain only as escapes.
    """

    def __init__(self, rules: EbnfRules, escaped_code_points: list[int]) -> None:
        self._rules = rules
        self._escaped_code_points = escaped_code_points
        self._plain_ranges = without(
            _PLAIN_RANGES, [(code_point, code_point) for code_point in escaped_code_points]
        )

    def text(self, shape: StringShape) -> str | None:
        """Return the name of the rule of a string shape; None if no string has the shape."""
        quote = literal('"')
        if not shape.conditions:
            spelling: _Spelling = (char_class(self._plain_ranges), self._any_escape())
            content = self._repeated_character(spelling, shape.min_count, shape.max_count, quote)
        else:
            language = string_language(shape)
            if language is None:
                return None
            if isinstance(language, Automaton):
                content = self._automaton(language, quote)
            elif isinstance(language, CountedLanguage):
                content = self._counted_string(language, quote)
            elif isinstance(language, regex.RegexRepeat) and isinstance(language.part, regex.Char):
                spelling = self._spelling(language.part.ranges)
                content = self._repeated_character(spelling, language.min_count, language.max_count, quote)
            else:
                content = sequence(regex.to_ebnf(language, self._characters, self._shared_rule), quote)
        return self._rules.add("string", sequence(quote, content))

    def _shared_rule(self, body: str) -> str:
        """Return a short `body`, or the name of a rule with a long `body`. Equal bodies share a rule."""
        return self._rules.add("part", body) if len(body) > _MAX_INLINE else body

    def _automaton(self, automaton: Automaton, end: str) -> str:
        """Write one rule per state of an automaton. Return the name of the start rule.

        The rules match the texts of the automaton, followed by ``end``.
        """
        names = [self._rules.reserve("state") for _ in automaton.transitions]
        for state, row in enumerate(automaton.transitions):
            options = [end] if automaton.accepting[state] else []
            loop = EMPTY
            for ranges, target in row:
                if target == state:  # masks of a repeated character class take the least time
                    unescaped, escape = self._spelling(ranges)
                    loop = f"{unescaped}*" if unescaped else EMPTY
                    if escape:
                        loop = sequence(loop, f"({sequence(escape, loop)})*")
                    continue
                options += [sequence(option, names[target]) for option in self._options(ranges)]
            self._rules.define(names[state], sequence(loop, choice(options)))
        return names[0]

    def _counted_string(self, language: CountedLanguage, end: str) -> str:
        """Return the expression of a `CountedLanguage`, followed by ``end``."""
        content = CountedWriter(self._rules, language.counting, self._options, end).write()
        if language.expression is None:
            return content
        return choice(
            [content, sequence(regex.to_ebnf(language.expression, self._characters, self._shared_rule), end)]
        )

    def _options(self, ranges: Ranges) -> list[str]:
        """Return the expressions of one character: a plain character, an escape, or both."""
        return [self._shared_rule(option) for option in self._spelling(ranges) if option is not None]

    def _any_escape(self) -> str:
        """Return the name of a rule for all JSON escapes. A surrogate pair is one escape."""
        digit = "[0-9a-fA-F]"
        single_escape = f"([0-9a-cA-CefEF] {digit} {digit} {digit} | [dD] [0-7] {digit} {digit})"
        surrogate_pair = (
            f"[dD] [89abAB] {digit} {digit} {literal(ESCAPE + 'u')} [dD] [c-fC-F] {digit} {digit}"
        )
        short_escape = '["\\\\/bfnrt]'
        return self._rules.add(
            "escape", f'{literal(ESCAPE)} ({short_escape} | "u" ({single_escape} | {surrogate_pair}))'
        )

    def _characters(self, ranges: Ranges, min_count: int, max_count: int | None) -> str:
        """Return the expression of ``min_count`` to ``max_count`` characters in their shortest spelling."""
        return self._repeated_character(self._spelling(ranges), min_count, max_count, EMPTY)

    def _spelling(self, ranges: Ranges) -> _Spelling:
        """Return the shortest spellings of the characters of ``ranges``: plain where possible."""
        unescaped = [
            plain_range
            for plain_range in ((max(a, c), min(b, d)) for a, b in ranges for c, d in self._plain_ranges)
            if plain_range[0] <= plain_range[1]
        ]
        long_escape_code_points = [
            *(
                code_point
                for first, last in _CONTROLS_WITHOUT_SHORT_ESCAPE
                for code_point in range(first, last + 1)
            ),
            *self._escaped_code_points,
        ]
        long_escapes = [(code_point, f"u{code_point:04x}") for code_point in long_escape_code_points]
        escapes = [
            literal(f"{ESCAPE}{escape_text}")
            for code_point, escape_text in [*_SHORT_ESCAPES.items(), *long_escapes]
            if any(low <= code_point <= high for low, high in ranges)
        ]
        escape = self._rules.add("short_escape", choice(escapes)) if escapes else None
        return char_class(unescaped) if unescaped else None, escape

    def _repeated_character(
        self, spelling: _Spelling, min_count: int, max_count: int | None, end: str
    ) -> str:
        """Return the expression of ``min_count`` to ``max_count`` characters, followed by ``end``.

        xgrammar precomputes a mask for each state of a rule. Tokens that extend beyond the end of a rule are
        not part of the precomputed mask. xgrammar checks them one by one, which makes a mask a thousand times
        slower. Therefore a character class is repeated inside its rule, a count of at most
        `_MAX_COUNTED_CHARACTERS` has one rule per character, and ``end`` is part of the last rule.
        """
        unescaped, escape = spelling
        if unescaped is None or escape is None:
            character = unescaped or escape
            assert character is not None
            if max_count is None or end == EMPTY:
                return sequence(repeated(character, min_count, max_count), end)
            spellings = [character]
        else:
            if (min_count, max_count) == (1, 1) and end == EMPTY:
                return choice([unescaped, escape])
            spellings = [unescaped, escape]
        if max_count is None:
            if min_count:
                suffix = self._repeated_character(spelling, 0, None, end)
                return self._repeated_character(
                    spelling, min_count, min_count, self._rules.add("rest", suffix)
                )
            return sequence(f"{unescaped}*", f"({escape} {unescaped}*)*", end)
        if max_count > _MAX_COUNTED_CHARACTERS:
            # Long strings have no escapes, because with escapes the computation of each mask would be slow.
            return sequence(repeated(spellings[0], min_count, max_count), end)
        next_rule = end
        for count in range(max_count - 1, -1, -1):
            options = [sequence(option, next_rule) for option in spellings]
            next_rule = self._rules.add("counted", choice([*([end] if count >= min_count else []), *options]))
        return next_rule

    def new_name(self, taken_names: list[str]) -> str:
        """Return the expression of a name that is not in ``taken_names``, followed by the closing quote.

        Names have only their shortest spelling. Another spelling could encode a taken name.
        """
        any_suffix = self._rules.add(
            "rest", sequence(self._characters(ALL_CHARACTERS, 0, None), literal('"'))
        )
        return self._name_outside(taken_names, 0, any_suffix)

    def _name_outside(self, taken_names: list[str], depth: int, any_suffix: str) -> str:
        """Return the expression of the rest of a name after ``depth`` characters.

        All ``taken_names`` begin with these characters.
        """
        if not taken_names:
            return any_suffix
        is_taken = any(len(name) == depth for name in taken_names)
        branches: dict[str, list[str]] = {}
        for name in taken_names:
            if len(name) > depth:
                branches.setdefault(name[depth], []).append(name)
        # One level of recursion per character that several taken names share.
        options = [] if is_taken else [literal('"')]
        branch_ranges = [(ord(character), ord(character)) for character in branches]
        options.append(sequence(self._characters(without(ALL_CHARACTERS, branch_ranges), 1, 1), any_suffix))
        for character, names in branches.items():
            code_point = ord(character)
            suffix = self._name_outside(names, depth + 1, any_suffix)
            options.append(sequence(self._characters([(code_point, code_point)], 1, 1), suffix))
        return self._rules.add("name", choice(options))
