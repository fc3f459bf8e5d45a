"""Text contexts: slots, matchers, grammars, images, equality, and copies of the arguments."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.pipelines.core import (
    Grammar,
    TextAndVisionContext,
    TextContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)


def make_context(prompt_length: int = 3, max_length: int = 50, **fields: Any) -> TextContext:
    """Return a context with the prompt 1, 2, ..., ``prompt_length``."""
    tokens = np.arange(1, prompt_length + 1)
    return TextContext(prompt="one two three", max_length=max_length, tokens=tokens, **fields)


# Slots.


def test_a_slot_is_assigned_once_and_can_be_unassigned_repeatedly() -> None:
    context = make_context()
    with pytest.raises(ValueError, match="TextContext is not currently assigned to cache slot"):
        context.cache_seq_id  # noqa: B018
    assert not context.is_assigned_to_cache
    context.assign_to_cache(7)
    assert (context.cache_seq_id, context.is_assigned_to_cache) == (7, True)
    with pytest.raises(RuntimeError, match="Context is already assigned to a cache slot"):
        context.assign_to_cache(8)
    assert context.cache_seq_id == 7
    context.unassign_from_cache()
    context.unassign_from_cache()
    assert not context.is_assigned_to_cache


def test_the_draft_offset_is_kept() -> None:
    context = make_context()
    context.set_draft_offset(3)
    assert context.draft_offset == 3


# Matchers and grammars.


class Matcher:
    """A matcher that accepts even tokens."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def accept_token(self, token: int) -> bool:
        self.received.append(token)
        return token % 2 == 0


def test_each_output_token_advances_the_matcher() -> None:
    matcher = Matcher()
    context = make_context(5)
    context.set_matcher(matcher)  # type: ignore[arg-type]
    assert id(context.matcher) == id(matcher)
    context.set_token_indices(active_idx=2)
    context.update(77)  # a chunk of the prompt
    context.update(4)
    context.jump_ahead(6)
    assert matcher.received == [4, 6]


@pytest.mark.parametrize("append_token", [TextContext.update, TextContext.jump_ahead])
def test_a_token_that_the_matcher_rejects_is_not_appended(append_token: Any) -> None:
    context = make_context()
    context.set_matcher(Matcher())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="does not accept token 5"):
        append_token(context, 5)
    assert context.all_tokens.tolist() == [1, 2, 3]


def test_the_matcher_is_not_compared_copied_or_serialized() -> None:
    context = make_context()
    plain_context = copy.deepcopy(context)
    context.set_matcher(Matcher())  # type: ignore[arg-type]
    assert context == plain_context
    decoded_context = msgpack_numpy_decoder(TextContext)(msgpack_numpy_encoder()(context))
    for copied_context in (
        decoded_context,
        pickle.loads(pickle.dumps(context)),
        copy.deepcopy(context),
        copy.copy(context),
    ):
        assert copied_context == context
        assert copied_context.matcher is None


def test_a_json_schema_is_a_grammar() -> None:
    grammar = Grammar("json_schema", '{"type": "object"}')
    assert make_context(json_schema=grammar.text).grammar == grammar
    assert make_context(grammar=grammar).json_schema == grammar.text
    assert make_context(grammar=grammar, json_schema=grammar.text).grammar == grammar
    assert make_context(grammar=Grammar("regex", "a*")).json_schema is None


@pytest.mark.parametrize("grammar", [Grammar("json_schema", "{}"), Grammar("regex", "a*")])
def test_two_grammars_are_refused(grammar: Grammar) -> None:
    with pytest.raises(InputError, match="give one of them"):
        make_context(grammar=grammar, json_schema="true")


def test_numpy_scalars_can_be_serialized() -> None:
    context = make_context(
        max_length=np.int64(30),
        log_probabilities=np.int32(2),
        log_probabilities_echo=np.True_,
        ignore_eos=np.False_,
        priority=np.int8(-3),
        eos_token_ids={np.int64(1)},
        eos_sequences=[[np.int64(2), 3]],
    )
    assert msgpack_numpy_decoder(TextContext)(msgpack_numpy_encoder()(context)) == context
    assert (context.max_length, context.priority, context.eos_sequences) == (30, -3, [[2, 3]])


# Copies of arguments, and equality.


def test_end_tokens_are_copied() -> None:
    ids, sequences = {1}, [[2]]
    context = make_context(eos_token_ids=ids, eos_sequences=sequences)
    context.eos_token_ids.add(5)
    context.eos_sequences[0].append(5)
    assert (ids, sequences) == ({1}, [[2]])


@pytest.mark.parametrize("prompt", [(1, 2, 3), [1, 2, 3], range(1, 4), np.arange(1, 4)])
def test_a_prompt_of_ids_is_stored_as_a_list(prompt: Any) -> None:
    context = TextContext(prompt=prompt, max_length=9, tokens=np.arange(1, 4))
    assert context.prompt == [1, 2, 3]
    assert msgpack_numpy_decoder(TextContext)(msgpack_numpy_encoder()(context)) == context


def test_contexts_are_equal_by_value() -> None:
    first_context, second_context = make_context(request_id="a"), make_context(request_id="a")
    assert first_context == second_context
    second_context.update(7)
    assert first_context != second_context
    first_context.update(7)
    assert first_context == second_context
    assert first_context != make_context(request_id="b")
    assert first_context != "a"


def test_a_deep_copy_is_independent() -> None:
    context = make_context()
    context.update(7)
    copied_context = copy.deepcopy(context)
    copied_context.update(8)
    copied_context.eos_token_ids.add(1)
    assert context.all_tokens.tolist() == [1, 2, 3, 7]
    assert context.eos_token_ids == set()


# Images.


def test_pixel_values_are_kept_after_updates_and_a_reset() -> None:
    image = np.ones((2, 3), np.float32)
    context = TextAndVisionContext(
        prompt="",
        max_length=20,
        tokens=np.arange(1, 11),
        pixel_values=(image,),
        extra_model_args={"a": image},
    )
    context.set_token_indices(active_idx=4)
    context.update(77)
    context.update(78)
    context.reset()
    assert np.array_equal(context.pixel_values[0], image)
    assert np.array_equal(context.extra_model_args["a"], image)


def test_contexts_with_different_images_or_model_arguments_are_unequal() -> None:
    def make_image_context(pixel: float) -> TextAndVisionContext:
        images = (np.full((2, 3), pixel),)
        arguments = {"mask": np.arange(2)}
        return TextAndVisionContext(
            prompt="",
            max_length=9,
            tokens=np.arange(4),
            pixel_values=images,
            extra_model_args=arguments,
            request_id="a",
        )

    assert make_image_context(1.0) == make_image_context(1.0)
    assert make_image_context(1.0) != make_image_context(2.0)
    changed_context = make_image_context(1.0)
    changed_context.extra_model_args["mask"] = np.arange(3)
    assert make_image_context(1.0) != changed_context
