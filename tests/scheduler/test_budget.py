"""Division of a step's token budget: the number of rows (tokens to compute) of each context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.budget import decode_rows, prompt_rows, smallest_chunk


@pytest.mark.parametrize(
    ("num_remaining_tokens", "budget", "num_later_contexts", "rows"),
    [(1, 8, 7, 1), (1, 1, 0, 1), (5, 8, 2, 5), (5, 8, 5, 3)],
)
def test_decode_rows_reserve_one_row_for_each_later_context(
    num_remaining_tokens: int, budget: int, num_later_contexts: int, rows: int
) -> None:
    assert decode_rows(num_remaining_tokens, budget, num_later_contexts) == rows


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 20))
def test_each_decoding_context_gets_a_row(num_remaining_tokens: list[int], num_spare_rows: int) -> None:
    budget = len(num_remaining_tokens) + num_spare_rows
    for index, tokens in enumerate(num_remaining_tokens):
        rows = decode_rows(tokens, budget, len(num_remaining_tokens) - index - 1)
        assert 1 <= rows <= tokens
        budget -= rows
    assert budget >= 0


@pytest.mark.parametrize(
    ("num_remaining_tokens", "budget", "may_cut", "rows"),
    [
        (5, 8, True, 5),
        (8, 8, False, 8),
        (9, 8, True, 8),
        (9, 8, False, 0),
        (9, 4, True, 4),
        (9, 3, True, 0),
        (3, 3, True, 3),  # the rest of a prompt may be shorter than the smallest chunk
    ],
)
def test_prompt_rows_are_the_whole_prompt_or_a_chunk_or_zero(
    num_remaining_tokens: int, budget: int, may_cut: bool, rows: int
) -> None:
    assert prompt_rows(num_remaining_tokens, budget, 4, may_cut=may_cut) == rows


def test_the_smallest_chunk_fits_into_the_budget_with_a_full_batch() -> None:
    assert smallest_chunk(64, 8192, 32) == 64
    assert smallest_chunk(64, 64, 32) == 33
    assert smallest_chunk(64, 8, 8) == 1
