"""Speech contexts: the statuses of token and audio generation, and the buffer of speech tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.random_draws import num_examples

from penstock.pipelines.core import (
    InputContext,
    TextGenerationStatus,
    TTSContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)

ACTIVE = TextGenerationStatus.ACTIVE
END_OF_SEQUENCE = TextGenerationStatus.END_OF_SEQUENCE


def make_context(*args: Any, **fields: Any) -> TTSContext:
    return TTSContext(*args, prompt="say", max_length=9, tokens=np.arange(1, 4), **fields)


def context_with_ten_tokens(num_decoded: int) -> TTSContext:
    context = make_context()
    context.update_speech_tokens(np.arange(10, 20))
    context.set_decoded_index(num_decoded)
    return context


def test_the_audio_prompt_is_the_first_argument() -> None:
    voice = np.arange(4, dtype=np.int32)
    context = make_context(voice, 7)
    assert context.audio_prompt_tokens is voice
    assert context.prev_samples_beyond_offset == 7
    assert make_context().audio_prompt_tokens.dtype == np.int32
    assert make_context().audio_prompt_tokens.size == 0


def test_a_speech_context_is_an_input_context() -> None:
    assert isinstance(make_context(), InputContext)


def test_the_two_statuses_are_independent() -> None:
    context = make_context()
    context.update_speech_token_status(END_OF_SEQUENCE)
    assert (context.speech_token_status, context.audio_generation_status) == (END_OF_SEQUENCE, ACTIVE)
    assert not context.is_done
    context.update_audio_generation_status(END_OF_SEQUENCE)
    assert context.is_done


def test_status_and_update_status_are_refused_as_ambiguous() -> None:
    context = make_context()
    with pytest.raises(ValueError, match="call `speech_token_status` or `audio_generation_status` instead"):
        context.status  # noqa: B018
    with pytest.raises(ValueError, match="call `update_speech_token_status` or `update_audio_generation_st"):
        context.update_status(END_OF_SEQUENCE)


def test_an_end_token_sets_the_speech_token_status() -> None:
    context = make_context(eos_token_ids={9})
    context.update(5)
    context.update(9)
    assert context.speech_token_status is END_OF_SEQUENCE
    assert not context.is_done
    assert context.outstanding_completion_tokens() == [(5, None)]


def test_the_buffer_grows_as_soon_as_it_is_full() -> None:
    context = make_context()
    sizes = []
    for count in (100, 28, 300):
        context.update_speech_tokens(np.ones(count, np.int32))
        sizes.append(context._speech_tokens.size)
    assert sizes == [128, 256, 640]
    assert context.block_counter == 3


@pytest.mark.parametrize(
    ("decoded_index", "chunk_size", "overlap", "expected_tokens", "num_decoded"),
    [
        (4, 4, 2, [12, 13, 14, 15, 16, 17], 2),
        (4, 4, 10, [10, 11, 12, 13, 14, 15, 16, 17], 4),
        (4, 4, None, [14, 15, 16, 17], 0),
        (4, None, None, [14, 15, 16, 17, 18, 19], 0),
        (4, 0, 3, [11, 12, 13], 3),
        (10, 5, 3, [17, 18, 19], 3),
        (12, 5, None, [], 0),
    ],
)
def test_decoded_tokens_precede_the_next_speech_tokens(
    decoded_index: int,
    chunk_size: int | None,
    overlap: int | None,
    expected_tokens: list[int],
    num_decoded: int,
) -> None:
    context = context_with_ten_tokens(decoded_index)
    returned_tokens, actual_num_decoded = context.next_speech_tokens(chunk_size, overlap)
    assert returned_tokens.tolist() == expected_tokens
    assert actual_num_decoded == num_decoded
    assert context.decoded_index == decoded_index


def test_undecoded_speech_tokens_are_detected() -> None:
    context = context_with_ten_tokens(8)
    assert [context.has_undecoded_speech_tokens(n) for n in range(4)] == [True, True, False, False]
    assert context.has_undecoded_speech_tokens()


def test_a_negative_decoded_index_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, was -1"):
        make_context().set_decoded_index(-1)


class SpeechMachine(RuleBasedStateMachine):
    """A random test that compares the speech-token buffer with a list."""

    @initialize()
    def create(self) -> None:
        self.context = make_context()
        self.model: list[int] = []
        self.num_decoded = self.num_updates = 0

    @rule(count=st.sampled_from([0, 1, 5, 27, 28, 127, 128, 129, 300]), first_token=st.integers(1, 1000))
    def add_tokens(self, count: int, first_token: int) -> None:
        self.context.update_speech_tokens(np.arange(first_token, first_token + count))
        self.model += range(first_token, first_token + count)
        self.num_updates += 1

    @rule(fraction=st.floats(0, 1))
    def decode(self, fraction: float) -> None:
        self.num_decoded = int(fraction * len(self.model))
        self.context.set_decoded_index(self.num_decoded)

    @rule(chunk_size=st.none() | st.integers(0, 200), overlap=st.none() | st.integers(0, 200))
    def next_tokens(self, chunk_size: int | None, overlap: int | None) -> None:
        tokens, num_preceding = self.context.next_speech_tokens(chunk_size, overlap)
        assert num_preceding == min(overlap or 0, self.num_decoded)
        end = None if chunk_size is None else self.num_decoded + chunk_size
        assert tokens.tolist() == self.model[self.num_decoded - num_preceding : end]

    @rule(copy=st.booleans())
    def serialize(self, copy: bool) -> None:
        decoded_context = msgpack_numpy_decoder(TTSContext, copy)(msgpack_numpy_encoder()(self.context))
        assert decoded_context == self.context
        self.context = decoded_context

    @invariant()
    def the_buffer_equals_the_list(self) -> None:
        context = self.context
        assert context.speech_tokens.tolist() == self.model
        assert context.speech_tokens.dtype == np.int32
        assert context.decoded_index == self.num_decoded
        assert context.block_counter == self.num_updates
        assert context._speech_tokens.size % 128 == 0
        assert len(self.model) < context._speech_tokens.size
        assert not context._speech_tokens[len(self.model) :].any()
        num_undecoded = len(self.model) - self.num_decoded
        assert [context.has_undecoded_speech_tokens(n) for n in (0, num_undecoded)] == [
            num_undecoded > 0,
            False,
        ]


TestSpeechMachine = SpeechMachine.TestCase
TestSpeechMachine.settings = settings(max_examples=num_examples(40), stateful_step_count=20)
