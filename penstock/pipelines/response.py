"""Re-exports the response types under their `max.pipelines.response` names."""

from __future__ import annotations

from penstock.pipelines.core.responses import (
    AudioGenerationResponse,
    AudioGeneratorOutput,
    EmbeddingsResponse,
    LogProbabilities,
    TextGenerationResponse,
    TextResponse,
)

__all__ = [
    "AudioGenerationResponse",
    "AudioGeneratorOutput",
    "EmbeddingsResponse",
    "LogProbabilities",
    "TextGenerationResponse",
    "TextResponse",
]
