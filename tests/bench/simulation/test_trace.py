"""The request traces of a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from penstock.bench.simulation.trace import TraceParameters, make_trace
from penstock.errors import InputError

PARAMETERS = TraceParameters(rate=20.0, num_requests=3000, max_length=2048, num_prefixes=8)


def test_the_same_seed_gives_the_same_trace() -> None:
    trace, repeated_trace, other_trace = (
        make_trace(replace(PARAMETERS, seed=seed, num_requests=50)) for seed in (1, 1, 2)
    )
    assert (
        [conversation.begin_time for conversation in trace]
        == [conversation.begin_time for conversation in repeated_trace]
        != [conversation.begin_time for conversation in other_trace]
    )
    assert all(
        np.array_equal(a.message, b.message)
        for conversation, repeated_conversation in zip(trace, repeated_trace, strict=True)
        for a, b in zip(conversation.turns, repeated_conversation.turns, strict=True)
    )


def test_rate_lengths_and_numbers_of_turns_agree_with_the_parameters() -> None:
    trace = make_trace(PARAMETERS)
    turns = [turn for conversation in trace for turn in conversation.turns]
    assert len(turns) == PARAMETERS.num_requests
    assert len(turns) / trace[-1].begin_time == pytest.approx(PARAMETERS.rate, rel=0.2)
    assert len(turns) / len(trace) == pytest.approx(PARAMETERS.turns, rel=0.15)
    assert np.median([turn.num_new_tokens for turn in turns]) == pytest.approx(
        PARAMETERS.answer_length, rel=0.1
    )
    later_lengths = [len(turn.message) for conversation in trace for turn in conversation.turns[1:]]
    assert np.median(later_lengths) == pytest.approx(PARAMETERS.message_length, rel=0.1)
    assert all(
        sum(len(turn.message) + turn.num_new_tokens for turn in conversation.turns) <= PARAMETERS.max_length
        for conversation in trace
    )


def test_conversations_arrive_in_bursts() -> None:
    gaps = np.diff([conversation.begin_time for conversation in make_trace(PARAMETERS)])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.25)


def test_prefix_frequencies_follow_zipfs_law() -> None:
    prefixes = Counter(conversation.turns[0].message[:8].tobytes() for conversation in make_trace(PARAMETERS))
    counts = [count for _, count in prefixes.most_common(3)]
    assert len(prefixes) == PARAMETERS.num_prefixes
    weights = [1 / k for k in range(1, PARAMETERS.num_prefixes + 1)]
    assert counts[0] / len(make_trace(PARAMETERS)) == pytest.approx(1 / sum(weights), rel=0.2)
    assert counts[0] > 1.5 * counts[1] > 1.5 * counts[2]


@pytest.mark.parametrize("name", ["rate", "num_requests", "prefix_length"])
def test_sizes_that_are_too_small_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        replace(PARAMETERS, **{name: 0})
    with pytest.raises(InputError, match="turns"):
        replace(PARAMETERS, turns=0.5)
