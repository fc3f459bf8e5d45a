"""A context returns the log probabilities of each position exactly once, for whole and chunked prompts."""

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
    """Return rows of log probabilities whose values are their positions."""
    return LogProbabilities(
        [-float(position) for position in positions], [{position: 0.5} for position in positions]
    )


def make_context(prompt: int, **fields: Any) -> TextContext:
    tokens = np.arange(1, prompt + 1)
    return TextContext(prompt="", max_length=100, tokens=tokens, eos_token_ids={EOS}, **fields)


def step(context: TextContext, token: int) -> None:
    """Run a step in which each active token gives a row for the position after it."""
    context.update(token, make_rows(*range(context.start_idx + 1, context.active_idx + 1)))


def test_each_token_is_returned_with_its_log_probabilities() -> None:
    context = make_context(3, log_probabilities=2)
    context.update(5, make_rows(3))
    context.update(6)
    context.update(7, make_rows(5))
    assert context.outstanding_completion_tokens() == [(5, make_rows(3)), (6, None), (7, make_rows(5))]
    context.update(8, make_rows(6))
    assert context.outstanding_completion_tokens() == [(8, make_rows(6))]


def test_log_probabilities_of_a_prompt_chunk_are_dropped() -> None:
    context = make_context(5, log_probabilities=2)
    context.set_token_indices(active_idx=2)
    context.update(77, make_rows(77))
    context.update(6, make_rows(5))
    assert context.prompt_log_probabilities is None
    assert context.outstanding_completion_tokens() == [(6, make_rows(5))]


def test_an_echoed_prompt_is_returned_with_the_first_token() -> None:
    context = make_context(4, log_probabilities=1, log_probabilities_echo=True)
    step(context, 5)
    step(context, 6)
    assert context.outstanding_completion_tokens() == [(5, make_rows(1, 2, 3, 4)), (6, make_rows(5))]


def test_an_echoed_chunked_prompt_is_returned_with_the_first_token() -> None:
    context = make_context(5, log_probabilities=1, log_probabilities_echo=True)
    context.set_token_indices(active_idx=2)
    step(context, 77)
    pending_rows = context.prompt_log_probabilities
    assert pending_rows == make_rows(1, 2)
    assert context.outstanding_completion_tokens() == []
    step(context, 6)
    pending_rows = context.prompt_log_probabilities
    assert pending_rows is None
    assert context.outstanding_completion_tokens() == [(6, make_rows(1, 2, 3, 4, 5))]


def test_an_echoed_prompt_is_returned_if_the_output_ends_at_once() -> None:
    context = make_context(5, log_probabilities=1, log_probabilities_echo=True)
    context.set_token_indices(active_idx=2)
    step(context, 77)
    step(context, EOS)
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
    step(context, 5)
    step(context, 6)
    context.rollback(1)
    step(context, 7)
    assert context.outstanding_completion_tokens() == [(5, make_rows(1, 2, 3)), (7, make_rows(4))]


@given(
    prompt=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40),
    evicted=st.sets(st.integers(0, 20)),
    drained=st.sets(st.integers(0, 20)),
    crossed=st.sets(st.integers(0, 20)),
)
def test_every_position_is_returned_once(
    prompt: int, sizes: list[int], evicted: set[int], drained: set[int], crossed: set[int]
) -> None:
    """This holds for all chunks and after any number of preemptions."""
    context = make_context(prompt, log_probabilities=1, log_probabilities_echo=True)
    returned: list[tuple[int, LogProbabilities | None]] = []
    for i, size in enumerate(sizes):
        if context.start_idx + 1 < context.end_idx:  # otherwise only one token is active
            context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + size))
        step(context, 100 + i)
        if i in drained:
            returned += context.outstanding_completion_tokens()
        if i in evicted:
            context.reset()
        if i in crossed:
            context = msgpack_numpy_decoder(TextContext)(msgpack_numpy_encoder()(context))
    returned += context.outstanding_completion_tokens()
    generated = context.generated_tokens.tolist()
    assert [token for token, _ in returned] == generated
    rows = [rows for _, rows in returned]
    assert rows[:1] == [make_rows(*range(1, prompt + 1))][: len(generated)]
    assert rows[1:] == [make_rows(prompt + i) for i in range(1, len(generated))]
