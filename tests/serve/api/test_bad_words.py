"""The field ``bad_words`` is translated to token sequences, up to limits per word and per request."""

from __future__ import annotations

import pytest

from penstock.assembly import load_tokenizer
from penstock.config import PipelineConfig
from penstock.serve.api import bad_words
from penstock.serve.api.bad_words import MAX_SEQUENCES, MAX_SEQUENCES_PER_WORD, banned_sequences
from penstock.testing import FakeTokenizer

DEMO = load_tokenizer(PipelineConfig.from_flat({"model_path": "demo"}))


def decode(ids: list[int]) -> str:
    return b"".join(map(DEMO.token_bytes, ids)).decode()


def test_no_words_give_no_sequences() -> None:
    assert banned_sequences(None, DEMO) is None
    assert banned_sequences([], DEMO) is None


@pytest.mark.parametrize("word", ["Berlin", " Berlin", "né", "🎉", "a b"])
def test_the_encodings_and_the_letter_sequence_of_a_word_are_banned(word: str) -> None:
    sequences = banned_sequences([word], DEMO) or []
    assert {decode(ids) for ids in sequences} == {word, " " + word.lstrip()}
    encodings = [DEMO.encode_text(text, False).tolist() for text in (word, " " + word.lstrip())]
    assert all(ids in sequences for ids in encodings)
    letters = [DEMO.encode_text(letter, False).tolist() for letter in word]
    if all(len(ids) == 1 for ids in letters):
        assert [ids[0] for ids in letters] in sequences
    assert len({tuple(ids) for ids in sequences}) == len(sequences)


def test_the_number_of_token_sequences_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        len(banned_sequences(["antidisestablishmentarianism"], DEMO) or []) <= 2 * MAX_SEQUENCES_PER_WORD + 2
    )
    words = [f"{number} is a number" for number in range(256)]
    assert len(banned_sequences(words, DEMO) or []) <= MAX_SEQUENCES + 2 * len(words)
    monkeypatch.setattr(bad_words, "_MAX_WORD_BYTES", 4)
    assert banned_sequences(["abcdefgh"], FakeTokenizer()) == [[*b"abcdefgh"], [*b" abcdefgh"]]
