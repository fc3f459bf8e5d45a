"""The context of a speech request: its text tokens, its speech tokens, and the progress of their decoding."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.pipelines.core.context import TextContext
from penstock.pipelines.core.interfaces import MissingValueError
from penstock.pipelines.core.status import TextGenerationStatus
from penstock.pipelines.core.tokens import CHUNK_SIZE


def _no_tokens() -> npt.NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


def _empty_chunk() -> npt.NDArray[np.int32]:
    return np.zeros(CHUNK_SIZE, dtype=np.int32)


class VoicePrompt(msgspec.Struct, frozen=True):
    """A voice to imitate."""

    name: str
    codes: list[int]
    """Codes of the audio codec, frame after frame."""
    transcription: str = ""
    """The transcription of the recording."""


class _SpeechContext(TextContext, kw_only=True, omit_defaults=True):
    """The keyword-only fields of a `TTSContext`."""

    streaming: bool = False
    """Whether audio is streamed. The first chunks are then short, for low latency."""
    num_dropped_tokens: int = 0
    """Number of generated tokens that are not speech codes or belong to an incomplete frame."""

    _num_parsed_tokens: int = 0


class TTSContext(_SpeechContext, tag=True, omit_defaults=True):
    """A text-to-speech request.

    It has two states: ``speech_token_status`` of the language model, which generates speech tokens, and
    ``audio_generation_status`` of the decoder, which turns them into audio. ``is_done`` refers to the audio.
    ``status`` and ``update_status`` would be ambiguous and raise ``ValueError``.

    The buffer of speech tokens has this layout:

        | decoded ................. | speech tokens to decode | zeros up to the capacity |
        0                    decoded_index           len(speech_tokens)
    """

    audio_prompt_tokens: npt.NDArray[np.int32] = msgspec.field(default_factory=_no_tokens)
    """Speech tokens of the voice to imitate."""
    prev_samples_beyond_offset: int = 0
    """Not used by Penstock. A caller's own decoder may keep a number of audio samples here."""

    _speech_tokens: npt.NDArray[np.int32] = msgspec.field(default_factory=_empty_chunk)
    _speech_token_end_idx: int = 0
    _decoded_index: int = 0
    _block_counter: int = 0
    _audio_generation_status: TextGenerationStatus = TextGenerationStatus.ACTIVE

    def __post_init__(self) -> None:
        super().__post_init__()
        self._speech_tokens = np.array(self._speech_tokens)  # a writable copy

    @property
    def speech_tokens(self) -> npt.NDArray[np.int32]:
        """The speech tokens so far: a view of the buffer. Tokens that are added later are not in the view."""
        return self._speech_tokens[: self._speech_token_end_idx]

    @property
    def block_counter(self) -> int:
        """Number of calls of :meth:`update_speech_tokens`."""
        return self._block_counter

    @property
    def decoded_index(self) -> int:
        """Number of speech tokens that are decoded to audio."""
        return self._decoded_index

    def set_decoded_index(self, idx: int) -> None:
        """Set the number of speech tokens that are decoded to audio.

        Raises:
            ValueError: the number is negative.
        """
        if idx < 0:
            raise ValueError(f"decoded_index must be at least 0, was {idx}")
        self._decoded_index = idx

    def update_speech_tokens(self, new_tokens: npt.NDArray[np.int32]) -> None:
        """Append speech tokens, ``[n]``."""
        start = self._speech_token_end_idx
        end = start + len(new_tokens)
        if end >= self._speech_tokens.size:
            capacity = -(-len(new_tokens) // CHUNK_SIZE) * CHUNK_SIZE
            larger_buffer = np.zeros(self._speech_tokens.size + capacity, dtype=self._speech_tokens.dtype)
            larger_buffer[:start] = self.speech_tokens
            self._speech_tokens = larger_buffer
        self._speech_tokens[start:end] = new_tokens
        self._speech_token_end_idx = end
        self._block_counter += 1

    def next_speech_tokens(
        self, audio_chunk_size: int | None = None, buffer: int | None = None
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Return the next speech tokens to decode, and the number of decoded tokens that precede them.

        ``decoded_index`` does not change: the caller sets it with :meth:`set_decoded_index` after decoding.

        Args:
            audio_chunk_size: maximum number of tokens to decode; None means all.
            buffer: maximum number of decoded tokens to prepend, as the decoder's context; None means 0.
        """
        decoded, end = self._decoded_index, self._speech_token_end_idx
        context_size = min(buffer or 0, decoded)
        if audio_chunk_size is not None:
            end = min(end, decoded + audio_chunk_size)
        return self._speech_tokens[decoded - context_size : end], context_size

    def has_undecoded_speech_tokens(self, exclude_last_n: int = 0) -> bool:
        """Return whether speech tokens before the last ``exclude_last_n`` are not decoded yet."""
        return self._decoded_index < self._speech_token_end_idx - exclude_last_n

    @property
    def num_parsed_tokens(self) -> int:
        """Number of generated tokens that are in ``speech_tokens`` or were dropped."""
        return self._num_parsed_tokens

    def mark_parsed(self, num_tokens: int, num_dropped: int = 0) -> None:
        """Record that ``num_tokens`` further tokens were parsed. ``num_dropped`` of them were dropped."""
        self._num_parsed_tokens += num_tokens
        self.num_dropped_tokens += num_dropped

    @property
    def speech_token_status(self) -> TextGenerationStatus:
        """Status of the language model, which generates the speech tokens."""
        return self._status

    def update_speech_token_status(self, status: TextGenerationStatus) -> None:
        """Set the status of the language model."""
        self._status = status

    @property
    def audio_generation_status(self) -> TextGenerationStatus:
        """Status of the audio generation."""
        return self._audio_generation_status

    def update_audio_generation_status(self, status: TextGenerationStatus) -> None:
        """Set the status of the audio generation."""
        self._audio_generation_status = status

    @property
    def is_done(self) -> bool:
        """Whether audio generation has ended."""
        return self._audio_generation_status.is_done

    @property
    def status(self) -> TextGenerationStatus:
        """Raise ``ValueError``, because the context has two states, each with its own property."""
        raise MissingValueError("Please call `speech_token_status` or `audio_generation_status` instead.")

    def update_status(self, status: TextGenerationStatus) -> None:
        """Raise ``ValueError``, because the context has two states, each with its own setter."""
        raise ValueError(
            "Please call `update_speech_token_status` or `update_audio_generation_status` instead."
        )
