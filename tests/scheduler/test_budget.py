"""Token budget: the number of rows that contexts get in a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.budget import decode_rows, prompt_rows, smallest_chunk


@pytest.mark.parametrize(
    ("remaining", "budget", "num_later", "rows"), [(1, 8, 7, 1), (1, 1, 0, 1), (5, 8, 2, 5), (5, 8, 5, 3)]
)
def test_decode_rows_leave_one_row_for_each_later_context(
    remaining: int, budget: int, num_later: int, rows: int
) -> None:
    assert decode_rows(remaining, budget, num_later) == rows


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 20))
def test_each_generating_context_gets_a_row(remaining: list[int], num_spare_rows: int) -> None:
    budget = len(remaining) + num_spare_rows
    for index, tokens in enumerate(remaining):
        rows = decode_rows(tokens, budget, len(remaining) - index - 1)
        assert 1 <= rows <= tokens
        budget -= rows
    assert budget >= 0


@pytest.mark.parametrize(
    ("remaining", "budget", "may_cut", "rows"),
    [
        (5, 8, True, 5),
        (8, 8, False, 8),
        (9, 8, True, 8),
        (9, 8, False, 0),
        (9, 4, True, 4),
        (9, 3, True, 0),
        (3, 3, True, 3),  # a whole prompt may be shorter than the smallest chunk
    ],
)
def test_prompt_rows_are_the_whole_prompt_a_chunk_or_none(
    remaining: int, budget: int, may_cut: bool, rows: int
) -> None:
    assert prompt_rows(remaining, budget, 4, may_cut=may_cut) == rows


def test_the_smallest_chunk_fits_next_to_a_full_batch() -> None:
    assert smallest_chunk(64, 8192, 32) == 64
    assert smallest_chunk(64, 64, 32) == 33
    assert smallest_chunk(64, 8, 8) == 1
