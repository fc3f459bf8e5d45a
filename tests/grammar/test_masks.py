"""The masks of matchers, as the pipeline requests them; a request for a mask does not advance a matcher."""

from __future__ import annotations

import numpy as np
import pytest
from support.grammars import EOS, context_for, new_compiler, wait

from penstock.grammar import acceptable_drafts, forced_tokens, grammar_bitmask
from penstock.pipelines.core import TextContext

VOCABULARY = EOS + 1


def ready(kind: str, text: object, **options: object) -> TextContext:
    return wait(new_compiler(), context_for(kind, text, **options))  # type: ignore[arg-type]


def plain() -> TextContext:
    return TextContext(prompt=[1], max_length=500, tokens=np.array([1]))


def allowed(row: object) -> list[int]:
    bits = np.unpackbits(np.asarray(row).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCABULARY]).tolist()


def test_no_grammar_no_mask() -> None:
    assert grammar_bitmask([plain()], np.array([0]), VOCABULARY) is None


def test_mask_rows_of_drafts() -> None:
    contexts = [ready("regex", "ab*c"), plain(), ready("regex", "x")]
    sequences = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    drafts = [list(b"ab"), [5], [ord("x"), EOS]]
    for _ in range(2):  # the matcher has not advanced
        mask = grammar_bitmask(contexts, sequences, VOCABULARY, drafts)
        assert mask is not None
        everything = list(range(VOCABULARY))
        assert [allowed(row) for row in mask] == [
            [ord("a")],
            [ord("b"), ord("c")],
            [ord("b"), ord("c")],
            everything,
            everything,
            [ord("x")],
            [EOS],
            everything,  # after the end
        ]


def test_after_a_refused_draft_every_token_is_allowed() -> None:
    mask = grammar_bitmask([ready("regex", "ab")], np.array([0, 0]), VOCABULARY, [[ord("z")]])
    assert mask is not None
    assert [len(allowed(row)) for row in mask] == [1, VOCABULARY]


@pytest.mark.parametrize(
    ("pattern", "limit", "expected"),
    [
        ("name: [ab]", 10, b"name: "),
        ("name: [ab]", 3, b"nam"),
        ("abc", 10, b"abc"),  # the end is not among them
        ("a?", 10, b""),
        ("[ab]", 10, b""),
        ("é", 10, "é".encode()),
        ("abc", 0, b""),
    ],
)
def test_forced_tokens(pattern: str, limit: int, expected: bytes) -> None:
    context = ready("regex", pattern)
    for _ in range(2):
        assert bytes(forced_tokens(context, limit, VOCABULARY)) == expected


def test_forced_tokens_of_no_grammar_or_one_that_has_ended() -> None:
    assert forced_tokens(plain(), 5, VOCABULARY) == []
    context = ready("regex", "a", generated=b"a")
    context.update(EOS)
    assert forced_tokens(context, 5, VOCABULARY) == []
    assert acceptable_drafts(context, [97]) == []


def test_acceptable_drafts() -> None:
    context = ready("regex", "ab+")
    assert acceptable_drafts(context, list(b"abbx")) == list(b"abb")
    assert acceptable_drafts(context, [*b"ab", EOS, 97]) == [*b"ab", EOS]
    assert acceptable_drafts(context, [EOS]) == []
    assert acceptable_drafts(context, []) == []
    assert acceptable_drafts(plain(), [1, 2]) == [1, 2]
    assert context.matcher is not None
    assert context.matcher.accept_token(97)
