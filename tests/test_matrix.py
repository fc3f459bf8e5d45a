"""The marker `matrix`: its subset is small and has each combination of values of `strength` parameters."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from support.matrix import covering_subset

PARAMETER_SETS = [
    tuple(zip(("isa", "dtype", "shape", "bias"), map(str, values), strict=True))
    for values in product(range(4), range(2), range(5), range(2))
]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_each_combination_occurs(strength: int, times: int) -> None:
    subset = [
        PARAMETER_SETS[index] for index in covering_subset(PARAMETER_SETS, strength=strength, times=times)
    ]
    assert len(subset) < len(PARAMETER_SETS) or strength * times == 6
    for combination in {
        values_subset for values in PARAMETER_SETS for values_subset in combinations(values, strength)
    }:
        assert sum(set(combination) <= set(values) for values in subset) >= times


def test_the_subset_is_small() -> None:
    assert len(covering_subset(PARAMETER_SETS, strength=1)) == 5
    assert len(covering_subset(PARAMETER_SETS)) <= 25


def test_the_subset_has_every_set_if_each_set_has_a_unique_combination() -> None:
    parameter_sets = [(("isa", str(isa)), ("dtype", str(dtype))) for isa in range(3) for dtype in range(2)]
    assert covering_subset(parameter_sets) == set(range(6))
    assert covering_subset(parameter_sets[:1], strength=3, times=4) == {0}
