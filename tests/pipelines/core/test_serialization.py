"""The message codec: arrays of many shapes and dtypes, responses, contexts, and refused types."""

from __future__ import annotations

import doctest
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock.pipelines.core import (
    AudioGenerationResponse,
    EmbeddingsResponse,
    Grammar,
    LogProbabilities,
    SamplingParams,
    TextAndVisionContext,
    TextContext,
    TextGenerationResponse,
    TextGenerationStatus,
    TextResponse,
    TTSContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
    serialization,
)

dtype_strategy = (
    npst.boolean_dtypes()
    | npst.integer_dtypes(endianness="?")
    | npst.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | npst.complex_number_dtypes()
    | npst.unicode_string_dtypes()
    | npst.datetime64_dtypes()
)
array_strategy = npst.arrays(
    dtype_strategy, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
)

LOG_PROBABILITIES = LogProbabilities([-0.5], [{3: -0.5, 7: -1.5}])


def round_trip(value: Any, type_: Any = None, copy: bool = True) -> Any:
    return msgpack_numpy_decoder(type_ or type(value), copy)(msgpack_numpy_encoder()(value))


def test_the_doctests_of_the_module_pass() -> None:
    assert doctest.testmod(serialization).failed == 0


@given(array=array_strategy, copy=st.booleans(), transposed=st.booleans(), strided=st.booleans())
def test_arrays_keep_value_shape_and_dtype(
    array: npt.NDArray[Any], copy: bool, transposed: bool, strided: bool
) -> None:
    array = array.T if transposed else array
    array = array[::2] if strided and array.ndim else array
    decoded_array = round_trip(array, np.ndarray, copy)
    assert (decoded_array.shape, decoded_array.dtype) == (array.shape, array.dtype)
    assert decoded_array.tobytes() == array.tobytes()
    assert decoded_array.flags.writeable is copy


def test_an_array_is_encoded_as_a_map() -> None:
    plain_values = msgspec.msgpack.decode(msgpack_numpy_encoder()(np.array([[1, 2]], np.int16)))
    assert plain_values == {"__np__": True, "data": b"\x01\0\x02\0", "shape": [1, 2], "dtype": "int16"}


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.int64(3),
        np.float32(0.5),
        {"a": [object()]},
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        TextResponse(np.int64(3)),  # type: ignore[arg-type]
    ],
)
def test_encoding_an_unsupported_type_raises_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot encode"):
        msgpack_numpy_encoder()(value)


@pytest.mark.parametrize(
    "value", [3, {}, {"data": b""}, {"__np__": True, "data": b"abc", "shape": [2], "dtype": "int32"}]
)
def test_values_that_are_not_valid_encoded_arrays_are_refused(value: Any) -> None:
    with pytest.raises((msgspec.ValidationError, ValueError)):
        msgpack_numpy_decoder(np.ndarray)(msgspec.msgpack.encode(value))


class UnsupportedType:
    """A type that msgpack does not support."""


def test_decoding_an_unsupported_type_is_refused() -> None:
    with pytest.raises((msgspec.ValidationError, TypeError), match="only numpy arrays"):
        msgpack_numpy_decoder(UnsupportedType)(msgspec.msgpack.encode(3))


@pytest.mark.parametrize(
    "value",
    [
        LOG_PROBABILITIES,
        TextResponse(3, LOG_PROBABILITIES),
        TextGenerationResponse([TextResponse(3), TextResponse("a")], TextGenerationStatus.CANCELLED),
        EmbeddingsResponse(np.ones((2, 3), np.float32)),
        AudioGenerationResponse(TextGenerationStatus.ACTIVE, np.ones(3, np.float32)),
        AudioGenerationResponse(TextGenerationStatus.ACTIVE),
        SamplingParams(temperature=0.5, stop=["x"]),
        Grammar("regex", "a+"),
    ],
)
def test_decoded_responses_and_parameters_are_equal(value: Any) -> None:
    assert round_trip(value) == value


def contexts() -> list[TextContext]:
    image = np.arange(6, dtype=np.float32).reshape(2, 3)
    fields: dict[str, Any] = {
        "prompt": "a prompt",
        "max_length": 300,
        "tokens": np.arange(1, 130, dtype=np.int32),
        "eos_token_ids": {1, 2},
        "eos_sequences": [[3, 4]],
        "log_probabilities": 2,
        "log_probabilities_echo": True,
        "json_schema": "{}",
        "sampling_params": SamplingParams(top_k=5, stop_token_ids=[4]),
        "model_name": "demo",
        "adapter": "pirate",
        "cache_salt": "salt",
        "token_hash_overrides": {3: -99},
        "priority": -1,
        "client_id": "key 1",
        "num_cached_tokens": 64,
    }
    all_contexts = [
        TextContext(**fields),
        TextAndVisionContext(**fields, pixel_values=(image.T,), extra_model_args={"mask": image[::2]}),
        TTSContext(np.arange(3, dtype=np.int32), 5, **fields),
    ]
    for context in all_contexts:
        context.set_token_indices(active_idx=50)
        context.update(0, LOG_PROBABILITIES)
        context.update(200, LOG_PROBABILITIES)
        context.assign_to_cache(3)
    return all_contexts


@pytest.mark.parametrize("context", contexts(), ids=lambda context: type(context).__name__)
@pytest.mark.parametrize("copy", [True, False])
def test_decoded_contexts_are_equal_and_can_continue(context: TextContext, copy: bool) -> None:
    decoded_context = round_trip(context, copy=copy)
    assert type(decoded_context) is type(context)
    assert decoded_context == context
    decoded_context.update(201)
    decoded_context.tokens[0] = 9  # the array is writable and no view of the sender's array
    assert decoded_context.all_tokens[-1] == 201
    assert context.all_tokens.tolist() == [*range(1, 130), 200]


def test_all_copied_arrays_are_writable() -> None:
    vision_context, speech_context = (round_trip(context) for context in contexts()[1:])
    vision_context.pixel_values[0][0] = 1
    vision_context.extra_model_args["mask"][0] = 1
    speech_context.audio_prompt_tokens[0] = 1
    assert speech_context.audio_prompt_tokens.tolist() == [1, 1, 2]


def test_a_context_is_decoded_to_its_class_in_a_union_and_refused_as_another_class() -> None:
    context_types = TextContext | TextAndVisionContext | TTSContext
    for context in contexts():
        assert type(round_trip(context, context_types)) is type(context)
    with pytest.raises(msgspec.ValidationError, match="TTSContext"):
        round_trip(contexts()[2], TextContext)


def test_a_message_with_inconsistent_indices_is_refused() -> None:
    context = contexts()[0]
    plain_values = msgspec.msgpack.decode(msgpack_numpy_encoder()(context))
    for index in ("_start_idx", "_end_idx"):
        broken_message = msgspec.msgpack.encode({**plain_values, index: 5000})
        with pytest.raises((msgspec.ValidationError, ValueError), match="unable to bump token indices"):
            msgpack_numpy_decoder(TextContext)(broken_message)
