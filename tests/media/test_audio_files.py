"""Audio files: written whole and in chunks, read back, and resampled."""

from __future__ import annotations

import io
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InputError, MissingDependencyError
from penstock.media import audio_files
from penstock.media.audio_files import AUDIO_FORMATS, AudioEncoder, encode_audio, read_audio, resample

RATE = 24000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)


def encode_in_chunks(name: str, size: int = 1700) -> bytes:
    encoder = AudioEncoder(name, RATE)
    chunks = [encoder.add(TONE[start : start + size]) for start in range(0, len(TONE), size)]
    return b"".join([*chunks, encoder.finish()])


def test_wav_and_pcm_need_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    audio_files._soundfile.cache_clear()
    with wave.open(io.BytesIO(encode_audio(TONE, RATE, "wav"))) as file:
        assert (file.getframerate(), file.getnframes()) == (RATE, RATE)
        frames = file.readframes(RATE)
    assert np.abs(np.frombuffer(frames, "<i2") / 32767 - TONE).max() < 1e-4
    assert encode_in_chunks("pcm") == encode_audio(TONE, RATE, "pcm") == frames
    stream = encode_in_chunks("wav")
    assert stream[44:] == frames
    assert stream[40:44] == b"\xff" * 4
    assert AudioEncoder("wav", RATE).finish()[:4] == b"RIFF", "a stream without samples consists of a header"
    (tmp_path / "a.wav").write_bytes(encode_audio(TONE, RATE, "wav"))
    samples, rate = read_audio(tmp_path / "a.wav")
    assert (rate, samples.dtype) == (RATE, np.float32)
    assert np.abs(samples - TONE).max() < 1e-4
    for name in set(AUDIO_FORMATS) - {"wav", "pcm"}:
        with pytest.raises(MissingDependencyError, match=rf"format {name} .*penstock-llm\[audio\]"):
            AudioEncoder(name, RATE)
    audio_files._soundfile.cache_clear()


def test_samples_beyond_the_range_are_clipped() -> None:
    data = encode_audio(np.array([2, -2, 0], np.float32), RATE, "pcm")
    assert np.frombuffer(data, "<i2").tolist() == [32767, -32767, 0]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match="'aac' is unknown: known are wav, pcm, flac, mp3, opus"):
        AudioEncoder("aac", RATE)


@pytest.mark.parametrize("name", ["flac", "mp3", "opus"])
def test_compressed_formats_can_be_read_back(name: str, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    full_samples, rate = soundfile.read(io.BytesIO(encode_audio(TONE, RATE, name)))
    assert (len(full_samples), rate) == (RATE, RATE)
    file = tmp_path / f"a.{name}"
    file.write_bytes(encode_in_chunks(name))
    samples, rate = read_audio(file)
    assert rate == RATE
    assert len(samples) > 0.4 * RATE
    assert 0.3 < np.abs(samples[4000:8000]).max() < 0.6


@pytest.mark.parametrize("size", [1, 1700, 4096, 4608, RATE])
def test_flac_in_chunks_has_all_samples(size: int) -> None:
    """The header of a FLAC file contains the number of samples, so all bytes are returned at the end."""
    soundfile = pytest.importorskip("soundfile")
    tone = TONE[: 5000 if size == 1 else RATE]
    encoder = AudioEncoder("flac", RATE)
    chunks = [encoder.add(tone[start : start + size]) for start in range(0, len(tone), size)]
    samples, rate = soundfile.read(io.BytesIO(b"".join([*chunks, encoder.finish()])), dtype="float32")
    assert (len(samples), rate) == (len(tone), RATE)
    assert np.abs(samples - tone).max() < 1e-4


def test_each_chunk_of_an_mp3_stream_returns_bytes() -> None:
    pytest.importorskip("soundfile")
    encoder = AudioEncoder("mp3", RATE)
    assert all(encoder.add(TONE[start : start + 4000]) for start in range(0, 20000, 4000))


def test_a_file_that_is_not_audio_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    (tmp_path / "a.wav").write_bytes(b"no audio at all")
    with pytest.raises(InputError, match="cannot be read as an audio file"):
        read_audio(tmp_path / "a.wav")


@pytest.mark.parametrize("target_rate", [8000, 16000, 44100])
def test_resampling_keeps_the_tone(target_rate: int) -> None:
    samples = resample(TONE, RATE, target_rate)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(target_rate) / target_rate)
    assert len(samples) == target_rate
    assert np.abs(samples - expected)[200:-200].max() < 1e-3
    assert resample(TONE, RATE, RATE) is TONE
