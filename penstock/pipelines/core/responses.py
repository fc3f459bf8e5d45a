"""Responses of pipelines. ``is_done`` is True if the request has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.pipelines.core.status import TextGenerationStatus

if TYPE_CHECKING:
    import torch


class LogProbabilities(msgspec.Struct):
    """Log probabilities of an output token and, if the prompt is echoed, of the prompt tokens before it.

    Both lists have one entry per position. The dictionary of a position contains the requested number of most
    probable token ids, and the token at this position.
    """

    token_log_probabilities: list[float]
    """Log probability of the token at each position."""
    top_log_probabilities: list[dict[int, float]]
    """For each position: log probability by token id, most probable token first."""

    def cut(self, top_n: int, tokens: Sequence[int]) -> LogProbabilities:
        """Return a copy with the ``top_n`` most probable tokens and the token itself at each position.

        Args:
            top_n: at most the requested number; 0 keeps only ``tokens``.
            tokens: the token at each position.
        """
        tops = [
            dict(islice(top.items(), top_n)) | {token: value}
            for top, token, value in zip(
                self.top_log_probabilities, tokens, self.token_log_probabilities, strict=True
            )
        ]
        return LogProbabilities(list(self.token_log_probabilities), tops)


class TextResponse(msgspec.Struct):
    """One generated token."""

    next_token: int | str
    """The token's id, or its text if the pipeline generates text."""
    log_probabilities: LogProbabilities | None = None


class TextGenerationResponse(msgspec.Struct):
    """The tokens that one call of a pipeline generated for one request."""

    tokens: list[TextResponse]
    final_status: TextGenerationStatus

    def append_token(self, token: TextResponse) -> None:
        """Append ``token``."""
        self.tokens.append(token)

    def update_status(self, status: TextGenerationStatus) -> None:
        """Set ``final_status``."""
        self.final_status = status

    @property
    def is_done(self) -> bool:
        """Whether the request has ended."""
        return self.final_status.is_done


class SparseEmbedding(msgspec.Struct):
    """The sparse embedding of one text: token ids and their weights."""

    token_ids: npt.NDArray[np.integer]
    """``[n]`` int32, ascending."""
    weights: npt.NDArray[np.floating]
    """``[n]`` float32."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return np.array_equal(self.token_ids, other.token_ids) and np.array_equal(self.weights, other.weights)


class _DenseEmbedding(msgspec.Struct):
    embeddings: npt.NDArray[np.floating]


class EmbeddingsResponse(_DenseEmbedding, kw_only=True, omit_defaults=True):
    """The output of one embeddings request.

    ``embeddings`` is the dense vector ``[E]``. It is empty if the request selects only other outputs.
    """

    scores: npt.NDArray[np.floating] | None = None
    """``[labels]`` float32: the result of a classification or reranking head."""
    sparse: SparseEmbedding | None = None
    """The sparse embedding."""
    multi_vector: npt.NDArray[np.floating] | None = None
    """``[n, width]``: one vector for each of n tokens. Leading tokens, such as a prompt, can be left out."""
    num_tokens: int = 0
    """The number of tokens of the input, including special tokens and the prompt before the text."""

    @property
    def is_done(self) -> bool:
        """Always True: one call computes the whole response."""
        return True

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.sparse == other.sparse and all(
            _same_array(getattr(self, name), getattr(other, name))
            for name in ("embeddings", "scores", "multi_vector")
        )


class AudioGenerationResponse(msgspec.Struct):
    """The audio that one call of a pipeline generated for one request."""

    final_status: TextGenerationStatus
    audio: npt.NDArray[np.floating] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the request has ended."""
        return self.final_status.is_done

    @property
    def has_audio_data(self) -> bool:
        """Whether this response has audio."""
        return self.audio is not None

    @property
    def audio_data(self) -> npt.NDArray[np.floating]:
        """The audio. Raises ``AssertionError`` if ``has_audio_data`` is False."""
        if self.audio is None:
            raise AssertionError("this response has no audio: check has_audio_data first")
        return self.audio

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.final_status is other.final_status and _same_array(self.audio, other.audio)


@dataclass(frozen=True)
class AudioGeneratorOutput:
    """A chunk of audio for the client."""

    audio_data: torch.Tensor
    metadata: dict[str, object]
    is_done: bool


def _same_array(first: npt.NDArray[np.floating] | None, second: npt.NDArray[np.floating] | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)
