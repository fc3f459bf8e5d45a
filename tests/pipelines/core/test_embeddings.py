"""Requests, contexts and responses of the embeddings task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.pipelines.core import (
    EmbeddingsContext,
    EmbeddingsGenerationRequest,
    EmbeddingsResponse,
    RequestContext,
    SparseEmbedding,
    TextContext,
    TTSContext,
    check_dimensions,
    context_type,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)

IDS = np.array([5, 6, 7])


def context(**fields: Any) -> EmbeddingsContext:
    return EmbeddingsContext(**{"prompt": "a b c", "tokens": IDS, "max_length": 3, **fields})


def test_serialization_keeps_all_fields() -> None:
    sent_context = context(
        outputs=("dense", "sparse"),
        token_type_ids=np.array([0, 0, 1]),
        num_unpooled_tokens=1,
        pooling="mean",
        dimensions=2,
        normalize=False,
        activation=True,
        request_id="7",
    )
    received_context = msgpack_numpy_decoder(RequestContext)(msgpack_numpy_encoder()(sent_context))
    assert type(received_context) is EmbeddingsContext
    assert received_context == sent_context
    assert received_context.token_type_ids.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"outputs": ("dense", "thick")}, r"outputs must be among dense, .*, were \['thick'\]"),
        ({"pooling": "median"}, "pooling must be one of cls, .*, was 'median'"),
        ({"dimensions": 0}, "dimensions must be at least 1, was 0"),
        ({"num_unpooled_tokens": 3}, "num_unpooled_tokens must be from 0 to 2, .*, was 3"),
        ({"num_unpooled_tokens": -1}, "num_unpooled_tokens must be from 0 to 2"),
        ({"token_type_ids": np.array([0, 1])}, r"one entry for each of the 3 tokens, has shape \(2,\)"),
        ({"max_length": 2}, "must be less than or equal to max_length"),
    ],
)
def test_invalid_fields_of_a_context_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        context(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "query: ", "prompt_name": "query"}, "prompt and prompt_name are both given"),
        ({"max_tokens": 9}, "max_tokens is 9 but truncate is False"),
        ({"input": [1, 2], "text_pair": "b"}, "text_pair needs a text as input, not token ids"),
    ],
)
def test_contradictory_fields_of_a_request_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EmbeddingsGenerationRequest(**{"id": "1", "input": "a", **fields})


def test_responses_are_equal_if_all_outputs_are_equal() -> None:
    def response(**fields: Any) -> EmbeddingsResponse:
        values = {
            "embeddings": np.ones(2),
            "scores": np.ones(1),
            "sparse": SparseEmbedding(np.array([3]), np.array([0.5])),
            "multi_vector": np.ones((3, 2)),
        }
        return EmbeddingsResponse(**values | fields)

    assert response() == response()
    assert response().is_done
    for change in (
        {"embeddings": np.zeros(2)},
        {"scores": None},
        {"sparse": SparseEmbedding(np.array([3]), np.array([0.6]))},
        {"sparse": SparseEmbedding(np.array([4]), np.array([0.5]))},
        {"multi_vector": np.ones((2, 3))},
    ):
        assert response(**change) != response()
    decoded_response = msgpack_numpy_decoder(EmbeddingsResponse)(msgpack_numpy_encoder()(response()))
    assert decoded_response == response()


def test_context_type_returns_the_library_class_of_a_context() -> None:
    class CustomContext(TextContext):
        pass

    fields: Any = {"prompt": "", "tokens": IDS, "max_length": 9}
    assert context_type(CustomContext(**fields)) is TextContext
    assert context_type(TTSContext(**fields)) is TTSContext
    assert context_type(context()) is EmbeddingsContext


@pytest.mark.parametrize(
    ("dimensions", "trained_dimensions"), [(384, ()), (384, (64,)), (64, (64, 128)), (1, None), (383, None)]
)
def test_trained_and_full_dimensions_are_allowed(
    dimensions: int, trained_dimensions: tuple[int, ...] | None
) -> None:
    check_dimensions(dimensions, 384, trained_dimensions)


@pytest.mark.parametrize(
    ("dimensions", "trained_dimensions", "message"),
    [
        (64, (), r"dimensions is 64, but the model has 384 dimensions .* --matryoshka-dimensions"),
        (100, (128, 64, 512), "dimensions must be one of 64, 128, 384, was 100"),
        (512, (512,), "dimensions is 512, but the model has 384"),
        (385, None, "dimensions must be from 1 to 384, was 385"),
        (0, None, "dimensions must be from 1 to 384, was 0"),
    ],
)
def test_untrained_and_out_of_range_dimensions_are_refused(
    dimensions: int, trained_dimensions: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_dimensions(dimensions, 384, trained_dimensions)
