"""`SpeechConfig`: audio codec, speech format and voices of speech models."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.config.settings import COUNT, TEXT, Rule, check_fields, setting

_VOICES = Rule(
    "NAME=FILE or NAME=CODES, such as anna=anna.wav or anna=12,7,81",
    lambda value: (
        isinstance(value, tuple)
        and all(isinstance(item, str) and item.partition("=")[0] and item.partition("=")[2] for item in value)
    ),
)


def _split_at_voice_names(text: str) -> tuple[str, ...]:
    """Split at commas that are followed by ``NAME=``."""
    return tuple(part for part in re.split(r",(?=[^,=]+=)", text) if part)


@dataclass(frozen=True, kw_only=True)
class SpeechConfig:
    """Audio codec, speech format and voices of a speech model.

    Raises:
        ConfigError: a field has an invalid value.
    """

    codec: str | None = setting(
        None,
        TEXT,
        "Checkpoint of the audio codec: a folder or an id on the Hugging Face hub; by default the codec "
        "that the checkpoint names, or else the codec of the speech format.",
    )
    codec_encoding: str | None = setting(
        None,
        TEXT,
        "Encoding of the weights of the codec's large layers; by default the encoding of the model's weights "
        "if the codec supports it, otherwise float32.",
    )
    speech_format: str | None = setting(
        None,
        TEXT,
        "Format of prompts and speech tokens: orpheus or neutts; by default detected from speech_config.json "
        "and the vocabulary.",
    )
    voice: tuple[str, ...] = setting(
        (),
        _VOICES,
        "A voice to clone, as NAME=FILE or NAME=CODES. FILE is an audio file, such as anna.wav with its "
        "transcription in anna.txt, or a JSON file with codes and transcription. May be repeated; in an "
        "environment variable or a configuration file, commas separate voices.",
        parse=_split_at_voice_names,
    )
    audio_chunk_frames: int | None = setting(
        None,
        COUNT,
        "Number of codec frames in each chunk of an audio stream; by default the first chunk has 0.15 "
        "seconds, and later chunks have up to 2 seconds.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
