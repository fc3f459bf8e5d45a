"""The routes ``/v1/score`` and ``/score``, which return relevance scores of pairs of texts."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from penstock.serve.api.embedding_requests import (
    ModelInput,
    check_num_inputs,
    embeddings_tokenizer,
    encode_inputs,
    read_body,
    response_id,
)
from penstock.serve.api.embedding_schemas import ScoreBody
from penstock.serve.api.generation import run_in_pool
from penstock.serve.api.json_parts import JsonResponse, encode
from penstock.serve.api.parameters import map_input_errors
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import route_options
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services
from penstock.text.scoring import PairScoring, ScoringInput

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])

_ROUTE_OPTIONS = route_options(ScoreBody, "The scores, in the order of the pairs.", streams=False)


@router.post("/v1/score", **_ROUTE_OPTIONS)
async def score(request: Request) -> Response:
    """Return the relevance score of each pair of texts. A pair has one text of text_1 and one of text_2."""
    services = Services.of(request)
    body = await read_body(request, ScoreBody)
    queries, texts = _pairs(body)
    check_num_inputs(services, len(texts), "text_2" if len(texts) > 1 else "text_1")
    with map_input_errors("activation"):
        scoring = PairScoring(
            queries,
            texts,
            outputs=services.worker.info.outputs,
            layout=embeddings_tokenizer(services).layout,
            activation=body.activation,
        )
    inputs = [
        ModelInput(_input_name(body, pair_input), {**pair_input.fields, "outputs": (scoring.output,)})
        for pair_input in scoring.inputs
    ]
    encoded_inputs = await encode_inputs(request, body, lambda: inputs)
    with map_input_errors("model"):
        scores = await run_in_pool(request, lambda: scoring.scores(encoded_inputs.responses))
    data = [{"index": i, "object": "score", "score": float(value)} for i, value in enumerate(scores)]
    envelope = {
        "id": response_id("score"),
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": data,
        "usage": encoded_inputs.usage,
    }
    return JsonResponse([encode(envelope)])


@router.post("/score", **_ROUTE_OPTIONS)
async def score_without_version(request: Request) -> Response:
    """Do the same as `/v1/score`."""
    return await score(request)


def _pairs(body: ScoreBody) -> tuple[list[str], list[str]]:
    """Return the first text of each pair, and the second text of each pair.

    Raises:
        RequestProblem: 400; a list is empty, or text_1 has neither one text nor as many texts as text_2.
    """
    first_texts = [body.text_1] if isinstance(body.text_1, str) else list(body.text_1)
    second_texts = [body.text_2] if isinstance(body.text_2, str) else list(body.text_2)
    for name, texts in (("text_1", first_texts), ("text_2", second_texts)):
        if not texts:
            raise RequestProblem(400, f"{name} is an empty list: send at least one text", param=name)
    if len(first_texts) == 1:
        first_texts *= len(second_texts)
    if len(first_texts) != len(second_texts):
        raise RequestProblem(
            400,
            f"text_1 has {len(first_texts)} texts, but text_2 has {len(second_texts)}: send one text in "
            "text_1, or as many as in text_2",
            param="text_1",
        )
    return first_texts, second_texts


def _input_name(body: ScoreBody, scoring_input: ScoringInput) -> str:
    """Return the request field of an input, such as ``text_2[3]``."""
    field, texts = ("text_1", body.text_1) if scoring_input.kind == "query" else ("text_2", body.text_2)
    return field if isinstance(texts, str) else f"{field}[{scoring_input.index if len(texts) > 1 else 0}]"
