"""Simplifies rules: removes unused rules, replaces recursion by loops, and unrolls the remaining recursion.

Only `unrolled` changes the language of the rules, because it limits the levels of recursion.
"""

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

    In the result, loops replace rules with direct left or right recursion, and repetitions replace chains of
    rules that each add the same part.

    Raises:
        InputError: ``root`` matches no finite text.
    """
    productive_rules = _productive_rules(rules)
    if root not in productive_rules:
        raise InputError("the grammar allows no output: it matches no finite text")
    rules_without_recursion = {
        name: _without_recursion(name, _without_unproductive(rules[name], productive_rules))
        for name in productive_rules
    }
    return _reachable_rules(_with_repetitions(_reachable_rules(rules_without_recursion, root)), root)


def _reachable_rules(rules: Rules, root: str) -> Rules:
    result: Rules = {}
    pending = [root]
    while pending:
        name = pending.pop()
        if name not in result:
            result[name] = rules[name]
            pending += references(result[name])
    return result


def _with_repetitions(rules: Rules) -> Rules:
    """Replace chains of rules by repetitions if each rule of the chain adds the same part.

    For example, ``a = x b`` and ``b = (x | "") end`` become ``a = x{1,2} end``.
    """
    # rule -> (part, minimum, maximum, following node)
    counted_rules: dict[str, tuple[Node, int, int, Node]] = {}
    result = dict(rules)
    for name in post_order(rules)[0]:
        repetition = _extract_counted(rules[name], counted_rules)
        if repetition is not None:
            counted_rules[name] = part, min_count, max_count, end = repetition
            result[name] = sequence([repeated(part, min_count, max_count), end])
    return result


def _extract_counted(
    node: Node, counted_rules: dict[str, tuple[Node, int, int, Node]]
) -> tuple[Node, int, int, Node] | None:
    """Return (part, minimum, maximum, following node) of a node ``part{minimum,maximum} following``.

    Returns None if the node has another form. The last part of the node may be a reference to a rule of
    `counted_rules`.
    """
    if isinstance(node, Seq) and len(node.parts) == 2 and isinstance(node.parts[0], Alt):
        head, end = node.parts
        assert isinstance(head, Alt)
        if EMPTY in head.options:
            return choice(option for option in head.options if option != EMPTY), 0, 1, end
    options = node.options if isinstance(node, Alt) else (node,)
    sequences = [option for option in options if isinstance(option, Seq) and len(option.parts) > 1]
    counted_options = [
        option
        for option in sequences
        if isinstance(ref := option.parts[-1], Ref) and ref.name in counted_rules
    ]
    other_options = [option for option in options if option not in counted_options]
    if len(counted_options) != 1 or len(other_options) > 1:
        return None
    *parts, ref = counted_options[0].parts
    assert isinstance(ref, Ref)
    part, min_count, max_count, end = counted_rules[ref.name]
    if sequence(parts) != part or (other_options and (other_options[0] != end or min_count > 0)):
        return None
    return part, 0 if other_options else min_count + 1, max_count + 1, end


def unrolled(rules: Rules, root: str, max_level: int) -> Rules:
    """Return rules without recursion, for texts with at most ``max_level`` levels of recursion."""
    recursive_rules = post_order(rules)[1]
    result: Rules = {}
    pending = [(root, max_level)]
    while pending:
        name, level = pending.pop()
        copy_name = name if level == max_level else f"{name}-{level}"
        if copy_name in result:
            continue
        result[copy_name] = _with_rule_copies(rules[name], name, recursive_rules, level, max_level, pending)
    return result


def _with_rule_copies(
    node: Node,
    rule_name: str,
    recursive_rules: set[str],
    level: int,
    max_level: int,
    pending: list[tuple[str, int]],
) -> Node:
    """Return a node with references to copies of recursive rules, one copy per level of recursion.

    At the last level, recursive references become `NOTHING`.
    """

    def with_copied_rules(child: Node) -> Node:
        if isinstance(child, Ref):
            child_level = (
                max_level if child.name not in recursive_rules else level - (rule_name in recursive_rules)
            )
            if child_level < 1:
                return NOTHING
            pending.append((child.name, child_level))
            return child if child_level == max_level else Ref(f"{child.name}-{child_level}")
        if isinstance(child, Seq):
            return sequence(map(with_copied_rules, child.parts))
        if isinstance(child, Alt):
            return choice(map(with_copied_rules, child.options))
        return (
            repeated(with_copied_rules(child.part), child.min_count, child.max_count)
            if isinstance(child, Repeat)
            else child
        )

    return with_copied_rules(node)


def post_order(rules: Rules) -> tuple[list[str], set[str], int]:
    """Return (names in post-order, names of recursive rules, depth of the search).

    The depth is the length of the longest chain of references that the depth-first search followed.
    """
    callees = {name: sorted(references(node) & rules.keys()) for name, node in rules.items()}
    visit_index: dict[str, int] = {}
    lowlink: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    finished: list[str] = []
    recursive_rules: set[str] = set()
    max_depth = 0
    for start in rules:  # Tarjan's algorithm with an explicit stack
        call_stack = [] if start in visit_index else [(start, iter(callees[start]))]
        while call_stack:
            name, unvisited_callees = call_stack[-1]
            max_depth = max(max_depth, len(call_stack))
            if name not in visit_index:
                visit_index[name] = lowlink[name] = len(visit_index)
                stack.append(name)
                on_stack.add(name)
            for callee in unvisited_callees:
                if callee not in visit_index:
                    call_stack.append((callee, iter(callees[callee])))
                    break
                if callee in on_stack:
                    lowlink[name] = min(lowlink[name], visit_index[callee])
            else:
                call_stack.pop()
                if call_stack:
                    lowlink[call_stack[-1][0]] = min(lowlink[call_stack[-1][0]], lowlink[name])
                if lowlink[name] == visit_index[name]:
                    component = stack[stack.index(name) :] if stack[-1] != name else [name]
                    del stack[len(stack) - len(component) :]
                    on_stack.difference_update(component)
                    finished += component
                    if len(component) > 1 or name in callees[name]:
                        recursive_rules.update(component)
    return finished, recursive_rules, max_depth


def _productive_rules(rules: Rules) -> set[str]:
    """Return the names of the rules that match some finite text."""
    rules_by_reference: dict[str, list[str]] = {}
    for name, node in rules.items():
        for reference in references(node):
            rules_by_reference.setdefault(reference, []).append(name)
    productive_rules: set[str] = set()
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in productive_rules and _matches_some(rules[name], productive_rules):
            productive_rules.add(name)
            pending += rules_by_reference.get(name, [])
    return productive_rules


def _matches_some(node: Node, productive_rules: set[str]) -> bool:
    if isinstance(node, Ref):
        return node.name in productive_rules
    if isinstance(node, Alt):
        return any(_matches_some(option, productive_rules) for option in node.options)
    if isinstance(node, Repeat) and node.min_count == 0:
        return True
    return all(_matches_some(part, productive_rules) for part in children(node))


def _without_unproductive(node: Node, productive_rules: set[str]) -> Node:
    """Return the node without options that match no finite text."""
    if isinstance(node, Ref):
        return node if node.name in productive_rules else NOTHING
    if isinstance(node, Alt):
        return choice(_without_unproductive(option, productive_rules) for option in node.options)
    if isinstance(node, Seq):
        return sequence(_without_unproductive(part, productive_rules) for part in node.parts)
    if isinstance(node, Repeat):
        return repeated(_without_unproductive(node.part, productive_rules), node.min_count, node.max_count)
    return node


def _without_recursion(name: str, node: Node) -> Node:
    """Replace left or right recursion by a loop: ``x = a x | b`` becomes ``a* b``.

    Returns the node unchanged if the rule has no recursion, or recursion at another place.
    """
    if not _refers_to(node, name):
        return node
    for at_end in (True, False):
        split = _split_recursion(node, name, at_end)
        if split is not None:
            repeated_part, last = split
            loop = repeated(repeated_part, 0, None)
            return sequence([loop, last] if at_end else [last, loop])
    return node


def _refers_to(node: Node, name: str) -> bool:
    return any(isinstance(child, Ref) and child.name == name for child in walk(node))


def _split_recursion(node: Node, name: str, at_end: bool) -> tuple[Node, Node] | None:
    """Return (a, b) for a node with recursion at one end: ``a name | b`` (if `at_end`) or ``name a | b``.

    Returns None if the node refers to `name` at any other place.
    """
    if node == Ref(name):
        return EMPTY, NOTHING
    if not _refers_to(node, name):
        return NOTHING, node
    if isinstance(node, Seq):
        other_parts, end_part = (
            (node.parts[:-1], node.parts[-1]) if at_end else (node.parts[1:], node.parts[0])
        )
        if any(_refers_to(part, name) for part in other_parts):
            return None
        split = _split_recursion(end_part, name, at_end)
        if split is None:
            return None
        repeated_part, last = (
            sequence([*other_parts, child] if at_end else [child, *other_parts]) for child in split
        )
        return repeated_part, last
    if isinstance(node, Alt):
        pairs = [_split_recursion(option, name, at_end) for option in node.options]
        if any(pair is None for pair in pairs):
            return None
        return choice(pair[0] for pair in pairs if pair), choice(pair[1] for pair in pairs if pair)
    if isinstance(node, Repeat) and (node.min_count, node.max_count) == (0, 1):
        split = _split_recursion(node.part, name, at_end)
        return None if split is None else (split[0], choice([split[1], EMPTY]))
    return None
