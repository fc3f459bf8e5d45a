"""Conversion of pipeline outputs to messages, and of audio and embeddings messages to deltas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.workers import make_request

from penstock.pipelines.core import (
    AudioGenerationResponse,
    EmbeddingsResponse,
    TextGenerationResponse,
    TextGenerationStatus,
    TextResponse,
)
from penstock.worker.messages import AudioResult, EmbeddingsResult, TextResult
from penstock.worker.outputs import result_message
from penstock.worker.results import Generation

ACTIVE, DONE = TextGenerationStatus.ACTIVE, TextGenerationStatus.END_OF_SEQUENCE
SAMPLES = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("output", "result"),
    [
        (TextGenerationResponse([TextResponse(5)], ACTIVE), TextResult("a", [5])),
        (TextGenerationResponse([], DONE), TextResult("a", [], DONE)),
        (TextGenerationResponse([], ACTIVE), None),
        (EmbeddingsResponse(SAMPLES), EmbeddingsResult("a", EmbeddingsResponse(SAMPLES))),
        (AudioGenerationResponse(ACTIVE, SAMPLES), AudioResult("a", ACTIVE, SAMPLES)),
        (AudioGenerationResponse(DONE), AudioResult("a", DONE)),
        (AudioGenerationResponse(ACTIVE), None),
    ],
)
def test_each_output_type_is_converted_to_its_message_type(output: Any, result: Any) -> None:
    assert result_message(make_request("a"), output) == result


def test_an_object_that_is_not_an_output_is_refused() -> None:
    class UnknownOutput:
        is_done = True

    with pytest.raises(TypeError, match="returned UnknownOutput, which is not an output type"):
        result_message(make_request("a"), UnknownOutput())


async def test_audio_chunks_that_are_not_yet_read_are_returned_together() -> None:
    generation = Generation("a", lambda name: None)
    generation.add(AudioResult("a", ACTIVE, SAMPLES))
    generation.add(AudioResult("a", ACTIVE, SAMPLES + 4))
    first_delta = await anext(generation)
    assert np.concatenate(first_delta.audio).tolist() == list(range(8))
    assert not first_delta.status.is_done
    generation.add(AudioResult("a", DONE))
    (last_delta,) = [delta async for delta in generation]
    assert (last_delta.audio, last_delta.status) == ([], DONE)


async def test_an_embeddings_result_ends_its_request() -> None:
    generation = Generation("a", lambda name: None)
    generation.add(EmbeddingsResult("a", EmbeddingsResponse(SAMPLES)))
    assert generation.is_done
    (delta,) = [delta async for delta in generation]
    assert delta.embeddings == EmbeddingsResponse(SAMPLES)
    assert delta.status.is_done
