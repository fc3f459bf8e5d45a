"""The routes ``/v1/classify`` and ``/classify``, which classify texts."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from penstock.serve.api.embedding_requests import (
    ModelInput,
    check_num_inputs,
    check_outputs,
    encode_inputs,
    input_list,
    nested_list,
    read_body,
    response_id,
)
from penstock.serve.api.embedding_schemas import ClassifyBody
from penstock.serve.api.json_parts import JsonResponse, array, collect_parts, encode, with_members
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import route_options
from penstock.serve.services import Services
from penstock.text.scoring import best_label

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])

_ROUTE_OPTIONS = route_options(
    ClassifyBody, "The labels and scores, in the order of the inputs.", streams=False
)


@router.post("/v1/classify", **_ROUTE_OPTIONS)
async def classify(request: Request) -> Response:
    """Return the best label of each input and the scores of all labels."""
    services = Services.of(request)
    body = await read_body(request, ClassifyBody)
    check_outputs(services, ["scores"], ": load a model with a classification head")
    encoded_inputs = await encode_inputs(request, body, lambda: _inputs(services, body))
    config = services.pipeline_config.model.huggingface_config
    scores = [response.scores for response in encoded_inputs.responses if response.scores is not None]
    items = (
        iter(
            [
                encode(
                    {
                        "index": index,
                        "label": best_label(config, row),
                        "probs": nested_list(row),
                        "num_classes": len(row),
                    }
                )
            ]
        )
        for index, row in enumerate(scores)
    )
    envelope = {
        "id": response_id("classify"),
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "usage": encoded_inputs.usage,
    }
    return JsonResponse(
        await collect_parts(with_members(envelope, data=array(items)), services.encoding_turns)
    )


@router.post("/classify", **_ROUTE_OPTIONS)
async def classify_without_version(request: Request) -> Response:
    """Do the same as `/v1/classify`."""
    return await classify(request)


def _inputs(services: Services, body: ClassifyBody) -> list[ModelInput]:
    inputs = input_list(body.input)
    check_num_inputs(services, len(inputs), "input")
    return [
        ModelInput(name, {"input": value, "outputs": ("scores",), "activation": body.activation})
        for name, value in inputs
    ]
