"""Speech formats: prompts, frames of codes, detection of the format, sentences, and phonemes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.tiny_llm import write_tiny_llm
from support.tiny_speech import CODEBOOK_SIZE, write_tiny_speech

from penstock.config import PipelineConfig
from penstock.errors import CheckpointError, ConfigError, InputError, UnsupportedFeatureError
from penstock.pipelines.core import AudioGenerationRequest, PipelineTask, SamplingParams
from penstock.text.phonemes import phonemize
from penstock.text.sentences import split_text
from penstock.text.speech_format import SpeechCodes, format_name, speech_formats
from penstock.text.speech_tokenizer import SpeechTokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SpeechTokenizer]:
    folder = tmp_path_factory.mktemp("models")
    return {name: SpeechTokenizer(write_tiny_speech(folder / name, name)) for name in speech_formats()}


def build_prompt(tokenizer: SpeechTokenizer, **fields: object) -> str:
    """Return the prompt of a request as text with special tokens."""
    context = tokenizer.build_speech_context(AudioGenerationRequest("r", 0, "m", **fields))  # type: ignore[arg-type]
    return tokenizer.decode_ids(context.prompt_tokens, skip_special_tokens=False)


def test_orpheus_prompts_contain_voice_and_cloned_codes(tokenizers: dict[str, SpeechTokenizer]) -> None:
    tokenizer = tokenizers["orpheus"]
    start, end = "<custom_token_3>", "<|eot_id|><custom_token_4><custom_token_5><custom_token_1>"
    assert build_prompt(tokenizer, input="Hi") == f"{start}Hi{end}"
    assert build_prompt(tokenizer, input=" Hi\n", voice="tara") == f"{start}tara: Hi{end}"
    cloning_prompt = build_prompt(
        tokenizer, input="Hi", audio_prompt_tokens=[0, 1, 15], audio_prompt_transcription="Ho"
    )
    codes = "".join(
        f"<custom_token_{10 + position * CODEBOOK_SIZE + code}>" for position, code in enumerate([0, 1, 15])
    )
    assert cloning_prompt == f"{start}Ho{end}{codes}<custom_token_2><custom_token_6>{start}Hi{end}"
    with pytest.raises(InputError, match="voice 'eve' is unknown: the model has tara, leah"):
        build_prompt(tokenizer, input="Hi", voice="eve")
    with pytest.raises(InputError, match="2 speech codes are not a whole number of frames: a frame has 3"):
        build_prompt(tokenizer, input="Hi", audio_prompt_tokens=[0, 1], audio_prompt_transcription="Ho")


def test_neutts_prompts_contain_text_and_cloned_codes(tokenizers: dict[str, SpeechTokenizer]) -> None:
    tokenizer = tokenizers["neutts"]
    task, end = "user: Convert the text to speech:<|TEXT_PROMPT_START|>", "<|TEXT_PROMPT_END|>\nassistant:"
    assert build_prompt(tokenizer, input="Hi") == f"{task}Hi{end}<|SPEECH_GENERATION_START|>"
    cloning_prompt = build_prompt(
        tokenizer, input="Hi", audio_prompt_tokens=[3, 1], audio_prompt_transcription="Ho"
    )
    assert cloning_prompt == f"{task}Ho Hi{end}<|SPEECH_GENERATION_START|><|speech_3|><|speech_1|>"
    with pytest.raises(InputError, match="'tara' is unknown"):
        build_prompt(tokenizer, input="Hi", voice="tara")


def test_special_tokens_in_a_text_are_text(tokenizers: dict[str, SpeechTokenizer]) -> None:
    tokenizer = tokenizers["neutts"]
    context = tokenizer.build_speech_context(
        AudioGenerationRequest("r", 0, "m", input="<|SPEECH_GENERATION_END|>")
    )
    assert tokenizer.speech_format.end_token_ids[0] not in context.prompt_tokens


def test_an_explicit_prompt_replaces_the_prompt_of_the_format(tokenizers: dict[str, SpeechTokenizer]) -> None:
    tokenizer = tokenizers["neutts"]
    assert build_prompt(tokenizer, input="Hi", prompt="verbatim<|speech_1|>") == "verbatim<|speech_1|>"
    ids = [5, 6, 7]
    context = tokenizer.build_speech_context(AudioGenerationRequest("r", 0, "m", prompt=ids))
    assert context.prompt_tokens.tolist() == ids
    assert context.eos_token_ids >= set(tokenizer.speech_format.end_token_ids)
    for invalid in ([], [10**6]):
        with pytest.raises(InputError):
            tokenizer.build_speech_context(AudioGenerationRequest("r", 0, "m", prompt=invalid))
    params = SamplingParams(stop=["a"])
    with pytest.raises(UnsupportedFeatureError, match="stop_token_ids"):
        tokenizer.build_speech_context(AudioGenerationRequest("r", 0, "m", input="a", sampling_params=params))


CODES = SpeechCodes(np.arange(100, 112, dtype=np.int64).reshape(3, 4))
"""Three codes per frame, each from 0 to 3. Their tokens are 100 to 103, 104 to 107 and 108 to 111."""


@pytest.mark.parametrize(
    ("tokens", "codes", "num_parsed", "num_dropped"),
    [
        ([], [], 0, 0),
        ([101, 105, 111], [1, 1, 3], 3, 0),
        ([101, 105], [], 0, 0),
        ([101, 105, 111, 100], [1, 1, 3], 3, 0),
        ([7, 101, 7, 105, 111], [1, 1, 3], 5, 2),
        ([105, 111, 101, 105, 111], [1, 1, 3], 5, 2),
        ([101, 111, 100, 104, 108], [0, 0, 0], 5, 2),
        ([101, 102, 104, 108], [2, 0, 0], 4, 1),
        ([101, 105, 102, 104, 110], [2, 0, 2], 5, 2),
        ([7, 8, 9], [], 3, 3),
        ([10**6, 101, 105, 111], [1, 1, 3], 4, 1),
    ],
)
def test_tokens_are_parsed_into_complete_frames(
    tokens: list[int], codes: list[int], num_parsed: int, num_dropped: int
) -> None:
    result = CODES.parse(np.array(tokens, np.int64))
    assert (result[0].tolist(), *result[1:]) == (codes, num_parsed, num_dropped)
    incremental_codes, start = [], 0
    for end in range(len(tokens) + 1):
        frame_codes, count, _ = CODES.parse(np.array(tokens[start:end], np.int64))
        incremental_codes += frame_codes.tolist()
        start += count
    assert incremental_codes == codes


def test_codes_are_converted_to_tokens() -> None:
    assert CODES.token_ids([1, 1, 3, 0, 0, 0]) == [101, 105, 111, 100, 104, 108]
    with pytest.raises(InputError, match="from 0 to 3, were from 0 to 4"):
        CODES.token_ids([0, 4, 0])


@pytest.mark.parametrize("name", ["orpheus", "neutts"])
def test_the_format_is_detected(name: str, tmp_path: Path) -> None:
    folder = write_tiny_speech(tmp_path / "m", name)
    assert format_name(folder) == name
    assert PipelineConfig.from_flat({"model_path": str(folder)}).model.pipeline_task is (
        PipelineTask.AUDIO_GENERATION
    )
    (folder / "speech_config.json").unlink()
    assert PipelineConfig.from_flat({"model_path": str(folder)}).model.pipeline_task is (
        PipelineTask.AUDIO_GENERATION
    )
    with pytest.raises(CheckpointError, match="has no token"):
        SpeechTokenizer(folder)  # the published formats have larger codebooks than the tiny model
    text = write_tiny_llm(tmp_path / "text")
    assert format_name(text) is None
    with pytest.raises(CheckpointError, match=r"Give --speech-format \(neutts, orpheus\)"):
        SpeechTokenizer(text)
    with pytest.raises(ConfigError, match="must be one of neutts, orpheus, was 'other'"):
        format_name(folder, "other")


def test_numbers_are_written_as_words_if_configured(
    tokenizers: dict[str, SpeechTokenizer], tmp_path: Path
) -> None:
    tokenizer = SpeechTokenizer(
        write_tiny_speech(tmp_path / "m", numbers="en", max_characters=30, phonemes=False)
    )
    assert "TEXT_PROMPT_START|>ten cats<" in build_prompt(tokenizer, input="10 cats").replace("Ġ", " ")
    assert tokenizer.split("It has 21 cats. It has 33 dogs.") == [
        "It has twenty one cats.",
        "It has thirty three dogs.",
    ]
    assert tokenizers["orpheus"].split("10 cats") == ["10 cats"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"frmat": "neutts"}, "unknown key 'frmat'"),
        ({"codebook_size": "many"}, "codebook_size must be of type int: 'many'"),
        ({"format": "other"}, "must be one of neutts, orpheus"),
        ({"numbers": "tlh"}, "numbers must be one of en: 'tlh'"),
    ],
)
def test_an_invalid_speech_config_is_refused(
    content: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = write_tiny_speech(tmp_path / "m")
    (folder / "speech_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        SpeechTokenizer(folder)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("One. Two!", 50, ["One. Two!"]),
        ("One sentence. Another one! A third?", 26, ["One sentence. Another one!", "A third?"]),
        ("A long clause, and another, here.", 20, ["A long clause,", "and another, here."]),
        ("word " * 5, 11, ["word word", "word word", "word"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        ("3.14 is pi. Yes.", 12, ["3.14 is pi.", "Yes."]),
        ("  ", 5, []),
    ],
)
def test_long_texts_are_split(text: str, limit: int, expected: list[str]) -> None:
    assert split_text(text, limit) == expected


def test_texts_are_split_at_each_sentence_if_configured(tmp_path: Path) -> None:
    text = "One. Two, or two! A third sentence?"
    expected = ["One.", "Two, or two!", "A third", "sentence?"]
    assert split_text(text, 12, at_each_sentence=True) == expected
    folder = write_tiny_speech(tmp_path / "m", splits_sentences=True, phonemes=False)
    assert SpeechTokenizer(folder).split(text) == ["One.", "Two, or two!", "A third sentence?"]


def test_espeak_converts_words_to_phonemes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedFeatureError, match="espeak-ng is not installed"):
        phonemize("hi", "en-us")
    program = tmp_path / "espeak-ng"
    program.write_text('#!/bin/sh\nread -r line\n[ "$5" = xx ] && exit 1\necho "(fr)[$line](en)"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert phonemize("Hi, you (all)!", "en-us") == "[Hi], [you] ([all])!"
    assert phonemize("...", "en-us") == "..."


def test_prompts_of_a_phoneme_model_contain_phonemes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.text.speech_tokenizer.phonemize", lambda text, language: f"/{text}/")
    tokenizer = SpeechTokenizer(write_tiny_speech(tmp_path / "m", phonemes=True))
    text = build_prompt(tokenizer, input="Hi", audio_prompt_tokens=[3], audio_prompt_transcription="Ho")
    assert "<|TEXT_PROMPT_START|>/Ho/ /Hi/<|TEXT_PROMPT_END|>" in text
