"""Responses of pipelines. ``is_done`` tells whether the request has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.pipelines.core.status import TextGenerationStatus

if TYPE_CHECKING:
    import torch


class LogProbabilities(msgspec.Struct):
    """Log probabilities of an output token; where the prompt is echoed, of the prompt's tokens before it too.

    Both lists have one entry a position. A position's top dictionary holds the most probable token ids and
    always the token that stands there, so it can have one entry more than was asked for.
    """

    token_log_probabilities: list[float]
    """Log probability of the token at each position."""
    top_log_probabilities: list[dict[int, float]]
    """The most probable tokens at each position, the best first, id to log probability."""

    def cut(self, top_n: int, tokens: Sequence[int]) -> LogProbabilities:
        """Return a copy with the ``top_n`` best tokens of each position and the token at that position.

        Args:
            top_n: at most as many as were asked for; 0 leaves ``tokens``.
            tokens: those that stand there, one a position.
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
    """The token's id (or its text, where a pipeline makes text)."""
    log_probabilities: LogProbabilities | None = None


class TextGenerationResponse(msgspec.Struct):
    """The tokens that one call of a pipeline made for one request."""

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
        """True when no more tokens will come."""
        return self.final_status.is_done


class SparseEmbedding(msgspec.Struct):
    """The sparse embedding of one text: a weight for each of some token ids."""

    token_ids: npt.NDArray[Any]
    """``[n]`` int32, ascending."""
    weights: npt.NDArray[Any]
    """``[n]`` float32."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return np.array_equal(self.token_ids, other.token_ids) and np.array_equal(self.weights, other.weights)


class _DenseEmbedding(msgspec.Struct):
    embeddings: npt.NDArray[Any]


class EmbeddingsResponse(_DenseEmbedding, kw_only=True, omit_defaults=True):
    """The output of one embeddings request.

    ``embeddings`` is the dense vector ``[E]``; it has no elements where the request asks for other outputs
    only."""

    scores: npt.NDArray[Any] | None = None
    """``[labels]`` float32: the result of a classification or reranking head."""
    sparse: SparseEmbedding | None = None
    """The sparse embedding."""
    multi_vector: npt.NDArray[Any] | None = None
    """``[tokens, E]``: one vector for each token."""
    num_tokens: int = 0
    """The tokens of the input, special tokens and prompt included."""

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
    """The audio that one call of a pipeline made for one request."""

    final_status: TextGenerationStatus
    audio: npt.NDArray[Any] | None = None

    @property
    def is_done(self) -> bool:
        """True when no more audio will come."""
        return self.final_status.is_done

    @property
    def has_audio_data(self) -> bool:
        """True when this response carries audio."""
        return self.audio is not None

    @property
    def audio_data(self) -> npt.NDArray[Any]:
        """The audio; raises ``AssertionError`` without audio (``has_audio_data``)."""
        if self.audio is None:
            raise AssertionError("this response has no audio: ask has_audio_data first")
        return self.audio

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.final_status is other.final_status and _same_array(self.audio, other.audio)


@dataclass(frozen=True)
class AudioGeneratorOutput:
    """A chunk of audio on its way to the client."""

    audio_data: torch.Tensor
    metadata: dict[str, Any]
    is_done: bool


def _same_array(first: npt.NDArray[Any] | None, second: npt.NDArray[Any] | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)
