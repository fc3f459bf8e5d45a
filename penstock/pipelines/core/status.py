"""The status of a request, and the task of a pipeline."""

from __future__ import annotations

from enum import Enum


class TextGenerationStatus(str, Enum):
    """Whether a request is active, or the reason why it has ended."""

    ACTIVE = "active"
    END_OF_SEQUENCE = "end_of_sequence"
    """An end-of-sequence token or sequence was generated. Its last token is not in the output."""
    MAXIMUM_LENGTH = "maximum_length"
    """Prompt and output together reached the maximum length. The last token is in the output."""
    CANCELLED = "cancelled"
    """The request was cancelled."""

    @property
    def is_done(self) -> bool:
        """True for all statuses except ``ACTIVE``."""
        return self is not TextGenerationStatus.ACTIVE


class PipelineTask(str, Enum):
    """The task of a pipeline: the kind of output that it computes."""

    TEXT_GENERATION = "text_generation"
    EMBEDDINGS_GENERATION = "embeddings_generation"
    AUDIO_GENERATION = "audio_generation"
    SPEECH_TOKEN_GENERATION = "speech_token_generation"

    @property
    def option(self) -> str:
        """The name of the task as the value of ``--task``, such as ``text-generation``."""
        return self.value.replace("_", "-")
