"""`NGramProposer`: drafts, compared with a search in the whole sequence, and the number of indexed tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pipeline_steps import make_context

from penstock.pipelines.core import TextContext
from penstock.pipelines.speculative import NGramProposer

TOKEN_LISTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def propose_draft(proposer: NGramProposer, context: TextContext, max_tokens: int) -> list[int]:
    (draft,) = proposer.propose([context], [max_tokens])
    return draft


def search_draft(sequence: list[int], min_length: int, max_length: int, max_tokens: int) -> list[int]:
    """Return the tokens after the last earlier occurrence of the longest suffix of the sequence.

    If the suffix has the maximum length, the longest match of its last 8 occurrences is used.
    """
    for suffix_length in range(max_length, min_length - 1, -1):
        candidates = [
            p
            for p in range(suffix_length, len(sequence))
            if sequence[p - suffix_length : p] == sequence[len(sequence) - suffix_length :]
        ]
        if candidates and suffix_length < len(sequence):
            best_candidate = candidates[-1]
            if suffix_length == max_length:
                recent_candidates = candidates[::-1][:8]
                lengths = [match_length(sequence, p) for p in recent_candidates]
                best_candidate = recent_candidates[first_longest(lengths)]
            draft: list[int] = []
            for index in range(best_candidate, best_candidate + max_tokens):
                draft.append((sequence + draft)[index])
            return draft
    return []


def match_length(sequence: list[int], position: int) -> int:
    """Return how many tokens before a position equal the last tokens of the sequence, at most 32."""
    count = 0
    while count < min(position, 32) and sequence[position - 1 - count] == sequence[len(sequence) - 1 - count]:
        count += 1
    return count


def first_longest(lengths: list[int]) -> int:
    return lengths.index(max(lengths))


@given(
    sequence=TOKEN_LISTS,
    min_length=st.integers(1, 3),
    num_extra=st.integers(0, 2),
    prompt_length=st.integers(1, 60),
    max_tokens=st.integers(1, 9),
)
def test_drafts_equal_a_search_in_the_whole_sequence(
    sequence: list[int], min_length: int, num_extra: int, prompt_length: int, max_tokens: int
) -> None:
    proposer = NGramProposer(min_length, min_length + num_extra)
    start = min(prompt_length, len(sequence))
    context = make_context(sequence[:start])
    for end in range(start, len(sequence) + 1):
        assert propose_draft(proposer, context, max_tokens) == search_draft(
            sequence[:end], min_length, min_length + num_extra, max_tokens
        )
        if end < len(sequence):
            context.update(sequence[end])


@pytest.mark.parametrize(
    ("sequence", "draft"),
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
def test_drafts_of_example_sequences(sequence: list[int], draft: list[int]) -> None:
    assert propose_draft(NGramProposer(2, 3), make_context(sequence), 4) == draft


def test_no_tokens_are_indexed_if_no_draft_is_allowed() -> None:
    proposer = NGramProposer()
    assert propose_draft(proposer, make_context([1, 2, 1, 2]), 0) == []
    assert not proposer._indexes


def test_each_token_is_indexed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.pipelines.speculative import ngram

    indexed_counts: list[int] = []
    extend = ngram._NGramIndex.extend
    monkeypatch.setattr(
        ngram._NGramIndex,
        "extend",
        lambda self, tokens: (indexed_counts.append(len(tokens)), extend(self, tokens))[1],
    )
    proposer, context = NGramProposer(), make_context(list(range(1000)))
    for token in range(20):
        propose_draft(proposer, context, 4)
        context.update(token)
    assert indexed_counts == [1000] + [1] * 19


def test_drafts_are_correct_after_rollbacks_and_for_reused_request_ids() -> None:
    proposer = NGramProposer(1, 2)
    context = make_context([1, 2, 3, 1], request_id="a")
    assert propose_draft(proposer, context, 2) == [2, 3]
    context.rollback(1)
    context.update(2)
    assert propose_draft(proposer, context, 2) == [3, 2]
    assert propose_draft(proposer, make_context([4, 5, 4], request_id="a"), 2) == [5, 4]
    proposer.release(context)
    proposer.release(context)
    assert not proposer._indexes


def test_a_preemption_does_not_change_the_draft() -> None:
    proposer, context = NGramProposer(1, 2), make_context([1, 2, 3, 1])
    draft_before = propose_draft(proposer, context, 2)
    context.reset()
    context.set_token_indices(active_idx=context.end_idx)
    assert propose_draft(proposer, context, 2) == draft_before
