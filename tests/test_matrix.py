"""The marker `matrix`: the default run contains each value, or each pair of values, of the parameters."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from support.matrix import cover

SETS = [
    tuple(zip(("isa", "dtype", "shape", "bias"), map(str, values), strict=True))
    for values in product(range(4), range(2), range(5), range(2))
]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_each_combination_occurs(strength: int, times: int) -> None:
    kept = [SETS[number] for number in cover(SETS, strength=strength, times=times)]
    assert len(kept) < len(SETS) or strength * times == 6
    for combination in {part for one in SETS for part in combinations(one, strength)}:
        assert sum(set(combination) <= set(one) for one in kept) >= times


def test_the_subset_is_small() -> None:
    assert len(cover(SETS, strength=1)) == 5
    assert len(cover(SETS)) <= 25


def test_all_sets_of_few_parameters_are_kept() -> None:
    pairs = [(("isa", str(isa)), ("dtype", str(dtype))) for isa in range(3) for dtype in range(2)]
    assert cover(pairs) == set(range(6))
    assert cover(pairs[:1], strength=3, times=4) == {0}
