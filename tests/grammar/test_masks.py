"""Masks, forced tokens and acceptable drafts of matchers; none of them advances a matcher."""

from __future__ import annotations

import numpy as np
import pytest
from support.grammars import EOS, make_grammar_context, new_compiler, wait_until_ready

from penstock.grammar import acceptable_drafts, forced_tokens, grammar_bitmask
from penstock.pipelines.core import TextContext

VOCABULARY = EOS + 1


def compile_context(kind: str, text: object, **options: object) -> TextContext:
    return wait_until_ready(new_compiler(), make_grammar_context(kind, text, **options))  # type: ignore[arg-type]


def make_context_without_grammar() -> TextContext:
    return TextContext(prompt=[1], max_length=500, tokens=np.array([1]))


def decode_mask_row(row: object) -> list[int]:
    bits = np.unpackbits(np.asarray(row).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCABULARY]).tolist()


def test_contexts_without_a_grammar_have_no_mask() -> None:
    assert grammar_bitmask([make_context_without_grammar()], np.array([0]), VOCABULARY) is None


def test_each_mask_row_allows_the_tokens_after_the_draft_tokens_before_it() -> None:
    contexts = [
        compile_context("regex", "ab*c"),
        make_context_without_grammar(),
        compile_context("regex", "x"),
    ]
    context_indices = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    drafts = [list(b"ab"), [5], [ord("x"), EOS]]
    for _ in range(2):  # the second call gives the same mask, so the first call has not advanced the matchers
        mask = grammar_bitmask(contexts, context_indices, VOCABULARY, drafts)
        assert mask is not None
        all_tokens = list(range(VOCABULARY))
        assert [decode_mask_row(row) for row in mask] == [
            [ord("a")],
            [ord("b"), ord("c")],
            [ord("b"), ord("c")],
            all_tokens,
            all_tokens,
            [ord("x")],
            [EOS],
            all_tokens,  # after the end token, all tokens are allowed
        ]


def test_after_a_refused_draft_every_token_is_allowed() -> None:
    mask = grammar_bitmask([compile_context("regex", "ab")], np.array([0, 0]), VOCABULARY, [[ord("z")]])
    assert mask is not None
    assert [len(decode_mask_row(row)) for row in mask] == [1, VOCABULARY]


@pytest.mark.parametrize(
    ("pattern", "limit", "expected"),
    [
        ("name: [ab]", 10, b"name: "),
        ("name: [ab]", 3, b"nam"),
        ("abc", 10, b"abc"),  # the end token is not forced
        ("a?", 10, b""),
        ("[ab]", 10, b""),
        ("é", 10, "é".encode()),
        ("abc", 0, b""),
    ],
)
def test_forced_tokens_are_the_only_continuation(pattern: str, limit: int, expected: bytes) -> None:
    context = compile_context("regex", pattern)
    for _ in range(2):
        assert bytes(forced_tokens(context, limit, VOCABULARY)) == expected


def test_no_tokens_are_forced_without_a_grammar_or_after_the_end_token() -> None:
    assert forced_tokens(make_context_without_grammar(), 5, VOCABULARY) == []
    context = compile_context("regex", "a", generated=b"a")
    context.update(EOS)
    assert forced_tokens(context, 5, VOCABULARY) == []
    assert acceptable_drafts(context, [97]) == []


def test_acceptable_drafts_are_the_longest_accepted_prefix() -> None:
    context = compile_context("regex", "ab+")
    assert acceptable_drafts(context, list(b"abbx")) == list(b"abb")
    assert acceptable_drafts(context, [*b"ab", EOS, 97]) == [*b"ab", EOS]
    assert acceptable_drafts(context, [EOS]) == []
    assert acceptable_drafts(context, []) == []
    assert acceptable_drafts(make_context_without_grammar(), [1, 2]) == [1, 2]
    assert context.matcher is not None
    assert context.matcher.accept_token(97)
