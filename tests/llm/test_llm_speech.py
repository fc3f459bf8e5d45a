"""`LLM.speak` and `LLM.stream_speech`, with a Llama of random weights and a fake codec."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny_llm import write_tiny_llm
from support.tiny_speech import SAMPLE_RATE, SAMPLES_PER_FRAME, fake_codec_catalog, write_tiny_speech

from penstock import LLM
from penstock.config import PipelineConfig
from penstock.errors import InputError, RequestFailedError, TaskMismatchError, UnsupportedFeatureError
from penstock.llm.speech import Speech
from penstock.pipelines.core import AudioGeneratorOutput, SamplingParams

PARAMS = SamplingParams(seed=3, top_k=-1, temperature=1, max_new_tokens=60, min_new_tokens=40)
TEXTS = ["hello world", "one two three", "a b"]


def open_speech_llm(folder: Path, **settings: object) -> LLM:
    config = PipelineConfig.from_flat({"model_path": str(folder), "kv_cache_memory": 1 << 21, **settings})
    return LLM.from_config(config, catalog=fake_codec_catalog())


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("models")
    with wave.open(str(folder / "ben.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(2 * SAMPLE_RATE)
        file.writeframes(np.linspace(-20000, 20000, 40 * SAMPLES_PER_FRAME).astype("<i2").tobytes())
    (folder / "ben.txt").write_text("I am Ben.\n")
    (folder / "carl.json").write_text(json.dumps({"codes": [1, 2, 3], "transcription": "I am Carl."}))
    model = write_tiny_speech(folder / "model", max_characters=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        voices = (f"ben={folder / 'ben.wav'}", f"carl={folder / 'carl.json'}", "dora=7,7,7")
        with open_speech_llm(model, voice=voices) as llm:
            yield llm


def test_one_text_gives_one_speech_and_several_a_list(llm: LLM) -> None:
    speeches = llm.speak(TEXTS, PARAMS)
    assert [type(speech) for speech in speeches] == [Speech] * 3
    for text, speech in zip(TEXTS, speeches, strict=True):
        single_audio = llm.speak(text, PARAMS)
        np.testing.assert_array_equal(single_audio.audio, speech.audio)
        assert single_audio.sample_rate == SAMPLE_RATE
        assert single_audio.audio.dtype == np.float32
        assert single_audio.seconds == len(single_audio.audio) / SAMPLE_RATE > 0
        assert 40 <= single_audio.num_tokens <= 60
        assert single_audio.is_cut == (
            single_audio.num_tokens == 60 and len(single_audio.audio) == 60 * SAMPLES_PER_FRAME
        )
    assert llm.speak([], PARAMS) == []


def test_joined_stream_chunks_equal_the_audio_of_speak(llm: LLM) -> None:
    long_text = "One sentence is this. Another one follows it. And here is the third of them."
    assert len(llm.tokenizer.split(long_text)) > 1
    for text in (TEXTS[0], long_text):
        stream = llm.stream_speech(text, PARAMS)
        chunks = list(stream)
        assert all(isinstance(chunk, AudioGeneratorOutput) for chunk in chunks)
        assert [chunk.is_done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        full_audio = llm.speak(text, PARAMS)
        np.testing.assert_array_equal(
            np.concatenate([chunk.audio_data.numpy() for chunk in chunks]), full_audio.audio
        )
        assert len(chunks) > 1
        last_metadata = chunks[-1].metadata
        assert (last_metadata["sample_rate"], last_metadata["num_tokens"]) == (
            SAMPLE_RATE,
            full_audio.num_tokens,
        )
        assert last_metadata["seconds"] == full_audio.seconds
        assert stream.sample_rate == SAMPLE_RATE


def test_a_closed_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream_speech(TEXTS[0], PARAMS)
    next(stream)
    with pytest.raises(UnsupportedFeatureError, match="two calls at the same time"):
        llm.speak("a", PARAMS)
    stream.close()
    assert llm.speak("a", PARAMS).num_tokens
    assert llm.pipeline.kv.num_free_blocks == llm.pipeline.kv.num_blocks


def test_voices_change_the_speech_and_invalid_voices_are_refused(llm: LLM) -> None:
    ben_voice, carl_voice, dora_voice = (llm.pipeline.voices[name] for name in ("ben", "carl", "dora"))
    assert (ben_voice.transcription, carl_voice.transcription, dora_voice.codes) == (
        "I am Ben.",
        "I am Carl.",
        [7, 7, 7],
    )
    assert len(ben_voice.codes) == 20, "the recording is resampled to the rate of the codec"
    assert ben_voice.codes == sorted(ben_voice.codes)
    speech = llm.speak("hi", PARAMS, voice="carl")
    cloned_speech = llm.speak(
        "hi", PARAMS, audio_prompt_tokens=[1, 2, 3], audio_prompt_transcription="I am Carl."
    )
    np.testing.assert_array_equal(speech.audio, cloned_speech.audio)
    assert not np.array_equal(speech.audio, llm.speak("hi", PARAMS).audio)
    with pytest.raises(InputError, match="voice 'eve' is unknown: known are ben, carl, dora"):
        llm.speak("hi", PARAMS, voice="eve")
    with pytest.raises(InputError, match="needs its transcription"):
        llm.speak("hi", PARAMS, voice="dora")
    with pytest.raises(InputError, match="give either voice or audio_prompt_tokens"):
        llm.speak("hi", PARAMS, voice="ben", audio_prompt_tokens=[1])
    with pytest.raises(InputError, match=r"codes must be from 0 to 15, were from 1 to 99"):
        llm.speak("hi", PARAMS, audio_prompt_tokens=[1, 99], audio_prompt_transcription="x")


def test_a_voice_is_encoded_once_and_invalid_files_and_codes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.tiny_speech import FakeCodec

    from penstock.pipelines.voices import load_voices

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "codec").mkdir()
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.zeros(8 * SAMPLES_PER_FRAME, "<i2").tobytes())
    codec = FakeCodec(1)
    encoded_lengths = []
    original_encode = codec.encode
    monkeypatch.setattr(
        codec, "encode", lambda samples: (encoded_lengths.append(len(samples)), original_encode(samples))[1]
    )
    voices = [f"a={tmp_path / 'a.wav'}"]
    loaded_voices = load_voices(voices, codec, tmp_path / "codec")
    assert load_voices(voices, codec, tmp_path / "codec") == loaded_voices
    assert encoded_lengths == [4 * SAMPLES_PER_FRAME]
    for invalid, message in [
        ("a=missing.wav", "'a' cannot be used: .*No such file"),
        ("a=1,2,99", "codes must be from 0 to 15"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_voices([invalid], codec, tmp_path / "codec")
    with pytest.raises(ValueError, match="'a' is given twice"):
        load_voices([*voices, *voices], codec, tmp_path / "codec")


def test_invalid_texts_and_methods_of_other_tasks_are_refused(llm: LLM) -> None:
    for text in ("", "  \n"):
        with pytest.raises(InputError, match="the input is empty"):
            llm.speak(text, PARAMS)
    with pytest.raises(InputError, match="the input is empty") as caught:
        llm.speak(["a", ""], PARAMS)
    assert caught.value.__notes__ == ["in text 2 of 2"]
    with pytest.raises(TaskMismatchError, match=r"LLM.generate needs a model of the task text-generation"):
        llm.generate("a")
    with pytest.raises(RequestFailedError, match="7 tokens without a whole frame"):
        llm.speak("a", SamplingParams(max_new_tokens=7, allowed_token_ids=[65]))
    assert llm.pipeline.kv.num_free_blocks == llm.pipeline.kv.num_blocks


def test_speech_of_a_text_model_is_refused(tmp_path: Path) -> None:
    with (
        LLM(str(write_tiny_llm(tmp_path / "m")), kv_cache_memory=1 << 21) as llm,
        pytest.raises(TaskMismatchError, match=r"LLM.speak needs a model of the task audio-generation"),
    ):
        llm.speak("a")  # type: ignore[attr-defined]
