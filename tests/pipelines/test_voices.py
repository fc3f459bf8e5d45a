"""Voices made from recordings: a NeuCodec encodes the recordings, and the codes are cached."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.codecs import write_neucodec
from support.tiny_speech import fake_codec_catalog, write_tiny_speech

from penstock import LLM
from penstock.codecs.neucodec import model as neucodec
from penstock.config import PipelineConfig
from penstock.media.audio_files import resample
from penstock.pipelines.core import SamplingParams

SAMPLE_RATE = 24000


def write_recording(file: Path, seconds: float) -> np.ndarray[Any, Any]:
    """Write a tone of rising pitch, sampled at 24 kHz. Return its samples."""
    times = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    samples = np.rint(9000 * np.sin(6.28 * (200 + 300 * times) * times)).astype("<i2")
    with wave.open(str(file), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes(samples.tobytes())
    return samples.astype(np.float32) / 32768


def open_speech(folder: Path, **settings: object) -> LLM:
    config = PipelineConfig.from_flat({"model_path": str(folder), "kv_cache_memory": 1 << 21, **settings})
    return LLM.from_config(config, catalog=fake_codec_catalog())


def test_a_recording_becomes_a_voice_whose_codes_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_neucodec(tmp_path / "codec", levels=(4, 2, 2))
    folder = write_tiny_speech(tmp_path / "model", "neutts")
    samples = write_recording(tmp_path / "ben.wav", 0.7)
    (tmp_path / "ben.txt").write_text("hi")
    settings = {"voice": (f"ben={tmp_path / 'ben.wav'}",), "codec": str(tmp_path / "codec")}
    params = SamplingParams(seed=3, top_k=-1, temperature=1, max_new_tokens=30, min_new_tokens=20)
    with open_speech(folder, **settings) as llm:
        pipeline: Any = llm.pipeline
        codes = pipeline.codec.encode(torch.from_numpy(resample(samples, SAMPLE_RATE, 16000)))
        assert pipeline.voices["ben"].codes == codes.flatten().tolist()
        assert len(codes) == 35
        assert len(set(pipeline.voices["ben"].codes)) > 3
        speech = llm.speak("a b", params, voice="ben").audio
        assert not np.array_equal(speech, llm.speak("a b", params).audio)

    def fail_if_called(*_: object) -> None:
        raise AssertionError("the encoder was loaded, although the codes are cached")

    monkeypatch.setattr(neucodec, "read_encoder", fail_if_called)
    with open_speech(folder, **settings) as llm:
        np.testing.assert_array_equal(llm.speak("a b", params, voice="ben").audio, speech)


def test_a_recording_shorter_than_a_frame_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_neucodec(tmp_path / "codec", levels=(4, 2, 2))
    folder = write_tiny_speech(tmp_path / "model", "neutts")
    write_recording(tmp_path / "ben.wav", 0.01)
    with pytest.raises(ValueError, match=r"'ben' cannot be used: .* less than a frame"):
        open_speech(folder, voice=(f"ben={tmp_path / 'ben.wav'}",), codec=str(tmp_path / "codec"))
