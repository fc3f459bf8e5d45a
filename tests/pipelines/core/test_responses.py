"""Responses and statuses: ``is_done``, equality, and access to audio."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.pipelines.core import (
    AudioGenerationResponse,
    AudioGeneratorOutput,
    EmbeddingsResponse,
    LogProbabilities,
    PipelineTask,
    TextGenerationResponse,
    TextGenerationStatus,
    TextResponse,
)

ACTIVE = TextGenerationStatus.ACTIVE
OBJECT_OF_OTHER_TYPE: object = 3


@pytest.mark.parametrize("status", TextGenerationStatus)
def test_every_status_except_active_is_done(status: TextGenerationStatus) -> None:
    assert status.is_done is (status is not ACTIVE)
    assert TextGenerationResponse([], status).is_done is status.is_done
    assert AudioGenerationResponse(status).is_done is status.is_done


@pytest.mark.parametrize("member", [*TextGenerationStatus, *PipelineTask])
def test_enum_values_are_lower_case_names(member: Any) -> None:
    assert member == member.value == member.name.lower()
    assert type(member)(member.value) is member


def test_tokens_and_a_status_are_added_to_a_response() -> None:
    tokens = [TextResponse(5)]
    response = TextGenerationResponse(tokens, ACTIVE)
    response.append_token(TextResponse(6))
    response.update_status(TextGenerationStatus.MAXIMUM_LENGTH)
    assert response.tokens is tokens
    assert [token.next_token for token in tokens] == [5, 6]
    assert response.final_status is TextGenerationStatus.MAXIMUM_LENGTH
    assert response.is_done


def test_log_probabilities_are_equal_by_value() -> None:
    assert LogProbabilities([-0.5], [{3: -0.5}]) == LogProbabilities([-0.5], [{3: -0.5}])
    assert LogProbabilities([-0.5], [{3: -0.5}]) != LogProbabilities([-0.6], [{3: -0.5}])
    assert LogProbabilities([-0.5], [{3: -0.5}]) != LogProbabilities([-0.5], [{4: -0.5}])
    assert LogProbabilities([], []) != OBJECT_OF_OTHER_TYPE


def test_tokens_are_equal_by_value() -> None:
    log_probabilities = LogProbabilities([-0.5], [{3: -0.5}])
    assert TextResponse(3) == TextResponse(3)
    assert TextResponse(3, log_probabilities) == TextResponse(3, LogProbabilities([-0.5], [{3: -0.5}]))
    assert TextResponse(3) != TextResponse(3, log_probabilities)
    assert TextResponse(3) != TextResponse("3")
    assert TextResponse(3) != OBJECT_OF_OTHER_TYPE


def test_embeddings_responses_are_done_and_equal_by_value() -> None:
    response = EmbeddingsResponse(np.ones(3))
    assert response.is_done
    assert response == EmbeddingsResponse(np.ones(3))
    assert response != EmbeddingsResponse(np.zeros(3))
    assert response != OBJECT_OF_OTHER_TYPE


def test_reading_missing_audio_raises_an_error() -> None:
    response = AudioGenerationResponse(ACTIVE)
    assert not response.has_audio_data
    with pytest.raises(AssertionError, match="no audio"):
        response.audio_data  # noqa: B018


def test_audio_is_returned_and_equal_by_value() -> None:
    audio = np.ones(3)
    response = AudioGenerationResponse(TextGenerationStatus.END_OF_SEQUENCE, audio)
    assert response.has_audio_data
    assert response.audio_data is audio
    assert response == AudioGenerationResponse(TextGenerationStatus.END_OF_SEQUENCE, np.ones(3))
    assert response != AudioGenerationResponse(ACTIVE, audio)
    assert response != AudioGenerationResponse(TextGenerationStatus.END_OF_SEQUENCE)
    assert response != AudioGenerationResponse(TextGenerationStatus.END_OF_SEQUENCE, np.zeros(3))
    assert response != OBJECT_OF_OTHER_TYPE


def test_an_audio_chunk_is_frozen() -> None:
    output = AudioGeneratorOutput(audio_data=np.ones(2), metadata={"rate": 24000}, is_done=True)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        output.is_done = False  # type: ignore[misc]
