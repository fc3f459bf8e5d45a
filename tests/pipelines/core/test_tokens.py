"""The token buffer: examples of each index and each refused value. See also test_index_machine.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.pipelines.core import TokenBuffer


def make_buffer(*tokens: int, **fields: Any) -> TokenBuffer:
    return TokenBuffer(tokens=np.array(tokens), **fields)


def test_a_new_prompt_must_be_computed_completely() -> None:
    buffer = make_buffer(1, 2, 3)
    assert (buffer.start_idx, buffer.active_idx, buffer.end_idx, buffer.committed_idx) == (0, 3, 3, 0)
    assert (buffer.active_length, buffer.current_length) == (3, 3)
    assert buffer.next_tokens.tolist() == buffer.all_tokens.tolist() == buffer.prompt_tokens.tolist()
    assert buffer.generated_tokens.tolist() == []


@pytest.mark.parametrize(("length", "capacity"), [(1, 128), (127, 128), (128, 128), (129, 256), (300, 384)])
def test_the_capacity_is_a_multiple_of_the_chunk_size(length: int, capacity: int) -> None:
    assert TokenBuffer(tokens=np.arange(length)).tokens.size == capacity


def test_unused_capacity_is_zero() -> None:
    buffer = make_buffer(1, 2, 3)
    assert buffer.tokens[:3].tolist() == [1, 2, 3]
    assert not buffer.tokens[3:].any()


@pytest.mark.parametrize("length", [3, 128])
def test_the_array_is_copied(length: int) -> None:
    prompt = np.arange(length)
    buffer = TokenBuffer(tokens=prompt)
    prompt[0] = 99
    assert buffer.all_tokens[0] == 0
    buffer.tokens[1] = 77
    assert prompt[1] == 1


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_the_dtype_is_kept(dtype: type) -> None:
    assert TokenBuffer(tokens=np.ones(3, dtype)).tokens.dtype == dtype


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.ones((2, 2), int), r"tokens must be one dimensional array: got shape '\(2, 2\)'"),
        (np.array(5), r"tokens must be one dimensional array: got shape '\(\)'"),
        (np.zeros(0, int), "at least one token"),
        (np.ones(3), "must be integers: got dtype float64"),
        (np.ones(3, bool), "must be integers: got dtype bool"),
    ],
)
def test_invalid_prompts_are_refused(tokens: np.ndarray[Any, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TokenBuffer(tokens=tokens)


def test_setting_indices_does_not_change_the_tokens() -> None:
    buffer = make_buffer(1, 2, 3, 4, 5)
    buffer.set_token_indices(start_idx=1, active_idx=3, committed_idx=1)
    assert buffer.next_tokens.tolist() == [2, 3]
    assert buffer.all_tokens.tolist() == [1, 2, 3, 4, 5]
    buffer.set_token_indices(end_idx=4)
    assert buffer.all_tokens.tolist() == [1, 2, 3, 4]
    buffer.set_token_indices(end_idx=5)
    assert buffer.all_tokens.tolist() == [1, 2, 3, 4, 5]


def test_indices_are_moved_by_differences() -> None:
    buffer = make_buffer(1, 2, 3, 4, 5)
    buffer.bump_token_indices(start_idx=2, active_idx=-1, end_idx=-1, committed_idx=1)
    assert (buffer.start_idx, buffer.active_idx, buffer.end_idx, buffer.committed_idx) == (2, 4, 4, 1)
    buffer.bump_token_indices()
    assert (buffer.start_idx, buffer.active_idx, buffer.end_idx, buffer.committed_idx) == (2, 4, 4, 1)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ({"start_idx": 5}, "active_idx must always be greater than start_idx"),
        ({"active_idx": 0}, "active_idx must always be greater than start_idx"),
        ({"active_idx": 6}, "end_idx must always be greater than active_idx"),
        ({"end_idx": 4}, "end_idx must always be greater than active_idx"),
        ({"start_idx": -5}, r"start_idx \(-5\) .* must be at least 0"),
        ({"committed_idx": -1}, r"committed_idx \(-1\) must be at least 0"),
        ({"end_idx": 129}, r"end_idx \(129\) must not exceed the size of the token array \(128\)"),
    ],
)
def test_invalid_indices_are_refused_and_no_index_changes(indices: dict[str, int], message: str) -> None:
    buffer = make_buffer(1, 2, 3, 4, 5)
    valid_indices = {"start_idx": 1, "active_idx": 5, "end_idx": 5, "committed_idx": 1}
    with pytest.raises(ValueError, match=message):
        buffer.set_token_indices(**{**valid_indices, **indices})
    with pytest.raises(ValueError, match=message):
        buffer.bump_token_indices(**{name: value - getattr(buffer, name) for name, value in indices.items()})
    assert buffer == make_buffer(1, 2, 3, 4, 5)


def test_available_steps_are_counted_from_the_computed_tokens() -> None:
    buffer = TokenBuffer(tokens=np.arange(10))
    assert buffer.compute_num_available_steps(20) == 20
    buffer.set_token_indices(start_idx=9)
    assert buffer.compute_num_available_steps(20) == 11
    assert buffer.compute_num_available_steps(5) == -4


def test_a_rollback_removes_the_last_tokens() -> None:
    buffer = make_buffer(1, 2, 3, 4, 5)
    buffer.set_token_indices(start_idx=4, committed_idx=4)
    buffer.rollback(2)
    assert buffer.all_tokens.tolist() == [1, 2, 3]
    assert buffer.next_tokens.tolist() == [3]
    assert buffer.committed_idx == 2
    assert not buffer.tokens[3:].any()


def test_a_rollback_of_uncomputed_tokens_keeps_start_idx() -> None:
    buffer = make_buffer(1, 2, 3, 4, 5)
    buffer.set_token_indices(start_idx=1)
    buffer.rollback(2)
    assert buffer.next_tokens.tolist() == [2, 3]


def test_a_rollback_in_the_middle_of_a_prompt_drops_the_rest_of_it() -> None:
    buffer = make_buffer(1, 2, 3, 4, 5)
    buffer.set_token_indices(active_idx=3)
    buffer.rollback(1)
    assert buffer.all_tokens.tolist() == [1, 2]
    assert not buffer.tokens[2:].any()


def test_a_rollback_of_zero_tokens_changes_nothing() -> None:
    buffer = make_buffer(1, 2, 3, 4, 5)
    buffer.set_token_indices(active_idx=3)
    buffer.rollback(0)
    assert buffer.all_tokens.tolist() == [1, 2, 3, 4, 5]
    assert buffer.next_tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(("count", "message"), [(5, "before the start of the array"), (-1, "at least 0")])
def test_an_invalid_rollback_is_refused_and_removes_no_tokens(count: int, message: str) -> None:
    buffer = make_buffer(1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match=message):
        buffer.rollback(count)
    assert buffer == make_buffer(1, 2, 3, 4, 5)


def test_buffers_are_equal_by_value_and_unhashable() -> None:
    assert make_buffer(1, 2) == make_buffer(1, 2)
    assert make_buffer(1, 2) != make_buffer(1, 3)
    assert make_buffer(1, 2) != make_buffer(1, 2, 0)
    assert make_buffer(1, 2) != make_buffer(1, 2, _committed_idx=1)
    assert make_buffer(1, 2) != [1, 2]
    with pytest.raises(TypeError, match="unhashable"):
        hash(make_buffer(1))
