"""The arrivals of a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from penstock.bench.simulation.trace import TraceShape, make_trace
from penstock.errors import InputError

SHAPE = TraceShape(rate=20.0, num_requests=3000, max_length=2048, num_prefixes=8)


def test_the_same_seed_gives_the_same_trace() -> None:
    first, again, other = (make_trace(replace(SHAPE, seed=seed, num_requests=50)) for seed in (1, 1, 2))
    assert [one.begin for one in first] == [one.begin for one in again] != [one.begin for one in other]
    assert all(
        np.array_equal(a.message, b.message)
        for one, two in zip(first, again, strict=True)
        for a, b in zip(one.turns, two.turns, strict=True)
    )


def test_rate_lengths_and_turns_are_those_of_the_shape() -> None:
    trace = make_trace(SHAPE)
    turns = [turn for one in trace for turn in one.turns]
    assert len(turns) == SHAPE.num_requests
    assert len(turns) / trace[-1].begin == pytest.approx(SHAPE.rate, rel=0.2)
    assert len(turns) / len(trace) == pytest.approx(SHAPE.turns, rel=0.15)
    assert np.median([turn.num_new_tokens for turn in turns]) == pytest.approx(SHAPE.answer_length, rel=0.1)
    later = [len(turn.message) for one in trace for turn in one.turns[1:]]
    assert np.median(later) == pytest.approx(SHAPE.message_length, rel=0.1)
    assert all(
        sum(len(turn.message) + turn.num_new_tokens for turn in one.turns) <= SHAPE.max_length
        for one in trace
    )


def test_conversations_begin_in_bursts() -> None:
    gaps = np.diff([one.begin for one in make_trace(SHAPE)])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.25)


def test_few_prefixes_are_common() -> None:
    begins = Counter(one.turns[0].message[:8].tobytes() for one in make_trace(SHAPE))
    (first, second, third), num = [count for _, count in begins.most_common(3)], len(make_trace(SHAPE))
    assert len(begins) == SHAPE.num_prefixes
    weights = [1 / k for k in range(1, SHAPE.num_prefixes + 1)]
    assert first / num == pytest.approx(1 / sum(weights), rel=0.2)
    assert first > 1.5 * second > 1.5 * third


@pytest.mark.parametrize("name", ["rate", "num_requests", "prefix_length"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(InputError, match=name):
        replace(SHAPE, **{name: 0})
    with pytest.raises(InputError, match="turns"):
        replace(SHAPE, turns=0.5)
