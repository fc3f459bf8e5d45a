"""Text contexts: token indices, ends of the output, lengths, and masks of end tokens."""

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


def make_context(prompt_length: int = 3, max_length: int = 50, **fields: Any) -> TextContext:
    """Return a context with the prompt 1, 2, ..., ``prompt_length``."""
    tokens = np.arange(1, prompt_length + 1)
    return TextContext(prompt="one two three", max_length=max_length, tokens=tokens, **fields)


def outstanding_tokens(context: TextContext) -> list[int]:
    return [token for token, _ in context.outstanding_completion_tokens()]


def test_the_example_in_the_docstring_of_the_class_holds() -> None:
    assert doctest.testmod(context).failed == 0


def test_a_new_context_has_the_initial_state_and_a_unique_id() -> None:
    context = make_context()
    assert context.status is ACTIVE
    assert not context.is_done
    assert context.is_initial_prompt
    assert context.is_ce
    assert context.min_tokens == 0
    assert context.matcher is None
    assert context.outstanding_completion_tokens() == []
    assert len(context.request_id) == 32
    assert context.request_id != make_context().request_id


def test_a_context_is_an_input_context_with_and_without_a_slot() -> None:
    context = make_context()
    assert isinstance(context, InputContext)
    context.assign_to_cache(1)
    assert isinstance(context, InputContext)
    assert not isinstance(object(), InputContext)


# Tokens.


def test_update_makes_the_new_token_active() -> None:
    context = make_context()
    context.update(7)
    assert context.all_tokens.tolist() == [1, 2, 3, 7]
    assert context.next_tokens.tolist() == context.generated_tokens.tolist() == [7]
    assert (context.start_idx, context.active_idx, context.end_idx) == (3, 4, 4)
    assert not context.is_ce
    assert not context.is_initial_prompt


def test_available_steps_shrink_with_the_computed_tokens() -> None:
    context = make_context(10)
    assert context.compute_num_available_steps(20) == 20
    context.update(7)
    assert context.compute_num_available_steps(20) == 10


def test_the_token_array_grows_when_it_is_full() -> None:
    context = make_context(127, 1000)
    context.update(7)
    assert context.tokens.size == 128
    context.update(8)
    assert context.tokens.size == 256
    assert context.all_tokens.tolist() == [*range(1, 128), 7, 8]
    assert not context.tokens[129:].any()


def test_a_long_token_array_grows_by_an_eighth_in_whole_chunks() -> None:
    context = make_context(128 * 24, 9999)
    context.jump_ahead(7)
    assert context.tokens.size == 128 * 27


def test_tokens_sampled_within_a_prompt_are_dropped() -> None:
    context = make_context(10)
    context.set_token_indices(active_idx=4)
    assert context.next_tokens.tolist() == [1, 2, 3, 4]
    assert context.is_ce
    # The token is no output token, because it is sampled after a chunk of the prompt.
    context.update(77)
    assert (context.start_idx, context.active_idx, context.end_idx) == (4, 10, 10)
    assert context.is_initial_prompt
    assert context.all_tokens.tolist() == list(range(1, 11))
    assert outstanding_tokens(context) == []
    context.update(78)
    assert (context.start_idx, context.active_idx, context.end_idx) == (10, 11, 11)
    assert outstanding_tokens(context) == [78]


def test_a_forced_token_is_active_in_the_next_step() -> None:
    context = make_context(3)
    context.jump_ahead(50)
    assert (context.start_idx, context.active_idx, context.is_ce) == (0, 4, True)
    context.update(51)
    assert (context.start_idx, context.active_idx) == (4, 5)
    assert context.next_tokens.tolist() == [51]
    assert outstanding_tokens(context) == [50, 51]


def test_a_forced_token_ends_the_output_only_if_it_is_an_end_token() -> None:
    context = make_context(3, 4, eos_token_ids={9}, eos_sequences=[[5]])
    context.jump_ahead(5)
    assert context.status is ACTIVE
    context.jump_ahead(9)
    assert context.status is END_OF_SEQUENCE
    assert outstanding_tokens(context) == [5]


def test_forcing_a_token_within_a_prompt_is_refused() -> None:
    context = make_context(10)
    context.set_token_indices(active_idx=4)
    with pytest.raises(RuntimeError, match="6 of its 10 tokens are left"):
        context.jump_ahead(5)
    assert context.all_tokens.tolist() == list(range(1, 11))


def test_reset_makes_all_tokens_active_again() -> None:
    context = make_context(3, sampling_params=SamplingParams(min_new_tokens=3), eos_token_ids={9})
    context.assign_to_cache(4)
    context.update(7)
    context.set_token_indices(committed_idx=2)
    assert outstanding_tokens(context) == [7]
    context.reset()
    assert not context.is_assigned_to_cache
    assert (context.start_idx, context.active_idx, context.end_idx, context.committed_idx) == (0, 4, 4, 0)
    assert context.is_initial_prompt
    assert context.next_tokens.tolist() == [1, 2, 3, 7]
    assert context.prompt_tokens.tolist() == [1, 2, 3]
    assert outstanding_tokens(context) == []
    assert [len(rows) for rows in context.get_min_token_logit_mask(3)] == [1, 1, 0]


def test_a_rollback_into_the_prompt_removes_all_generated_tokens() -> None:
    context = make_context(3)
    context.update(7)
    context.rollback(2)
    assert context.all_tokens.tolist() == [1, 2]
    assert context.generated_tokens.tolist() == []
    assert context.prompt_tokens.tolist()[:2] == [1, 2]


def test_tokens_are_not_returned_twice_after_a_rollback() -> None:
    context = make_context(3)
    for token in (7, 8, 9):
        context.update(token)
    assert outstanding_tokens(context) == [7, 8, 9]
    context.rollback(2)
    assert outstanding_tokens(context) == []
    for token in (8, 9, 10):
        context.update(token)
    assert outstanding_tokens(context) == [10]


def test_a_rollback_of_the_ending_token_resumes_generation() -> None:
    context = make_context(3, eos_token_ids={9})
    context.update(7)
    context.update(9)
    context.rollback(1)
    assert context.status is ACTIVE
    context.update(8)
    assert outstanding_tokens(context) == [7, 8]


def test_a_rollback_after_the_ending_token_does_not_resume_generation() -> None:
    context = make_context(3, eos_token_ids={9})
    context.update(9)
    context.update(5)
    context.rollback(1)
    assert context.status is END_OF_SEQUENCE
    assert outstanding_tokens(context) == []


def test_a_rollback_does_not_undo_the_maximum_length() -> None:
    context = make_context(3, 4)
    context.update(7)
    context.rollback(1)
    assert context.status is MAXIMUM_LENGTH


# Ends of the output.


def test_the_end_token_is_stored_but_not_returned() -> None:
    context = make_context(eos_token_ids={9})
    context.update(7)
    context.update(9)
    assert context.status is END_OF_SEQUENCE
    assert context.is_done
    assert context.generated_tokens.tolist() == [7, 9]
    assert outstanding_tokens(context) == [7]


def test_the_token_that_reaches_the_maximum_length_is_returned() -> None:
    context = make_context(3, 5)
    context.update(7)
    assert context.status is ACTIVE
    context.update(8)
    assert context.status is MAXIMUM_LENGTH
    assert outstanding_tokens(context) == [7, 8]


def test_an_end_token_has_precedence_over_the_maximum_length() -> None:
    context = make_context(3, 4, eos_token_ids={9})
    context.update(9)
    assert context.status is END_OF_SEQUENCE
    assert outstanding_tokens(context) == []


def test_an_end_sequence_ends_the_output() -> None:
    context = make_context(eos_sequences=[[8], [5, 6, 7]])
    for token in (6, 7, 5, 6):
        context.update(token)
        assert context.status is ACTIVE
    context.update(7)
    assert context.status is END_OF_SEQUENCE
    assert outstanding_tokens(context) == [6, 7, 5, 6]


def test_an_end_sequence_that_begins_in_the_prompt_has_no_effect() -> None:
    context = make_context(3, eos_sequences=[[3, 7]])
    context.update(7)
    assert context.status is ACTIVE
    context.update(3)
    context.update(7)
    assert context.status is END_OF_SEQUENCE


def test_an_empty_end_sequence_is_ignored() -> None:
    context = make_context(eos_sequences=[[], [4]])
    assert context.eos_sequences == [[4]]
    context.update(7)
    assert context.status is ACTIVE


def test_a_finished_context_returns_no_tokens_until_it_is_active_again() -> None:
    context = make_context(eos_token_ids={9})
    context.update(9)
    context.update(5)
    assert outstanding_tokens(context) == []
    context.update_status(ACTIVE)
    context.update(6)
    assert outstanding_tokens(context) == [6]


def test_outstanding_tokens_are_integers_and_are_returned_once() -> None:
    context = make_context(3, 4)
    context.update(7)
    [(token, log_probabilities)] = context.outstanding_completion_tokens()
    assert type(token) is int
    assert log_probabilities is None
    assert context.status is MAXIMUM_LENGTH
    assert context.outstanding_completion_tokens() == []


def test_the_status_can_be_set() -> None:
    context = make_context()
    context.update_status(TextGenerationStatus.CANCELLED)
    assert context.status is TextGenerationStatus.CANCELLED
    assert context.is_done


# Refused arguments.


def test_a_prompt_as_long_as_the_maximum_is_allowed() -> None:
    assert make_context(5, 5).max_length == 5


def test_a_negative_number_of_log_probabilities_is_refused() -> None:
    with pytest.raises(InputError, match="log_probabilities must be at least 0, was -1"):
        make_context(1, 5, log_probabilities=-1)


@pytest.mark.parametrize(("length", "min_new"), [(6, 0), (4, 2)])
def test_a_prompt_that_leaves_no_room_for_the_minimum_of_new_tokens_is_refused(
    length: int, min_new: int
) -> None:
    message = (
        rf"min_tokens \({min_new}\) \+ prompt_len \({length}\) must be less than or equal to max_length \(5\)"
    )
    with pytest.raises(InputError, match=message):
        make_context(length, 5, sampling_params=SamplingParams(min_new_tokens=min_new))


def test_tokens_must_be_one_dimensional() -> None:
    with pytest.raises(ValueError, match=r"tokens must be one dimensional array: got shape '\(2, 2\)'"):
        TextContext(prompt="", max_length=9, tokens=np.ones((2, 2), int))


# The mask of end tokens.


def test_end_tokens_are_masked_until_the_minimum_length_is_reached() -> None:
    context = make_context(3, eos_token_ids={9, 4}, sampling_params=SamplingParams(min_new_tokens=2))
    masks = context.get_min_token_logit_mask(3)
    assert [mask.tolist() for mask in masks] == [[[0, 4], [0, 9]], [[0, 4], [0, 9]], []]
    assert all(mask.dtype == np.int32 for mask in masks)
    context.update(7)
    assert [mask.shape for mask in context.get_min_token_logit_mask(2)] == [(2, 2), (0, 2)]


@pytest.mark.parametrize("min_new", [0, 2])
def test_the_mask_without_end_tokens_is_empty(min_new: int) -> None:
    context = make_context(sampling_params=SamplingParams(min_new_tokens=min_new))
    assert [mask.shape for mask in context.get_min_token_logit_mask(2)] == [(0, 2), (0, 2)]


def test_end_tokens_are_not_masked_within_a_prompt() -> None:
    context = make_context(9, eos_token_ids={9}, sampling_params=SamplingParams(min_new_tokens=2))
    context.set_token_indices(active_idx=4)
    assert [len(mask) for mask in context.get_min_token_logit_mask(1)] == [0]
