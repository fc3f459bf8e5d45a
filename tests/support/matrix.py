"""The marker `matrix`: the default run takes a covering subset of a test's parameter sets.

In the subset of `matrix(strength=2)`, each pair of values of two parameters occurs (pairwise testing). In the
subset of `strength=1`, each value occurs. `times` is the minimum number of occurrences. Parameter sets
outside the subset are marked `slow`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations

import pytest

Parameters = tuple[tuple[str, str], ...]  # (name, repr of the value) of each parameter


def items_outside_subset(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with the marker `matrix` that are not in the covering subsets."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and item.get_closest_marker("matrix")
        ):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    items_outside: list[pytest.Item] = []
    for group in functions.values():
        marker = group[0].get_closest_marker("matrix")
        assert marker is not None
        sets = [tuple((name, repr(value)) for name, value in item.callspec.params.items()) for item in group]
        subset_indices = covering_subset(sets, **marker.kwargs)
        items_outside += [item for number, item in enumerate(group) if number not in subset_indices]
    return items_outside


def covering_subset(sets: Sequence[Parameters], *, strength: int = 2, times: int = 1) -> set[int]:
    """Return the indices of parameter sets in which each combination of values occurs at least `times` times.

    The choice is greedy and deterministic: the next set is the first one with the most missing combinations.

    Args:
        sets: the parameter sets.
        strength: the number of parameters of a combination.
        times: minimum number of occurrences of a combination, or all of them if `sets` has fewer.
    """
    contents = [frozenset(combinations(parameters, min(strength, len(parameters)))) for parameters in sets]
    available = Counter(combination for content in contents for combination in content)
    missing_counts = {combination: min(times, count) for combination, count in available.items()}
    # The number of missing combinations in a set never grows, so an old number is an upper bound of the
    # present number. Therefore only the set with the largest bound is counted again.
    bounds = [(-len(content), set_index) for set_index, content in enumerate(contents)]
    heapify(bounds)
    subset_indices: set[int] = set()
    while missing_counts:
        bound, set_index = bounds[0]
        num_missing = sum(combination in missing_counts for combination in contents[set_index])
        if num_missing < -bound:
            heapreplace(bounds, (-num_missing, set_index))
            continue
        heappop(bounds)
        subset_indices.add(set_index)
        for combination in contents[set_index] & missing_counts.keys():
            missing_counts[combination] -= 1
            if not missing_counts[combination]:
                del missing_counts[combination]
    return subset_indices
