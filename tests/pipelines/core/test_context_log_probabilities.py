"""A context returns the log probabilities of each position once, for whole and chunked prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipelines.core import (
    LogProbabilities,
    TextContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)

EOS = 9


def make_rows(*positions: int) -> LogProbabilities:
    """Return one row of log probabilities for each position. The values of a row encode its position."""
    return LogProbabilities(
        [-float(position) for position in positions], [{position: 0.5} for position in positions]
    )


def make_context(prompt_length: int, **fields: Any) -> TextContext:
    tokens = np.arange(1, prompt_length + 1)
    return TextContext(prompt="", max_length=100, tokens=tokens, eos_token_ids={EOS}, **fields)


def run_step(context: TextContext, token: int) -> None:
    """Run a step. Each active token gives the log probabilities of the position after it."""
    context.update(token, make_rows(*range(context.start_idx + 1, context.active_idx + 1)))


def test_each_token_is_returned_with_its_log_probabilities() -> None:
    context = make_context(3, log_probabilities=2)
    context.update(5, make_rows(3))
    context.update(6)
    context.update(7, make_rows(5))
    assert context.outstanding_completion_tokens() == [(5, make_rows(3)), (6, None), (7, make_rows(5))]
    context.update(8, make_rows(6))
    assert context.outstanding_completion_tokens() == [(8, make_rows(6))]


def test_log_probabilities_of_a_prompt_chunk_are_dropped_without_echo() -> None:
    context = make_context(5, log_probabilities=2)
    context.set_token_indices(active_idx=2)
    context.update(77, make_rows(77))
    context.update(6, make_rows(5))
    assert context.prompt_log_probabilities is None
    assert context.outstanding_completion_tokens() == [(6, make_rows(5))]


def test_an_echoed_prompt_is_returned_with_the_first_token() -> None:
    context = make_context(4, log_probabilities=1, log_probabilities_echo=True)
    run_step(context, 5)
    run_step(context, 6)
    assert context.outstanding_completion_tokens() == [(5, make_rows(1, 2, 3, 4)), (6, make_rows(5))]


def test_an_echoed_chunked_prompt_is_returned_with_the_first_token() -> None:
    context = make_context(5, log_probabilities=1, log_probabilities_echo=True)
    context.set_token_indices(active_idx=2)
    run_step(context, 77)
    pending_rows = context.prompt_log_probabilities
    assert pending_rows == make_rows(1, 2)
    assert context.outstanding_completion_tokens() == []
    run_step(context, 6)
    pending_rows = context.prompt_log_probabilities
    assert pending_rows is None
    assert context.outstanding_completion_tokens() == [(6, make_rows(1, 2, 3, 4, 5))]


def test_an_echoed_prompt_is_returned_if_the_output_has_no_tokens() -> None:
    context = make_context(5, log_probabilities=1, log_probabilities_echo=True)
    context.set_token_indices(active_idx=2)
    run_step(context, 77)
    run_step(context, EOS)
    assert context.outstanding_completion_tokens() == []
    assert context.prompt_log_probabilities == make_rows(1, 2, 3, 4)


def test_log_probabilities_of_an_end_token_are_dropped() -> None:
    context = make_context(3, log_probabilities=1)
    step_rows = make_rows(3)
    context.update(EOS, step_rows)
    assert context.prompt_log_probabilities is None
    assert context.outstanding_completion_tokens() == []


def test_a_rolled_back_token_loses_its_log_probabilities() -> None:
    context = make_context(3, log_probabilities=1)
    context.update(5, make_rows(3))
    context.update(6, make_rows(4))
    context.rollback(1)
    context.update(7)
    assert context.outstanding_completion_tokens() == [(5, make_rows(3)), (7, None)]


def test_a_token_after_a_rollback_is_scored_again() -> None:
    context = make_context(3, log_probabilities=1, log_probabilities_echo=True)
    run_step(context, 5)
    run_step(context, 6)
    context.rollback(1)
    run_step(context, 7)
    assert context.outstanding_completion_tokens() == [(5, make_rows(1, 2, 3)), (7, make_rows(4))]


@given(
    prompt_length=st.integers(1, 12),
    chunk_sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40),
    preempted_steps=st.sets(st.integers(0, 20)),
    returning_steps=st.sets(st.integers(0, 20)),
    serialized_steps=st.sets(st.integers(0, 20)),
)
def test_every_position_is_returned_once(
    prompt_length: int,
    chunk_sizes: list[int],
    preempted_steps: set[int],
    returning_steps: set[int],
    serialized_steps: set[int],
) -> None:
    """The prompt is computed in random chunks. The context is preempted and serialized at random steps."""
    context = make_context(prompt_length, log_probabilities=1, log_probabilities_echo=True)
    returned_tokens: list[tuple[int, LogProbabilities | None]] = []
    for i, chunk_size in enumerate(chunk_sizes):
        if context.start_idx + 1 < context.end_idx:  # a chunk needs at least two uncomputed tokens
            context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + chunk_size))
        run_step(context, 100 + i)
        if i in returning_steps:
            returned_tokens += context.outstanding_completion_tokens()
        if i in preempted_steps:
            context.reset()
        if i in serialized_steps:
            context = msgpack_numpy_decoder(TextContext)(msgpack_numpy_encoder()(context))
    returned_tokens += context.outstanding_completion_tokens()
    generated_ids = context.generated_tokens.tolist()
    assert [token for token, _ in returned_tokens] == generated_ids
    rows = [rows for _, rows in returned_tokens]
    assert rows[:1] == [make_rows(*range(1, prompt_length + 1))][: len(generated_ids)]
    assert rows[1:] == [make_rows(prompt_length + i) for i in range(1, len(generated_ids))]
