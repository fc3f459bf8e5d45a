"""NeuTTS: small language models that generate the codes of NeuCodec, one per frame, as ``<|speech_N|>``.

By default the models read phonemes. A recording with its transcription can determine the voice. The prompt
then contains the transcription, the text and the codes of the recording, which the model continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError
from penstock.text.speech_format import SpeechFormat

_SPEECH_START, _SPEECH_END = "<|SPEECH_GENERATION_START|>", "<|SPEECH_GENERATION_END|>"
_TEXT_START, _TEXT_END = "<|TEXT_PROMPT_START|>", "<|TEXT_PROMPT_END|>"
_TASK, _ANSWER = "user: Convert the text to speech:", "\nassistant:"


class NeuTTSFormat(SpeechFormat):
    """The format of the NeuTTS models."""

    name = "neutts"
    marker = _SPEECH_START
    default_codec = "neuphonic/neucodec"
    reads_phonemes = True
    sampling: ClassVar[Mapping[str, float]] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    max_characters = 300

    def code_tokens(self) -> npt.NDArray[np.int64]:
        codes_per_frame = self.description.codes_per_frame or 1
        codebook_size = self.description.codebook_size or 65536
        ids = self.numbered_token_ids("<|speech_{}|>", 0, codes_per_frame * codebook_size)
        return ids.reshape(codes_per_frame, codebook_size)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return (self.token_id(_SPEECH_END),)

    def prompt(self, text: str, *, voice: str | None, codes: Sequence[int], transcription: str) -> list[int]:
        if len(codes) and not transcription:
            raise InputError("a voice to imitate needs its transcription: give audio_prompt_transcription")
        if voice is not None:
            raise InputError(f"the model was not trained on voices with names: {voice!r} is unknown")
        encode = self._tokenizer.encode_plain
        return [
            *encode(_TASK, add_special_tokens=True),
            self.token_id(_TEXT_START),
            *encode(f"{transcription} {text}" if len(codes) else text),
            self.token_id(_TEXT_END),
            *encode(_ANSWER),
            self.token_id(_SPEECH_START),
            *self.codes.token_ids(codes),
        ]


FORMAT = NeuTTSFormat
