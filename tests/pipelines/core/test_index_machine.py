"""Random operations on a context, compared with a model that consists of a token list and indices."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.random_draws import num_examples

from penstock.pipelines.core import (
    TextContext,
    TextGenerationStatus,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from penstock.pipelines.core.tokens import CHUNK_SIZE

ACTIVE, ENDED, FULL = list(TextGenerationStatus)[:3]
EOS, EOS_SEQUENCE = 1, [2, 3]
token_strategy = st.integers(1, 4)
near_capacity = st.sampled_from([1, 2, 5, 126, 127, 128, 129])  # around the capacity (128)


class IndexMachine(RuleBasedStateMachine):
    @initialize(length=near_capacity, num_free=st.integers(0, 140), first_token=token_strategy)
    def create(self, length: int, num_free: int, first_token: int) -> None:
        self.model = [first_token, *([EOS] * (length - 1))]  # end tokens in the prompt have no effect
        self.prompt_len = length
        self.max_length = length + num_free
        self.start, self.active, self.committed = 0, length, 0
        self.status, self.end_position = ACTIVE, -1
        self.pending: list[int] = []  # positions of output tokens that are not yet returned
        self.first_pending_position = length  # tokens before this position are never returned again
        self.is_initial_prompt = True
        self.context = TextContext(
            prompt="",
            max_length=self.max_length,
            tokens=np.array(self.model, dtype=np.int32),
            eos_token_ids={EOS},
            eos_sequences=[EOS_SEQUENCE],
        )

    @rule(token=token_strategy)
    def update(self, token: int) -> None:
        self.context.update(token)
        if self.active < len(self.model):
            self.start, self.active = self.active, len(self.model)
            return
        self.start = self.append(token)
        generated_ids = self.model[self.prompt_len :]
        self.record_token(token == EOS or generated_ids[-2:] == EOS_SEQUENCE)
        if self.status is ACTIVE and len(self.model) >= self.max_length:
            self.status = FULL

    @rule(token=token_strategy, count=st.sampled_from([1, 130]))
    def update_often(self, token: int, count: int) -> None:
        for _ in range(count):
            self.update(token)

    @rule(token=token_strategy)
    def jump_ahead(self, token: int) -> None:
        if self.active < len(self.model):
            with pytest.raises(RuntimeError, match="middle of a prompt"):
                self.context.jump_ahead(token)
            return
        self.context.jump_ahead(token)
        self.append(token)
        self.record_token(token == EOS)

    @precondition(lambda self: len(self.model) - self.start > 1)
    @rule(fraction=st.floats(0, 1, exclude_max=True))
    def chunk(self, fraction: float) -> None:
        self.active = self.start + 1 + int(fraction * (len(self.model) - self.start - 1))
        self.context.set_token_indices(active_idx=self.active)

    @rule(count=st.integers(-1, 6) | near_capacity)
    def rollback(self, count: int) -> None:
        end = self.active - count
        if count < 0 or end < 1:
            with pytest.raises(ValueError, match=r"cannot roll ?back"):
                self.context.rollback(count)
            return
        self.context.rollback(count)
        if count == 0:
            return
        del self.model[end:]
        self.start, self.active = min(self.start, end - 1), end
        self.committed = min(self.committed, self.start)
        self.pending = [position for position in self.pending if position < end]
        if self.status is ENDED and end <= self.end_position:
            self.status = ACTIVE

    @rule()
    def reset(self) -> None:
        self.context.reset()
        self.start = self.committed = 0
        self.is_initial_prompt = True

    @rule(start=st.integers(-2, 140), active=st.integers(-2, 140), committed=st.integers(-2, 9))
    def set_indices(self, start: int, active: int, committed: int) -> None:
        self.set_or_expect_error(
            start, active, committed, lambda: self.context.set_token_indices(start, active, None, committed)
        )

    @rule(start=st.integers(-3, 3), active=st.integers(-3, 3), committed=st.integers(-3, 3))
    def bump_indices(self, start: int, active: int, committed: int) -> None:
        self.set_or_expect_error(
            self.start + start,
            self.active + active,
            self.committed + committed,
            lambda: self.context.bump_token_indices(start, active, committed_idx=committed),
        )

    @rule()
    def return_tokens(self) -> None:
        returned_tokens = self.context.outstanding_completion_tokens()
        assert returned_tokens == [(self.model[position], None) for position in self.pending]
        assert all(type(token) is int for token, _ in returned_tokens)
        if self.pending:
            self.first_pending_position = self.pending[-1] + 1
        self.pending = []

    @rule(codec=st.sampled_from(["msgpack", "msgpack without copies", "pickle"]))
    def serialize(self, codec: str) -> None:
        if codec == "pickle":
            decoded_context = pickle.loads(pickle.dumps(self.context))
        else:
            decode = msgpack_numpy_decoder(TextContext, copy="without" not in codec)
            decoded_context = decode(msgpack_numpy_encoder()(self.context))
        assert decoded_context == self.context
        self.context = decoded_context

    @invariant()
    def token_arrays_equal_the_model(self) -> None:
        context, end = self.context, len(self.model)
        assert context.all_tokens.tolist() == self.model
        assert context.prompt_tokens[:end].tolist() == self.model[: self.prompt_len]
        assert context.generated_tokens.tolist() == self.model[self.prompt_len :]
        assert context.next_tokens.tolist() == self.model[self.start : self.active]
        assert context.tokens.flags.writeable
        assert context.tokens.dtype == np.int32

    @invariant()
    def indices_equal_the_model_and_are_ordered(self) -> None:
        context = self.context
        assert context.start_idx == self.start
        assert context.active_idx == self.active
        assert context.end_idx == context.current_length == len(self.model)
        assert context.committed_idx == self.committed
        assert 0 <= self.start < self.active <= len(self.model) <= context.tokens.size
        assert context.active_length == self.active - self.start
        assert context.is_ce == (self.active - self.start > 1)
        assert context.compute_num_available_steps(200) == 200 - self.start - len(self.model) + self.active

    @invariant()
    def unused_capacity_is_zero_and_a_multiple_of_the_chunk_size(self) -> None:
        assert self.context.tokens.size % CHUNK_SIZE == 0
        assert not self.context.tokens[len(self.model) :].any()

    @invariant()
    def status_equals_the_model(self) -> None:
        assert self.context.status is self.status
        assert self.context.is_done is (self.status is not ACTIVE)
        assert self.context.is_initial_prompt is self.is_initial_prompt

    def append(self, token: int) -> int:
        self.model.append(token)
        self.active = len(self.model)
        self.is_initial_prompt = False
        return len(self.model) - 1

    def record_token(self, is_end: bool) -> None:
        position = len(self.model) - 1
        if self.status is not ACTIVE:
            return
        if is_end:
            self.status, self.end_position = ENDED, position
        elif position >= self.first_pending_position:
            self.pending.append(position)

    def set_or_expect_error(self, start: int, active: int, committed: int, call: Callable[[], None]) -> None:
        if 0 <= start < active <= len(self.model) and committed >= 0:
            call()
            self.start, self.active, self.committed = start, active, committed
        else:
            with pytest.raises(ValueError, match="unable to bump token indices"):
                call()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=num_examples(60), stateful_step_count=30)
