"""The routes ``/v1/embeddings`` and ``/pooling``, which return the outputs of embeddings models."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from penstock.pipelines.core import EmbeddingsResponse, SparseEmbedding
from penstock.serve.api.embedding_requests import (
    EncodedInputs,
    check_outputs,
    encode_inputs,
    nested_list,
    read_body,
    vector_inputs,
)
from penstock.serve.api.embedding_schemas import EmbeddingsBody, PoolingBody
from penstock.serve.api.json_parts import JsonResponse, Parts, array, collect_parts, encode, with_members
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import route_options
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])

_ROUTES_FOR_SCORES = ": send the request to /v1/rerank, /v1/score or /v1/classify"


@router.post(
    "/v1/embeddings",
    **route_options(EmbeddingsBody, "The embeddings, in the order of the inputs.", streams=False),
)
async def create_embeddings(request: Request) -> Response:
    """Return a vector for each input."""
    services = Services.of(request)
    body = await read_body(request, EmbeddingsBody)
    check_outputs(services, ["dense"], _ROUTES_FOR_SCORES)
    encoded_inputs = await encode_inputs(
        request, body, lambda: vector_inputs(services, body, ("dense",), normalize=body.normalizes)
    )
    as_base64 = body.encoding_format == "base64"
    items = (
        with_members(
            {"object": "embedding", "index": index},
            embedding=_vector(response.embeddings, as_base64=as_base64),
        )
        for index, response in enumerate(encoded_inputs.responses)
    )
    return await _list_response(services, body.model, encoded_inputs, items)


@router.post(
    "/pooling", **route_options(PoolingBody, "The outputs, in the order of the inputs.", streams=False)
)
async def create_pooling(request: Request) -> Response:
    """Return the requested outputs of each input: dense, sparse, multi_vector, scores.

    Without `outputs`, return the first output of the model.
    """
    services = Services.of(request)
    body = await read_body(request, PoolingBody)
    outputs = tuple(dict.fromkeys(body.outputs or ()))
    check_outputs(services, outputs)
    encoded_inputs = await encode_inputs(
        request, body, lambda: vector_inputs(services, body, outputs, activation=body.activation)
    )
    as_base64 = body.encoding_format == "base64"
    items = (
        with_members({"object": "pooling", "index": index}, **_outputs(response, as_base64=as_base64))
        for index, response in enumerate(encoded_inputs.responses)
    )
    return await _list_response(services, body.model, encoded_inputs, items)


async def _list_response(
    services: Services, model: str, encoded_inputs: EncodedInputs, items: Iterator[Parts]
) -> Response:
    """Return OpenAI's list object. The event loop runs after each `json_parts.SLICE_SECONDS` of encoding."""
    members = {"object": "list", "model": model, "usage": encoded_inputs.usage}
    return JsonResponse(
        await collect_parts(with_members(members, data=array(items)), services.encoding_turns)
    )


def _outputs(response: EmbeddingsResponse, *, as_base64: bool) -> dict[str, Parts]:
    """Return the outputs of a response: name of the output -> its JSON."""
    outputs: dict[str, Parts] = {}
    if response.embeddings.size:
        outputs["dense"] = _vector(response.embeddings, as_base64=as_base64)
    if response.sparse is not None:
        outputs["sparse"] = _sparse(response.sparse, as_base64=as_base64)
    if response.multi_vector is not None:
        outputs["multi_vector"] = array(_vector(row, as_base64=as_base64) for row in response.multi_vector)
    if response.scores is not None:
        outputs["scores"] = _vector(response.scores, as_base64=as_base64)
    return outputs


def _sparse(sparse: SparseEmbedding, *, as_base64: bool) -> Parts:
    members = {"token_ids": nested_list(sparse.token_ids)}
    return with_members(members, weights=_vector(sparse.weights, as_base64=as_base64))


def _vector(vector: npt.NDArray[np.number], *, as_base64: bool) -> Parts:
    """Yield the JSON of a vector: a list of numbers, or the base64 text of little-endian float32 values."""
    if as_base64:
        yield encode(base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode())
    else:
        yield encode(nested_list(vector))
