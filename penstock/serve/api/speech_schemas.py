"""The schema of the request body of ``/v1/audio/speech``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.serve.api.schemas import Label, Number, RequestBody, TokenIds
from penstock.serve.api.unsupported import RefusedField

MAX_INPUT_CHARACTERS = 4096
"""Maximum length of ``input`` in characters, as in OpenAI's API."""


class VoiceId(RequestBody):
    """A voice in the form of a JSON object."""

    id: str


class SpeechBody(RequestBody):
    """``POST /v1/audio/speech``."""

    unsupported: ClassVar = {
        "instructions": RefusedField(
            "the model takes no instructions: choose a voice, or write emotions as the model's card says",
            ("",),
        ),
        "speed": RefusedField("the model speaks at one speed: change the speed of the audio", (1, 1.0)),
    }

    model: str = ""
    """Defaults to the served model, which `penstock.serve.api.text_generation.checked_body` sets."""
    input: Annotated[str, Field(min_length=1, max_length=MAX_INPUT_CHARACTERS)]
    voice: str | VoiceId | None = None
    """The name of a voice. ``default``, an empty name and None select the model's default voice."""
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = "mp3"
    """The format of the audio. ``pcm`` is 16-bit samples without a header."""
    stream_format: Literal["audio", "sse"] = "audio"
    """Whether the response body is the audio itself or events that contain the audio."""

    # The fields below are not in the OpenAI API.
    audio_prompt_tokens: TokenIds | None = None
    """The speech token ids of a recording. The model imitates the voice of the recording."""
    audio_prompt_transcription: str | None = None
    """The transcription of ``audio_prompt_tokens``."""
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Maximum number of speech tokens of each part of the text."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: Label | None = None

    @property
    def voice_name(self) -> str | None:
        """The name of the voice; None for the model's default voice."""
        name = self.voice.id if isinstance(self.voice, VoiceId) else self.voice
        return None if name in (None, "", "default") else name
