"""``penstock speak``, run in this process."""

from __future__ import annotations

import io
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.tiny_llm import write_tiny_llm
from support.tiny_speech import SAMPLE_RATE, FakeCodecs, write_tiny_speech

from penstock.cli import cli


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture(autouse=True)
def _fake_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipelines.audio.create_audio.__defaults__", (FakeCodecs(),))


def run_speak(*arguments: Any, text: str | None = None) -> Result:
    flags = ("--kv-cache-memory", "2MiB", "--seed", "3", "--max-new-tokens", "50")
    return CliRunner().invoke(cli, ["speak", *map(str, arguments), *flags], input=text)


def test_audio_is_written_in_each_uncompressed_format(model: Path, tmp_path: Path) -> None:
    result = run_speak("hello world", "-o", tmp_path / "a.wav", "--model", model)
    assert result.exit_code == 0, result.output
    assert re.search(r"s of audio \(\d+ tokens\) in .* s: real-time factor \d", result.stderr)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (SAMPLE_RATE, 1, 2)
        samples = file.readframes(file.getnframes())
    assert len(samples) > 100
    run_speak("-o", tmp_path / "b.pcm", "--model", model, text="hello world\n")
    assert (tmp_path / "b.pcm").read_bytes() == samples
    output = run_speak("hello world", "-o", "-", "--model", model)
    with wave.open(io.BytesIO(output.stdout_bytes)) as file:
        assert file.readframes(file.getnframes()) == samples
    assert np.frombuffer(samples, "<i2").any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "-o", "x.aac"], "x.aac: the suffix must be one of wav, pcm, flac, mp3, opus"),
        (["  "], "there is no text to speak"),
        (["a", "--voice-name", "eve"], "voice 'eve' is unknown"),
    ],
)
def test_invalid_arguments_are_refused(model: Path, arguments: list[str], message: str) -> None:
    result = run_speak(*arguments, "--model", model)
    assert result.exit_code != 0
    assert message in str(result.exception) + result.stderr


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    result = run_speak("a", "--model", write_tiny_llm(tmp_path / "m"))
    assert (
        "penstock speak needs a model of the task audio-generation" in str(result.exception) + result.stderr
    )
