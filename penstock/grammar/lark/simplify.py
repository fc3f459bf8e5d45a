"""Simplifies rules without changing their language: removes unused rules and replaces recursion by loops."""

from __future__ import annotations

from penstock.errors import InputError
from penstock.grammar.lark.nodes import (
    EMPTY,
    NOTHING,
    Alt,
    Node,
    Ref,
    Repeat,
    Rules,
    Seq,
    children,
    choice,
    references,
    repeated,
    sequence,
    walk,
)


def simplified(rules: Rules, root: str) -> Rules:
    """Return the rules that ``root`` uses and that match some finite text.

    Raises:
        InputError: ``root`` matches no finite text.
    """
    productive = _productive(rules)
    if root not in productive:
        raise InputError("the grammar allows no output: it matches no finite text")
    useful = {name: _without_recursion(name, _only(rules[name], productive)) for name in productive}
    return _reachable(_with_counts(_reachable(useful, root)), root)


def _reachable(rules: Rules, root: str) -> Rules:
    result: Rules = {}
    pending = [root]
    while pending:
        name = pending.pop()
        if name not in result:
            result[name] = rules[name]
            pending += references(result[name])
    return result


def _with_counts(rules: Rules) -> Rules:
    """Return the rules with repetitions in place of chains of rules that each add the same part."""
    counted: dict[str, tuple[Node, int, int, Node]] = {}  # part, minimum, maximum, following node
    result = dict(rules)
    for name in order(rules)[0]:
        found = _counted(rules[name], counted)
        if found is not None:
            counted[name] = part, min_count, max_count, end = found
            result[name] = sequence([repeated(part, min_count, max_count), end])
    return result


def _counted(
    node: Node, counted: dict[str, tuple[Node, int, int, Node]]
) -> tuple[Node, int, int, Node] | None:
    if isinstance(node, Seq) and len(node.parts) == 2 and isinstance(node.parts[0], Alt):
        head, end = node.parts
        assert isinstance(head, Alt)
        if EMPTY in head.options:
            return choice(option for option in head.options if option != EMPTY), 0, 1, end
    options = node.options if isinstance(node, Alt) else (node,)
    sequences = [option for option in options if isinstance(option, Seq) and len(option.parts) > 1]
    links = [one for one in sequences if isinstance(ref := one.parts[-1], Ref) and ref.name in counted]
    others = [option for option in options if option not in links]
    if len(links) != 1 or len(others) > 1:
        return None
    *parts, ref = links[0].parts
    assert isinstance(ref, Ref)
    part, min_count, max_count, end = counted[ref.name]
    if sequence(parts) != part or (others and (others[0] != end or min_count > 0)):
        return None
    return part, 0 if others else min_count + 1, max_count + 1, end


def unrolled(rules: Rules, root: str, times: int) -> Rules:
    """Return rules without recursion. They match fewer texts: recursion is limited to ``times`` levels."""
    recursive = order(rules)[1]
    result: Rules = {}
    pending = [(root, times)]
    while pending:
        name, left = pending.pop()
        copy = name if left == times else f"{name}-{left}"
        if copy in result:
            continue
        result[copy] = _at_level(rules[name], name, recursive, left, times, pending)
    return result


def _at_level(
    node: Node, user: str, recursive: set[str], left: int, times: int, pending: list[tuple[str, int]]
) -> Node:
    """Return a node with references to copies of recursive rules, without references below the last level."""

    def at_level(one: Node) -> Node:
        if isinstance(one, Ref):
            level = times if one.name not in recursive else left - (user in recursive)
            if level < 1:
                return NOTHING
            pending.append((one.name, level))
            return one if level == times else Ref(f"{one.name}-{level}")
        if isinstance(one, Seq):
            return sequence(map(at_level, one.parts))
        if isinstance(one, Alt):
            return choice(map(at_level, one.options))
        return repeated(at_level(one.part), one.min_count, one.max_count) if isinstance(one, Repeat) else one

    return at_level(node)


def order(rules: Rules) -> tuple[list[str], set[str], int]:
    """Return the names in post-order, the recursive ones, and the depth of the search."""
    below = {name: sorted(references(node) & rules.keys()) for name, node in rules.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    done: list[str] = []
    recursive: set[str] = set()
    deepest = 0
    for start in rules:  # Tarjan's algorithm with an explicit stack
        calls = [] if start in index else [(start, iter(below[start]))]
        while calls:
            name, rest = calls[-1]
            deepest = max(deepest, len(calls))
            if name not in index:
                index[name] = low[name] = len(index)
                stack.append(name)
                on_stack.add(name)
            for other in rest:
                if other not in index:
                    calls.append((other, iter(below[other])))
                    break
                if other in on_stack:
                    low[name] = min(low[name], index[other])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[name])
                if low[name] == index[name]:
                    component = stack[stack.index(name) :] if stack[-1] != name else [name]
                    del stack[len(stack) - len(component) :]
                    on_stack.difference_update(component)
                    done += component
                    if len(component) > 1 or name in below[name]:
                        recursive.update(component)
    return done, recursive, deepest


def _productive(rules: Rules) -> set[str]:
    """Return the rules that match some finite text."""
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for other in references(node):
            users.setdefault(other, []).append(name)
    found: set[str] = set()
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in found and _matches_some(rules[name], found):
            found.add(name)
            pending += users.get(name, [])
    return found


def _matches_some(node: Node, productive: set[str]) -> bool:
    if isinstance(node, Ref):
        return node.name in productive
    if isinstance(node, Alt):
        return any(_matches_some(option, productive) for option in node.options)
    if isinstance(node, Repeat) and node.min_count == 0:
        return True
    return all(_matches_some(part, productive) for part in children(node))


def _only(node: Node, productive: set[str]) -> Node:
    """Return the node without the options that match no finite text."""
    if isinstance(node, Ref):
        return node if node.name in productive else NOTHING
    if isinstance(node, Alt):
        return choice(_only(option, productive) for option in node.options)
    if isinstance(node, Seq):
        return sequence(_only(part, productive) for part in node.parts)
    if isinstance(node, Repeat):
        return repeated(_only(node.part, productive), node.min_count, node.max_count)
    return node


def _without_recursion(name: str, node: Node) -> Node:
    """Replace left or right recursion by a loop: ``x = a x | b`` becomes ``a* b``."""
    if not _has(node, name):
        return node
    for at_end in (True, False):
        found = _linear(node, name, at_end)
        if found is not None:
            again, last = found
            loop = repeated(again, 0, None)
            return sequence([loop, last] if at_end else [last, loop])
    return node


def _has(node: Node, name: str) -> bool:
    return any(isinstance(one, Ref) and one.name == name for one in walk(node))


def _linear(node: Node, name: str, at_end: bool) -> tuple[Node, Node] | None:
    """Return the rest of the recursive options and the other options; None if recursion is elsewhere."""
    if node == Ref(name):
        return EMPTY, NOTHING
    if not _has(node, name):
        return NOTHING, node
    if isinstance(node, Seq):
        rest, side = (node.parts[:-1], node.parts[-1]) if at_end else (node.parts[1:], node.parts[0])
        if any(_has(part, name) for part in rest):
            return None
        found = _linear(side, name, at_end)
        if found is None:
            return None
        again, last = (sequence([*rest, one] if at_end else [one, *rest]) for one in found)
        return again, last
    if isinstance(node, Alt):
        pairs = [_linear(option, name, at_end) for option in node.options]
        if any(pair is None for pair in pairs):
            return None
        return choice(pair[0] for pair in pairs if pair), choice(pair[1] for pair in pairs if pair)
    if isinstance(node, Repeat) and (node.min_count, node.max_count) == (0, 1):
        found = _linear(node.part, name, at_end)
        return None if found is None else (found[0], choice([found[1], EMPTY]))
    return None
