"""Text contexts after each token: windows, ends, lengths, masks."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.pipelines.core import (
    InputContext,
    SamplingParams,
    TextContext,
    TextGenerationStatus,
    context,
)

ACTIVE = TextGenerationStatus.ACTIVE
END_OF_SEQUENCE = TextGenerationStatus.END_OF_SEQUENCE
MAXIMUM_LENGTH = TextGenerationStatus.MAXIMUM_LENGTH


def context_of(prompt: int = 3, max_length: int = 50, **fields: Any) -> TextContext:
    """A context with the prompt 1, 2, ..., ``prompt``."""
    tokens = np.arange(1, prompt + 1)
    return TextContext(prompt="one two three", max_length=max_length, tokens=tokens, **fields)


def outstanding(made: TextContext) -> list[int]:
    return [token for token, _ in made.outstanding_completion_tokens()]


def test_the_example_in_the_documentation_holds() -> None:
    assert doctest.testmod(context).failed == 0


def test_a_fresh_context() -> None:
    made = context_of()
    assert made.status is ACTIVE
    assert not made.is_done
    assert made.is_initial_prompt
    assert made.is_ce
    assert made.min_tokens == 0
    assert made.matcher is None
    assert made.outstanding_completion_tokens() == []
    assert len(made.request_id) == 32
    assert made.request_id != context_of().request_id


def test_a_context_is_an_input_context_with_and_without_a_slot() -> None:
    made = context_of()
    assert isinstance(made, InputContext)
    made.assign_to_cache(1)
    assert isinstance(made, InputContext)
    assert not isinstance(object(), InputContext)


# Tokens.


def test_an_update_makes_the_new_token_the_next() -> None:
    made = context_of()
    made.update(7)
    assert made.all_tokens.tolist() == [1, 2, 3, 7]
    assert made.next_tokens.tolist() == made.generated_tokens.tolist() == [7]
    assert (made.start_idx, made.active_idx, made.end_idx) == (3, 4, 4)
    assert not made.is_ce
    assert not made.is_initial_prompt


def test_available_steps_shrink_by_what_is_computed() -> None:
    made = context_of(10)
    assert made.compute_num_available_steps(20) == 20
    made.update(7)
    assert made.compute_num_available_steps(20) == 10


def test_the_array_grows_when_it_is_full() -> None:
    made = context_of(127, 1000)
    made.update(7)
    assert made.tokens.size == 128
    made.update(8)
    assert made.tokens.size == 256
    assert made.all_tokens.tolist() == [*range(1, 128), 7, 8]
    assert not made.tokens[129:].any()


def test_a_long_array_grows_by_an_eighth_in_whole_chunks() -> None:
    made = context_of(128 * 24, 9999)
    made.jump_ahead(7)
    assert made.tokens.size == 128 * 27


def test_a_prompt_in_chunks() -> None:
    made = context_of(10)
    made.set_token_indices(active_idx=4)
    assert made.next_tokens.tolist() == [1, 2, 3, 4]
    assert made.is_ce
    made.update(77)  # sampled after a chunk of the prompt: not a token of the output
    assert (made.start_idx, made.active_idx, made.end_idx) == (4, 10, 10)
    assert made.is_initial_prompt
    assert made.all_tokens.tolist() == list(range(1, 11))
    assert outstanding(made) == []
    made.update(78)
    assert (made.start_idx, made.active_idx, made.end_idx) == (10, 11, 11)
    assert outstanding(made) == [78]


def test_a_forced_token_is_computed_with_the_next_one() -> None:
    made = context_of(3)
    made.jump_ahead(50)
    assert (made.start_idx, made.active_idx, made.is_ce) == (0, 4, True)
    made.update(51)
    assert (made.start_idx, made.active_idx) == (4, 5)
    assert made.next_tokens.tolist() == [51]
    assert outstanding(made) == [50, 51]


def test_a_forced_token_ends_the_output_by_its_id_alone() -> None:
    made = context_of(3, 4, eos_token_ids={9}, eos_sequences=[[5]])
    made.jump_ahead(5)
    assert made.status is ACTIVE
    made.jump_ahead(9)
    assert made.status is END_OF_SEQUENCE
    assert outstanding(made) == [5]


def test_no_token_is_forced_in_the_middle_of_a_prompt() -> None:
    made = context_of(10)
    made.set_token_indices(active_idx=4)
    with pytest.raises(RuntimeError, match="6 of its 10 tokens are left"):
        made.jump_ahead(5)
    assert made.all_tokens.tolist() == list(range(1, 11))


def test_a_reset_computes_everything_anew() -> None:
    made = context_of(3, sampling_params=SamplingParams(min_new_tokens=3), eos_token_ids={9})
    made.assign_to_cache(4)
    made.update(7)
    made.set_token_indices(committed_idx=2)
    assert outstanding(made) == [7]
    made.reset()
    assert not made.is_assigned_to_cache
    assert (made.start_idx, made.active_idx, made.end_idx, made.committed_idx) == (0, 4, 4, 0)
    assert made.is_initial_prompt
    assert made.next_tokens.tolist() == [1, 2, 3, 7]
    assert made.prompt_tokens.tolist() == [1, 2, 3]
    assert outstanding(made) == []
    assert [len(rows) for rows in made.get_min_token_logit_mask(3)] == [1, 1, 0]


def test_a_rollback_into_the_prompt_leaves_nothing_generated() -> None:
    made = context_of(3)
    made.update(7)
    made.rollback(2)
    assert made.all_tokens.tolist() == [1, 2]
    assert made.generated_tokens.tolist() == []
    assert made.prompt_tokens.tolist()[:2] == [1, 2]


def test_tokens_are_not_returned_twice_after_a_rollback() -> None:
    made = context_of(3)
    for token in (7, 8, 9):
        made.update(token)
    assert outstanding(made) == [7, 8, 9]
    made.rollback(2)
    assert outstanding(made) == []
    for token in (8, 9, 10):
        made.update(token)
    assert outstanding(made) == [10]


def test_a_rollback_of_the_ending_token_resumes_generation() -> None:
    made = context_of(3, eos_token_ids={9})
    made.update(7)
    made.update(9)
    made.rollback(1)
    assert made.status is ACTIVE
    made.update(8)
    assert outstanding(made) == [7, 8]


def test_a_rollback_behind_the_ending_token_does_not() -> None:
    made = context_of(3, eos_token_ids={9})
    made.update(9)
    made.update(5)
    made.rollback(1)
    assert made.status is END_OF_SEQUENCE
    assert outstanding(made) == []


def test_a_rollback_does_not_undo_the_maximum_length() -> None:
    made = context_of(3, 4)
    made.update(7)
    made.rollback(1)
    assert made.status is MAXIMUM_LENGTH


# Ends.


def test_the_end_token_is_stored_and_not_handed_out() -> None:
    made = context_of(eos_token_ids={9})
    made.update(7)
    made.update(9)
    assert made.status is END_OF_SEQUENCE
    assert made.is_done
    assert made.generated_tokens.tolist() == [7, 9]
    assert outstanding(made) == [7]


def test_the_token_that_reaches_the_maximum_length_is_handed_out() -> None:
    made = context_of(3, 5)
    made.update(7)
    assert made.status is ACTIVE
    made.update(8)
    assert made.status is MAXIMUM_LENGTH
    assert outstanding(made) == [7, 8]


def test_an_end_outranks_the_maximum_length() -> None:
    made = context_of(3, 4, eos_token_ids={9})
    made.update(9)
    assert made.status is END_OF_SEQUENCE
    assert outstanding(made) == []


def test_a_sequence_ends_the_output() -> None:
    made = context_of(eos_sequences=[[8], [5, 6, 7]])
    for token in (6, 7, 5, 6):
        made.update(token)
        assert made.status is ACTIVE
    made.update(7)
    assert made.status is END_OF_SEQUENCE
    assert outstanding(made) == [6, 7, 5, 6]


def test_a_sequence_that_begins_in_the_prompt_ends_nothing() -> None:
    made = context_of(3, eos_sequences=[[3, 7]])
    made.update(7)
    assert made.status is ACTIVE
    made.update(3)
    made.update(7)
    assert made.status is END_OF_SEQUENCE


def test_an_empty_sequence_is_dropped() -> None:
    made = context_of(eos_sequences=[[], [4]])
    assert made.eos_sequences == [[4]]
    made.update(7)
    assert made.status is ACTIVE


def test_a_finished_context_returns_no_tokens() -> None:
    made = context_of(eos_token_ids={9})
    made.update(9)
    made.update(5)
    assert outstanding(made) == []
    made.update_status(ACTIVE)
    made.update(6)
    assert outstanding(made) == [6]


def test_outstanding_tokens_are_integers_and_are_returned_once() -> None:
    made = context_of(3, 4)
    made.update(7)
    [(token, log_probabilities)] = made.outstanding_completion_tokens()
    assert type(token) is int
    assert log_probabilities is None
    assert made.status is MAXIMUM_LENGTH
    assert made.outstanding_completion_tokens() == []


def test_the_status_can_be_set() -> None:
    made = context_of()
    made.update_status(TextGenerationStatus.CANCELLED)
    assert made.status is TextGenerationStatus.CANCELLED
    assert made.is_done


# What is refused.


def test_a_prompt_as_long_as_the_maximum_is_allowed() -> None:
    assert context_of(5, 5).max_length == 5


def test_a_negative_number_of_log_probabilities_is_refused() -> None:
    with pytest.raises(InputError, match="log_probabilities must be at least 0, was -1"):
        context_of(1, 5, log_probabilities=-1)


@pytest.mark.parametrize(("length", "min_new"), [(6, 0), (4, 2)])
def test_a_prompt_without_room_is_refused(length: int, min_new: int) -> None:
    message = (
        rf"min_tokens \({min_new}\) \+ prompt_len \({length}\) must be less than or equal to max_length \(5\)"
    )
    with pytest.raises(InputError, match=message):
        context_of(length, 5, sampling_params=SamplingParams(min_new_tokens=min_new))


def test_tokens_must_be_one_dimensional() -> None:
    with pytest.raises(ValueError, match=r"tokens must be one dimensional array: got shape '\(2, 2\)'"):
        TextContext(prompt="", max_length=9, tokens=np.ones((2, 2), int))


# The mask of end tokens.


def test_end_tokens_are_masked_until_the_minimum_is_reached() -> None:
    made = context_of(3, eos_token_ids={9, 4}, sampling_params=SamplingParams(min_new_tokens=2))
    masks = made.get_min_token_logit_mask(3)
    assert [mask.tolist() for mask in masks] == [[[0, 4], [0, 9]], [[0, 4], [0, 9]], []]
    assert all(mask.dtype == np.int32 for mask in masks)
    made.update(7)
    assert [mask.shape for mask in made.get_min_token_logit_mask(2)] == [(2, 2), (0, 2)]


@pytest.mark.parametrize("min_new", [0, 2])
def test_without_end_tokens_the_mask_is_empty_in_the_same_shape(min_new: int) -> None:
    made = context_of(sampling_params=SamplingParams(min_new_tokens=min_new))
    assert [mask.shape for mask in made.get_min_token_logit_mask(2)] == [(0, 2), (0, 2)]


def test_the_middle_of_a_prompt_is_not_masked() -> None:
    made = context_of(9, eos_token_ids={9}, sampling_params=SamplingParams(min_new_tokens=2))
    made.set_token_indices(active_idx=4)
    assert [len(mask) for mask in made.get_min_token_logit_mask(1)] == [0]
