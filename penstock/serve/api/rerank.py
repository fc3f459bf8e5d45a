"""The routes ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``. They order documents by relevance to a query."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from penstock.pipelines.core.embeddings import EmbeddingsFields
from penstock.serve.api.embedding_requests import (
    EncodedInputs,
    ModelInput,
    check_num_inputs,
    embeddings_tokenizer,
    encode_inputs,
    read_body,
    response_id,
)
from penstock.serve.api.embedding_schemas import RerankBody
from penstock.serve.api.generation import run_in_pool
from penstock.serve.api.json_parts import JsonResponse, array, collect_parts, encode, with_members
from penstock.serve.api.parameters import map_input_errors
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import route_options
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services
from penstock.text.scoring import PairScoring, ranking

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])

_ROUTE_OPTIONS = route_options(RerankBody, "The documents by descending relevance.", streams=False)


@router.post("/v1/rerank", **_ROUTE_OPTIONS)
async def rerank(request: Request) -> Response:
    """Order documents by their relevance to a query. The response has the format of Cohere v1 and Jina."""
    return await _rerank(request, "1")


@router.post("/rerank", **_ROUTE_OPTIONS)
async def rerank_without_version(request: Request) -> Response:
    """Do the same as `/v1/rerank`."""
    return await _rerank(request, "1")


@router.post("/v2/rerank", **_ROUTE_OPTIONS)
async def rerank_v2(request: Request) -> Response:
    """Order documents by their relevance to a query. The response has the format of Cohere v2."""
    return await _rerank(request, "2")


async def _rerank(request: Request, version: str) -> Response:
    services = Services.of(request)
    body = await read_body(request, RerankBody)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if not texts:
        raise RequestProblem(400, "documents is an empty list: send at least one document", param="documents")
    check_num_inputs(services, len(texts), "documents")
    with map_input_errors("activation"):
        scoring = PairScoring(
            [body.query] * len(texts),
            texts,
            outputs=services.worker.info.outputs,
            layout=embeddings_tokenizer(services).layout,
            activation=body.activation,
        )
    encoded_inputs = await encode_inputs(request, body, lambda: _inputs(services, body, scoring, texts))
    with map_input_errors("model"):
        scores = await run_in_pool(request, lambda: scoring.scores(encoded_inputs.responses))
    items = (
        iter([encode(_result(index, float(scores[index]), texts[index] if body.return_documents else None))])
        for index in ranking(scores, body.top_n)
    )
    parts = with_members(_envelope(body.model, version, encoded_inputs), results=array(items))
    return JsonResponse(await collect_parts(parts, services.encoding_turns))


def _inputs(
    services: Services, body: RerankBody, scoring: PairScoring, texts: Sequence[str]
) -> list[ModelInput]:
    """Return the inputs of the model. If ``max_tokens_per_doc`` is set, cut each document to this length."""
    limit, tokenizer = body.max_tokens_per_doc, embeddings_tokenizer(services)
    inputs = []
    for pair_input in scoring.inputs:
        fields: EmbeddingsFields = {**pair_input.fields, "outputs": (scoring.output,)}
        if limit is not None and pair_input.kind == "pair":
            fields["text_pair"] = tokenizer.cut_text(texts[pair_input.index], limit)
        elif limit is not None and pair_input.kind == "document":
            fields["input"] = tokenizer.cut_text(texts[pair_input.index], limit)
        inputs.append(
            ModelInput("query" if pair_input.kind == "query" else f"documents[{pair_input.index}]", fields)
        )
    return inputs


def _result(index: int, score: float, text: str | None) -> dict[str, object]:
    result: dict[str, object] = {"index": index, "relevance_score": score}
    return result if text is None else {**result, "document": {"text": text}}


def _envelope(model: str, version: str, encoded_inputs: EncodedInputs) -> dict[str, object]:
    return {
        "id": response_id("rerank"),
        "object": "list",
        "model": model,
        "usage": encoded_inputs.usage,
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": encoded_inputs.num_tokens},
        },
    }
