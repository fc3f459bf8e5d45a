"""The request traces of a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from penstock.bench.simulation.trace import TraceShape, make_trace
from penstock.errors import InputError

SHAPE = TraceShape(rate=20.0, num_requests=3000, max_length=2048, num_prefixes=8)


def test_the_same_seed_gives_the_same_trace() -> None:
    trace, repeated_trace, other_trace = (
        make_trace(replace(SHAPE, seed=seed, num_requests=50)) for seed in (1, 1, 2)
    )
    assert (
        [conversation.begin for conversation in trace]
        == [conversation.begin for conversation in repeated_trace]
        != [conversation.begin for conversation in other_trace]
    )
    assert all(
        np.array_equal(a.message, b.message)
        for conversation, repeated_conversation in zip(trace, repeated_trace, strict=True)
        for a, b in zip(conversation.turns, repeated_conversation.turns, strict=True)
    )


def test_rate_lengths_and_numbers_of_turns_agree_with_the_shape() -> None:
    trace = make_trace(SHAPE)
    turns = [turn for conversation in trace for turn in conversation.turns]
    assert len(turns) == SHAPE.num_requests
    assert len(turns) / trace[-1].begin == pytest.approx(SHAPE.rate, rel=0.2)
    assert len(turns) / len(trace) == pytest.approx(SHAPE.turns, rel=0.15)
    assert np.median([turn.num_new_tokens for turn in turns]) == pytest.approx(SHAPE.answer_length, rel=0.1)
    later_lengths = [len(turn.message) for conversation in trace for turn in conversation.turns[1:]]
    assert np.median(later_lengths) == pytest.approx(SHAPE.message_length, rel=0.1)
    assert all(
        sum(len(turn.message) + turn.num_new_tokens for turn in conversation.turns) <= SHAPE.max_length
        for conversation in trace
    )


def test_conversations_arrive_in_bursts() -> None:
    gaps = np.diff([conversation.begin for conversation in make_trace(SHAPE)])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.25)


def test_prefix_frequencies_follow_zipfs_law() -> None:
    prefixes = Counter(conversation.turns[0].message[:8].tobytes() for conversation in make_trace(SHAPE))
    counts = [count for _, count in prefixes.most_common(3)]
    assert len(prefixes) == SHAPE.num_prefixes
    weights = [1 / k for k in range(1, SHAPE.num_prefixes + 1)]
    assert counts[0] / len(make_trace(SHAPE)) == pytest.approx(1 / sum(weights), rel=0.2)
    assert counts[0] > 1.5 * counts[1] > 1.5 * counts[2]


@pytest.mark.parametrize("name", ["rate", "num_requests", "prefix_length"])
def test_sizes_that_are_too_small_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        replace(SHAPE, **{name: 0})
    with pytest.raises(InputError, match="turns"):
        replace(SHAPE, turns=0.5)
