"""JSON strings as grammars: characters as they are, escapes, bounded lengths, patterns, names."""

from __future__ import annotations

from typing import TypeAlias

from penstock.grammar.schema import regex
from penstock.grammar.schema.automata import Automaton
from penstock.grammar.schema.counted import CountedWriter
from penstock.grammar.schema.ebnf import (
    ALL_CHARACTERS,
    NOTHING,
    Ranges,
    Rules,
    char_class,
    choice,
    literal,
    repeated,
    sequence,
    without,
)
from penstock.grammar.schema.languages import Counted, language_of
from penstock.grammar.schema.shapes import StringShape

_PLAIN = without(ALL_CHARACTERS, [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])  # stand for themselves in a string
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_LONG = without([(0, 0x1F)], [(8, 10), (12, 13)])  # control characters without a short escape
ESCAPE = "\\"
_MAX_COUNTED_CHARACTERS = 256
_MAX_INLINE = 60
_Spelling: TypeAlias = tuple[str | None, str | None]  # a class of characters as they are, a rule of escapes


class StringWriter:
    """Writes the rules of strings.

    Args:
        rules: where they are added.
        escaped: characters that no string has as they are.
    """

    def __init__(self, rules: Rules, escaped: list[int]) -> None:
        self._rules = rules
        self._escaped = escaped
        self._plain = without(_PLAIN, [(point, point) for point in escaped])

    def text(self, shape: StringShape) -> str | None:
        """The rule of a string; None where the bounds exclude its expression."""
        quote = literal('"')
        if not shape.conditions:
            spelling: _Spelling = (char_class(self._plain), self._any_escape())
            content = self._repeated(spelling, shape.least, shape.most, quote)
        else:
            language = language_of(shape)
            if language is None:
                return None
            if isinstance(language, Automaton):
                content = self._automaton(language, quote)
            elif isinstance(language, Counted):
                content = self._counted(language, quote)
            elif isinstance(language, regex.Repeat) and isinstance(language.part, regex.Char):
                spelling = self._spelling(language.part.ranges)
                content = self._repeated(spelling, language.least, language.most, quote)
            else:
                content = sequence(regex.to_ebnf(language, self._characters, self._part), quote)
        return self._rules.add("string", sequence(quote, content))

    def _part(self, body: str) -> str:
        """A part of an expression, as a rule where it is long: equal ones are written once."""
        return self._rules.add("part", body) if len(body) > _MAX_INLINE else body

    def _automaton(self, automaton: Automaton, end: str) -> str:
        """A rule for each state; ``end`` follows where a text may end."""
        names = [self._rules.reserve("state") for _ in automaton.steps]
        for state, row in enumerate(automaton.steps):
            options = [end] if automaton.accepting[state] else []
            loop = NOTHING
            for ranges, target in row:
                if target == state:  # a class repeats by itself, which costs the least
                    plain, escape = self._spelling(ranges)
                    loop = f"{plain}*" if plain else NOTHING
                    if escape:
                        loop = sequence(loop, f"({sequence(escape, loop)})*")
                    continue
                options += [sequence(one, names[target]) for one in self._options(ranges)]
            self._rules.define(names[state], sequence(loop, choice(options)))
        return names[0]

    def _counted(self, language: Counted, end: str) -> str:
        """An automaton up to a length, or the expression beside it."""
        content = CountedWriter(self._rules, language.counting, self._options, end).write()
        if language.beside is None:
            return content
        return choice([content, sequence(regex.to_ebnf(language.beside, self._characters, self._part), end)])

    def _options(self, ranges: Ranges) -> list[str]:
        """One character of these: as it is, or as an escape."""
        return [self._part(one) for one in self._spelling(ranges) if one is not None]

    def _any_escape(self) -> str:
        """An escape as any JSON writer may write it; the two halves of a pair are one character."""
        digit = "[0-9a-fA-F]"
        single = f"([0-9a-cA-CefEF] {digit} {digit} {digit} | [dD] [0-7] {digit} {digit})"
        pair = f"[dD] [89abAB] {digit} {digit} {literal(ESCAPE + 'u')} [dD] [c-fC-F] {digit} {digit}"
        short = '["\\\\/bfnrt]'
        return self._rules.add("escape", f'{literal(ESCAPE)} ({short} | "u" ({single} | {pair}))')

    def _characters(self, ranges: Ranges, least: int, most: int | None) -> str:
        """So many characters of these, written the shortest way."""
        return self._repeated(self._spelling(ranges), least, most, NOTHING)

    def _spelling(self, ranges: Ranges) -> _Spelling:
        plain = [
            part
            for part in ((max(a, c), min(b, d)) for a, b in ranges for c, d in self._plain)
            if part[0] <= part[1]
        ]
        longs = [*(point for first, last in _LONG for point in range(first, last + 1)), *self._escaped]
        controls = [(point, f"u{point:04x}") for point in longs]
        escapes = [
            literal(f"{ESCAPE}{written}")
            for point, written in [*_SHORT.items(), *controls]
            if any(low <= point <= high for low, high in ranges)
        ]
        escape = self._rules.add("short_escape", choice(escapes)) if escapes else None
        return char_class(plain) if plain else None, escape

    def _repeated(self, spelling: _Spelling, least: int, most: int | None, end: str) -> str:
        """From ``least`` to ``most`` characters, then ``end``.

        xgrammar prepares a mask for each state of a rule, and finds out token by token what may come behind
        its end. So a class repeats by itself, a number of characters is a rule for each, and the end stands
        in the last: otherwise a mask takes a thousand times longer.
        """
        plain, escape = spelling
        if plain is None or escape is None:
            only = plain or escape
            assert only is not None
            if most is None or end == NOTHING:
                return sequence(repeated(only, least, most), end)
            one_more = [only]
        else:
            if (least, most) == (1, 1) and end == NOTHING:
                return choice([plain, escape])
            one_more = [plain, escape]
        if most is None:
            if least:
                rest = self._repeated(spelling, 0, None, end)
                return self._repeated(spelling, least, least, self._rules.add("rest", rest))
            return sequence(f"{plain}*", f"({escape} {plain}*)*", end)
        if most > _MAX_COUNTED_CHARACTERS:
            return sequence(repeated(one_more[0], least, most), end)  # with escapes each token would be slow
        following = end
        for count in range(most - 1, -1, -1):
            options = [sequence(one, following) for one in one_more]
            following = self._rules.add("counted", choice([*([end] if count >= least else []), *options]))
        return following

    def new_name(self, taken: list[str]) -> str:
        """The rest of a name behind its quotation mark, with the one at its end; none of those taken.

        Written the shortest way only: in another spelling it would be a name that is taken.
        """
        free = self._rules.add("rest", sequence(self._characters(ALL_CHARACTERS, 0, None), literal('"')))
        return self._name_beside(taken, 0, free)

    def _name_beside(self, taken: list[str], depth: int, free: str) -> str:
        """As `new_name`, behind ``depth`` characters that all of ``taken`` have in common."""
        if not taken:
            return free
        ends_here = any(len(name) == depth for name in taken)
        branches: dict[str, list[str]] = {}
        for name in taken:
            if len(name) > depth:
                branches.setdefault(name[depth], []).append(name)
        # A chain of single characters would need a rule, and a level of recursion, for each.
        options = [] if ends_here else [literal('"')]
        points = [(ord(character), ord(character)) for character in branches]
        options.append(sequence(self._characters(without(ALL_CHARACTERS, points), 1, 1), free))
        for character, names in branches.items():
            point = ord(character)
            rest = self._name_beside(names, depth + 1, free)
            options.append(sequence(self._characters([(point, point)], 1, 1), rest))
        return self._rules.add("name", choice(options))
