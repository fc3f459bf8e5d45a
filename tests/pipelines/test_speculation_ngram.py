"""`NGramProposer` compared with a search through the whole text, and its work per token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.running import context_of

from penstock.pipelines.core import TextContext
from penstock.pipelines.speculative import NGramProposer

WORDS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def proposed(proposer: NGramProposer, context: TextContext, room: int) -> list[int]:
    (draft,) = proposer.propose([context], [room])
    return draft


def searched(text: list[int], least: int, most: int, room: int) -> list[int]:
    """By definition: the tokens that followed the last occurrence of the longest repeated suffix."""
    for size in range(most, least - 1, -1):
        places = [p for p in range(size, len(text)) if text[p - size : p] == text[len(text) - size :]]
        if places and size < len(text):
            place = places[-1]
            if size == most:
                tried = places[::-1][:8]
                lengths = [match(text, p) for p in tried]
                place = tried[first_longest(lengths)]
            draft: list[int] = []
            for index in range(place, place + room):
                draft.append((text + draft)[index])
            return draft
    return []


def match(text: list[int], place: int) -> int:
    count = 0
    while count < min(place, 32) and text[place - 1 - count] == text[len(text) - 1 - count]:
        count += 1
    return count


def first_longest(lengths: list[int]) -> int:
    return lengths.index(max(lengths))


@given(
    text=WORDS,
    least=st.integers(1, 3),
    more=st.integers(0, 2),
    cut=st.integers(1, 60),
    room=st.integers(1, 9),
)
def test_matches_equal_those_of_a_plain_search(
    text: list[int], least: int, more: int, cut: int, room: int
) -> None:
    proposer = NGramProposer(least, least + more)
    start = min(cut, len(text))
    context = context_of(text[:start])
    for end in range(start, len(text) + 1):
        assert proposed(proposer, context, room) == searched(text[:end], least, least + more, room)
        if end < len(text):
            context.update(text[end])


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 1, 2, 9, 1, 2], [9, 1, 2, 9]),
        ([7, 7, 7], [7, 7, 7, 7]),
        ([5, 6, 5, 6, 5], [6, 5, 6, 5]),
        ([1, 2, 3], []),
        ([1], []),
        ([1, 2, 3, 4, 5, 8, 3, 4, 5, 9, 2, 3, 4, 5], [8, 3, 4, 5]),
    ],
)
def test_examples(text: list[int], draft: list[int]) -> None:
    assert proposed(NGramProposer(2, 3), context_of(text), 4) == draft


def test_no_room_no_draft_and_no_work() -> None:
    proposer = NGramProposer()
    assert proposed(proposer, context_of([1, 2, 1, 2]), 0) == []
    assert not proposer._indexes


def test_each_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.pipelines.speculative import ngram

    read: list[int] = []
    original = ngram._Index.extend
    monkeypatch.setattr(
        ngram._Index, "extend", lambda self, tokens: (read.append(len(tokens)), original(self, tokens))[1]
    )
    proposer, context = NGramProposer(), context_of(list(range(1000)))
    for token in range(20):
        proposed(proposer, context, 4)
        context.update(token)
    assert read == [1000] + [1] * 19


def test_tokens_taken_back_and_a_name_used_again() -> None:
    proposer = NGramProposer(1, 2)
    context = context_of([1, 2, 3, 1], request_id="a")
    assert proposed(proposer, context, 2) == [2, 3]
    context.rollback(1)
    context.update(2)
    assert proposed(proposer, context, 2) == [3, 2]
    assert proposed(proposer, context_of([4, 5, 4], request_id="a"), 2) == [5, 4]
    proposer.release(context)
    proposer.release(context)
    assert not proposer._indexes


def test_preemption_loses_nothing() -> None:
    proposer, context = NGramProposer(1, 2), context_of([1, 2, 3, 1])
    before = proposed(proposer, context, 2)
    context.reset()
    context.set_token_indices(active_idx=context.end_idx)
    assert proposed(proposer, context, 2) == before
