"""Orpheus: a Llama that generates the codes of SNAC, 7 per frame, as ``<custom_token_N>``.

With a codebook of ``size`` codes, code ``c`` at position ``p`` of a frame is the token with
``N = 10 + p * size + c``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError
from penstock.text.speech_format import SpeechFormat

_TOKEN_TEXT = "<custom_token_{}>"
_FIRST_CODE = 10
_SPEECH_START, _SPEECH_END, _HUMAN_START, _HUMAN_END, _AI_START, _AI_END = (
    _TOKEN_TEXT.format(number) for number in range(1, 7)
)
_TEXT_END = "<|eot_id|>"


class OrpheusFormat(SpeechFormat):
    """The format of the Orpheus models."""

    name = "orpheus"
    marker = _TOKEN_TEXT.format(_FIRST_CODE)
    default_codec = "hubertsiuzdak/snac_24khz"
    sampling: ClassVar[Mapping[str, float]] = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}
    max_characters = 400
    default_voices = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")

    def code_tokens(self) -> npt.NDArray[np.int64]:
        codes_per_frame = self.description.codes_per_frame or 7
        codebook_size = self.description.codebook_size or 4096
        ids = self.numbered_token_ids(_TOKEN_TEXT, _FIRST_CODE, codes_per_frame * codebook_size)
        return ids.reshape(codes_per_frame, codebook_size)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return (self.token_id(_SPEECH_END), self.token_id(_AI_END))

    def prompt(self, text: str, *, voice: str | None, codes: Sequence[int], transcription: str) -> list[int]:
        if len(codes) and not transcription:
            raise InputError("a voice to imitate needs its transcription: give audio_prompt_transcription")
        reference: list[int] = []
        if len(codes):
            speech_ids = [*self.codes.token_ids(codes), self.token_id(_SPEECH_END), self.token_id(_AI_END)]
            reference = [*self._turn_tokens(transcription), *speech_ids]
        return [*reference, *self._turn_tokens(text if voice is None else f"{voice}: {text}")]

    def _turn_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, followed by the tokens after which its speech begins."""
        end_tokens = (_TEXT_END, _HUMAN_END, _AI_START, _SPEECH_START)
        ids = self._tokenizer.encode_plain(text, add_special_tokens=True)
        return [self.token_id(_HUMAN_START), *ids, *map(self.token_id, end_tokens)]


FORMAT = OrpheusFormat
