"""Where the longest match of a lexeme is not the one that the rules need.

A lexer that takes the longest match is exact if no text w of a lexeme, followed by a character that the rules
allow behind that lexeme, is the beginning of a longer text of any lexeme. This module searches for such
texts. It treats all lexemes as possible everywhere and long repetitions as endless, so it may report a
conflict where there is none; it never misses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.pipelines.grammars.lark.nodes import (
    ANY_CHARACTER,
    Alt,
    Chars,
    FreeText,
    Node,
    Ranges,
    Ref,
    Repeat,
    Rules,
    Seq,
    Text,
    TextUntil,
    children,
    walk,
)

_MOST_COUNTED = 3  # repetitions with higher bounds count as endless
MOST_WORK = 400_000  # automaton states visited, with repetition; about two seconds


def conflicting(
    rules: Rules,
    lexemes: dict[str, Node],
    parts: Rules,
    root: str,
    check_time: Callable[[], None],
) -> tuple[dict[str, str], int]:
    """Names of lexemes that may go on where another one, or they themselves, should have ended.

    Each comes with the name of that other one.

    Args:
        rules: refer to each other and to lexemes.
        lexemes: refer to rules of ``parts``.
        parts: what lexemes are made of.
        root: the name of the first rule.
        check_time: called now and then; raises when the search has taken too long.

    Returns:
        The names, and the number of states visited. Above `MOST_WORK` the search was not finished.
    """
    atoms = _Atoms(lexemes, parts)
    nfa = _Nfa(atoms, parts)
    try:
        for name, node in lexemes.items():
            nfa.add_lexeme(name, node)
        check_time()
        follow = _Follow(rules, lexemes, nfa.nullable, nfa.first_of_lexemes()).of_lexemes(root)
        check_time()
        return _longer_matches(nfa, follow, check_time), nfa.work
    except _TooMuchWork:
        return {}, nfa.work


class _TooMuchWork(Exception):
    pass


def _longer_matches(
    nfa: _Nfa, follow: dict[str, int], check_time: Callable[[], None]
) -> dict[str, str]:
    """A breadth-first search over the deterministic automaton of all lexemes together."""
    found: dict[str, str] = {}
    start = nfa.closure(nfa.starts.values())
    seen, pending = {start}, [start]
    while pending:
        states = pending.pop()
        if len(seen) % 64 == 0:
            check_time()
        if states != start:
            for ended in [nfa.finals[state] for state in states if state in nfa.finals]:
                after = follow.get(ended, 0)
                for state in states:
                    if any(mask & after for mask, _ in nfa.edges[state]):
                        found.setdefault(nfa.owners[state], ended)
        for targets in _steps(nfa, states):
            following = nfa.closure(targets)
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return {name: other for name, other in found.items() if nfa.sizes[name] > 1}


def _steps(nfa: _Nfa, states: frozenset[int]) -> Iterator[set[int]]:
    """The sets of states that one character leads to, each set once."""
    edges = [edge for state in states for edge in nfa.edges[state]]
    classes: dict[int, set[int]] = {}  # disjoint sets of atoms -> targets
    for mask, target in edges:
        rest = mask
        for known in list(classes):
            common = known & rest
            if not common:
                continue
            targets = classes.pop(known)
            if known & ~common:
                classes[known & ~common] = targets
            classes[common] = targets | {target}
            rest &= ~common
            if not rest:
                break
        if rest:
            classes[rest] = {target}
    yield from classes.values()


class _Atoms:
    """Classes of characters that no expression tells apart, as bits of an integer."""

    def __init__(self, lexemes: dict[str, Node], parts: Rules) -> None:
        bounds = {0, 0xD800, 0xE000, 0x110000}
        pending, seen = list(lexemes.values()), set[str]()
        while pending:
            for one in walk(pending.pop()):
                if isinstance(one, Chars):
                    bounds.update(bound for low, high in one.ranges for bound in (low, high + 1))
                elif isinstance(one, Text | FreeText | TextUntil):
                    points = {ord(sign) for text in _texts(one) for sign in text}
                    bounds.update(bound for point in points for bound in (point, point + 1))
                elif isinstance(one, Ref) and one.name not in seen:
                    seen.add(one.name)
                    pending.append(parts[one.name])
        self._index = {bound: place for place, bound in enumerate(sorted(bounds))}
        self._masks: dict[Ranges, int] = {}
        self.everything = self.mask(ANY_CHARACTER)

    def mask(self, ranges: Ranges) -> int:
        """The bits of the characters."""
        if ranges not in self._masks:
            mask = 0
            for low, high in ranges:
                mask |= (1 << self._index[high + 1]) - (1 << self._index[low])
            self._masks[ranges] = mask
        return self._masks[ranges]

    def point(self, sign: str) -> int:
        """The bit of one character."""
        return self.mask(((ord(sign), ord(sign)),))


def _texts(node: Text | FreeText | TextUntil) -> tuple[str, ...]:
    if isinstance(node, Text):
        return (node.text,)
    return node.excludes if isinstance(node, FreeText) else (node.end, *node.others, *node.excludes)


class _Nfa:
    """A nondeterministic automaton of all lexemes."""

    def __init__(self, atoms: _Atoms, parts: Rules) -> None:
        self._atoms = atoms
        self._parts = parts
        self._owner = ""
        self._closures: dict[int, frozenset[int]] = {}
        self._empty: list[list[int]] = []
        self.edges: list[list[tuple[int, int]]] = []  # of a state: mask of characters, next state
        self.owners: list[str] = []
        self.starts: dict[str, int] = {}
        self.finals: dict[int, str] = {}
        self.sizes: dict[str, int] = {}
        self.nullable: set[str] = set()
        self.work = 0

    def add_lexeme(self, name: str, node: Node) -> None:
        self._owner = name
        before = len(self.edges)
        start = self._state()
        end = self._add(node, start)
        self.starts[name] = start
        self.finals[end] = name
        single = isinstance(node, Chars) or (isinstance(node, Text) and len(node.text) == 1)
        self.sizes[name] = 1 if single else len(self.edges) - before
        if end in self.closure([start]):
            self.nullable.add(name)

    def first_of_lexemes(self) -> dict[str, int]:
        """The characters that each lexeme may begin with."""
        result = {}
        for name, start in self.starts.items():
            mask = 0
            for state in self.closure([start]):
                for one, _ in self.edges[state]:
                    mask |= one
            result[name] = mask
        return result

    def closure(self, states: object) -> frozenset[int]:
        """The states together with those that no character leads to."""
        result: set[int] = set()
        for state in states:  # type: ignore[attr-defined]
            if state not in self._closures:
                found, pending = {state}, [state]
                while pending:
                    new = [one for one in self._empty[pending.pop()] if one not in found]
                    found.update(new)
                    pending += new
                used = (one for one in found if self.edges[one] or not self._empty[one])
                self._closures[state] = frozenset(used)
                self._count(len(found))
            result |= self._closures[state]
        self._count(len(result))
        return frozenset(result)

    def _count(self, work: int) -> None:
        self.work += work
        if self.work > MOST_WORK:
            raise _TooMuchWork

    def _state(self) -> int:
        self.edges.append([])
        self._empty.append([])
        self.owners.append(self._owner)
        return len(self.edges) - 1

    def _add(self, node: Node, start: int) -> int:
        """Adds a path for a node and gives the state at its end, which nothing leaves yet."""
        if isinstance(node, Chars):
            end = self._state()
            self.edges[start].append((self._atoms.mask(node.ranges), end))
            return end
        if isinstance(node, Text):
            for sign in node.text:
                end = self._state()
                self.edges[start].append((self._atoms.point(sign), end))
                start = end
            return start
        if isinstance(node, Seq):
            for part in node.parts:
                start = self._add(part, start)
            return start
        if isinstance(node, Alt):
            end = self._state()
            for option in node.options:
                first = self._state()
                self._empty[start].append(first)
                self._empty[self._add(option, first)].append(end)
            return end
        if isinstance(node, Repeat):
            return self._add_repeat(node, start)
        if isinstance(node, Ref):
            return self._add(self._parts[node.name], start)
        assert isinstance(node, FreeText | TextUntil)
        return self._add_free_text(node, start)

    def _add_repeat(self, node: Repeat, start: int) -> int:
        for _ in range(min(node.least, _MOST_COUNTED)):
            start = self._add(node.part, start)
        end = self._state()
        if node.most is None or node.most > _MOST_COUNTED:
            loop = self._state()
            self._empty[start].append(loop)
            self._empty[self._add(node.part, loop)].append(loop)
            self._empty[loop].append(end)
            return end
        for _ in range(node.most - node.least):
            first = self._state()
            self._empty[start] += [first, end]
            start = self._add(node.part, first)
        self._empty[start].append(end)
        return end

    def _add_free_text(self, node: FreeText | TextUntil, start: int) -> int:
        """The automaton that looks for several words at once; a state for each beginning of a word."""
        words = [word for word in _texts(node) if word]
        heads = {word[:length] for word in words for length in range(len(word) + 1)} | {""}
        end = self._state()
        states = {head: self._state() for head in heads if not _ends_with_any(head, words)}
        self._empty[start].append(states[""])
        signs = {sign for word in words for sign in word}
        for head, state in states.items():
            others = self._atoms.everything
            for sign in signs:
                others &= ~self._atoms.point(sign)
                text = head + sign
                if isinstance(node, TextUntil) and text.endswith(node.end):
                    if _ends_with_any(text, list(node.excludes)):
                        continue
                    self.edges[state].append((self._atoms.point(sign), end))
                elif not _ends_with_any(text, words):
                    target = next(text[at:] for at in range(len(text) + 1) if text[at:] in states)
                    self.edges[state].append((self._atoms.point(sign), states[target]))
            if others:
                self.edges[state].append((others, states[""]))
            if isinstance(node, FreeText):
                self._empty[state].append(end)
        return end


def _ends_with_any(text: str, words: list[str]) -> bool:
    return any(text.endswith(word) for word in words)


class _Follow:
    """The characters that may come behind lexemes."""

    def __init__(
        self, rules: Rules, lexemes: dict[str, Node], nullable: set[str], firsts: dict[str, int]
    ) -> None:
        self._rules = rules
        self._lexemes = lexemes
        self._nullable = set(nullable)
        self._firsts = dict(firsts)
        self._follow: dict[str, int] = {}
        self._pending: list[str] = []
        self._settle_firsts()

    def of_lexemes(self, root: str) -> dict[str, int]:
        self._follow[root] = 0
        self._pending = [root]
        while self._pending:
            name = self._pending.pop()
            self._visit(self._rules[name], self._follow[name])
        return {name: mask for name, mask in self._follow.items() if name in self._lexemes}

    def _settle_firsts(self) -> None:
        users: dict[str, set[str]] = {}
        for name, node in self._rules.items():
            for one in walk(node):
                if isinstance(one, Ref):
                    users.setdefault(one.name, set()).add(name)
        pending = dict.fromkeys(reversed(self._rules))
        while pending:
            name, _ = pending.popitem()
            first, is_nullable = self._first(self._rules[name])
            if first != self._firsts.get(name, 0) or (is_nullable and name not in self._nullable):
                self._firsts[name] = first
                if is_nullable:
                    self._nullable.add(name)
                pending.update(dict.fromkeys(users.get(name, ())))

    def _first(self, node: Node) -> tuple[int, bool]:
        """The characters that a node may begin with, and whether the empty text matches."""
        if isinstance(node, Ref):
            return self._firsts.get(node.name, 0), node.name in self._nullable
        if isinstance(node, Seq):
            mask = 0
            for part in node.parts:
                first, is_nullable = self._first(part)
                mask |= first
                if not is_nullable:
                    return mask, False
            return mask, True
        pairs = [self._first(child) for child in children(node)]
        mask = 0
        for first, _ in pairs:
            mask |= first
        is_nullable = any(one for _, one in pairs)
        return mask, is_nullable or (isinstance(node, Repeat) and node.least == 0)

    def _visit(self, node: Node, after: int) -> None:
        if isinstance(node, Ref):
            known = self._follow.get(node.name)
            if known is None or after & ~known:
                self._follow[node.name] = after | (known or 0)
                if node.name in self._rules:
                    self._pending.append(node.name)
        elif isinstance(node, Seq):
            for part in reversed(node.parts):
                self._visit(part, after)
                first, is_nullable = self._first(part)
                after = first | after if is_nullable else first
        elif isinstance(node, Repeat):
            self._visit(node.part, after | (0 if node.most == 1 else self._first(node.part)[0]))
        else:
            for child in children(node):
                self._visit(child, after)
