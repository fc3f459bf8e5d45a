"""The model `demo-voice` in the package: length, volume and intelligibility of speech, batches, digits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import LLM
from penstock.llm.speech import Speech

TEXTS = ("Please open the door.", "See you in summer.", "The old man bought a red book.")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-voice", task="audio-generation", kv_cache_memory="8MiB") as llm:
        yield llm


@pytest.fixture(scope="module")
def speeches(llm: LLM) -> list[Speech]:
    return llm.speak(list(TEXTS), use_tqdm=False)


def test_speech_is_complete_and_has_a_plausible_duration_and_volume(speeches: list[Speech]) -> None:
    for text, speech in zip(TEXTS, speeches, strict=True):
        assert speech.sample_rate == 16_000
        assert not speech.is_cut
        assert 0.035 * len(text) < speech.seconds < 0.12 * len(text)
        assert 0.1 < np.abs(speech.audio).max() < 1.5


def test_different_texts_give_speech_of_different_lengths(speeches: list[Speech]) -> None:
    lengths = [len(speech.audio) for speech in speeches]
    assert len(set(lengths)) == len(lengths)


def test_audio_of_a_batch_is_close_to_audio_of_a_single_text(llm: LLM, speeches: list[Speech]) -> None:
    single_audio = llm.speak(TEXTS[1], use_tqdm=False)
    assert single_audio.num_tokens == speeches[1].num_tokens
    np.testing.assert_allclose(single_audio.audio, speeches[1].audio, atol=0.02)


def test_a_speech_recognizer_understands_most_words_of_the_speech(
    speeches: list[Speech], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pocketsphinx", reason="the recognizer is not installed")
    import torch

    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from demo_voice.measure import Recognizer, edit_distance, split_words

    recognizer = Recognizer(with_grammar=True)
    errors = [
        edit_distance(split_words(text), recognizer(torch.from_numpy(speech.audio)))
        for text, speech in zip(TEXTS, speeches, strict=True)
    ]
    # The sentences have 15 words. For speech of another sentence, nearly every word is an error.
    assert sum(errors) <= 6


def test_speech_recognizers_understand_hello_world(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model speaks several spellings. Only one of the two recognizers is restricted to a grammar."""
    pytest.importorskip("pocketsphinx", reason="the recognizer is not installed")
    import torch

    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from demo_voice.measure import Recognizer

    spellings = ["hello world", "Hello world.", "Hello world!", "Hello, world", "HELLO WORLD?"]
    speeches = llm.speak(spellings, use_tqdm=False)
    for recognizer in (Recognizer(with_grammar=True), Recognizer(with_grammar=False)):
        transcripts = [recognizer(torch.from_numpy(speech.audio)) for speech in speeches]
        assert transcripts == [["hello", "world"]] * len(spellings)


def test_digits_are_spoken_as_words(llm: LLM) -> None:
    digits, words = llm.speak(["I have 21 cats.", "I have twenty one cats."], use_tqdm=False)
    np.testing.assert_allclose(digits.audio, words.audio, atol=0.02)
