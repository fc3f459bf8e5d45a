"""The routes of Ollama's API: chat, generation, embeddings, models and the version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from hashlib import sha256
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from penstock import __version__
from penstock.pipelines.core import PipelineTask
from penstock.serve.api.completions import CompletionRequest
from penstock.serve.api.conversation import Conversation
from penstock.serve.api.embedding_requests import check_outputs, encode_inputs, nested_list, vector_inputs
from penstock.serve.api.embedding_schemas import EmbeddingsBody
from penstock.serve.api.generation import GenerationJob, GenerationRun, run_in_pool
from penstock.serve.api.json_parts import (
    JsonResponse,
    Parts,
    array,
    collect_parts,
    encode,
    json_response,
    with_members,
)
from penstock.serve.api.models import requested_adapter
from penstock.serve.api.ollama.ollama_builder import OllamaBuilder, current_time
from penstock.serve.api.ollama.ollama_input import (
    served_model_name,
    translate_chat,
    translate_generate_to_chat,
    translate_generate_to_completion,
)
from penstock.serve.api.ollama.ollama_schema import (
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaShowBody,
)
from penstock.serve.api.text_generation import answer_request, checked_body, record_logged_fields
from penstock.serve.api.validation import validated
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import responses, route_options
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["ollama"])
text_router = APIRouter(route_class=JsonRoute, tags=["ollama"])
embedding_router = APIRouter(route_class=JsonRoute, tags=["ollama"])


@text_router.post(
    "/api/chat", **route_options(OllamaChatBody, "The answer, as JSON lines unless `stream` is false.")
)
async def ollama_chat(request: Request) -> Response:
    """Generate the next message of a conversation. Request and response have Ollama's format."""
    services = Services.of(request)
    raw = await request.json()

    def prepare() -> tuple[OllamaChatBody, Conversation | None]:
        body = checked_body(services, OllamaChatBody, raw)
        if not body.messages:
            requested_adapter(services, served_model_name(services, body.model))
            return body, None
        return body, translate_chat(services, body).conversation(services, _new_id())

    body, conversation = await run_in_pool(request, prepare)
    if conversation is None:
        return _load_response(body, message={"role": "assistant", "content": ""})
    return await _answer_chat(request, body, conversation, is_chat=True)


@text_router.post(
    "/api/generate",
    **route_options(OllamaGenerateBody, "The answer, as JSON lines unless `stream` is false."),
)
async def ollama_generate(request: Request) -> Response:
    """Answer or continue a prompt. Request and response have Ollama's format."""
    services = Services.of(request)
    raw = await request.json()

    def prepare() -> tuple[OllamaGenerateBody, Conversation | CompletionRequest | None]:
        body = checked_body(services, OllamaGenerateBody, raw)
        if not body.prompt and not body.suffix:
            requested_adapter(services, served_model_name(services, body.model))
            return body, None
        if body.raw or body.suffix:
            translation = translate_generate_to_completion(services, body)
            with translation.with_client_fields():
                return body, CompletionRequest.of(services, translation.translated_body)
        return body, translate_generate_to_chat(services, body).conversation(services, _new_id())

    body, prepared_request = await run_in_pool(request, prepare)
    if prepared_request is None:
        return _load_response(body, response="")
    if isinstance(prepared_request, Conversation):
        return await _answer_chat(request, body, prepared_request, is_chat=False)
    record_logged_fields(prepared_request.body, RequestRecord.of(request), prepared_request.job.contexts[0])
    return await _answer(request, body, prepared_request.job, is_chat=False)


@embedding_router.post(
    "/api/embed",
    **route_options(OllamaEmbedBody, "The embeddings, in the order of the inputs.", streams=False),
)
async def ollama_embed(request: Request) -> Response:
    """Return a vector for each input. Request and response have Ollama's format."""
    services, record = Services.of(request), RequestRecord.of(request)
    raw = await request.json()
    body = await run_in_pool(request, lambda: checked_body(services, OllamaEmbedBody, raw))
    requested_adapter(services, served_model_name(services, body.model))
    check_outputs(services, ["dense"])
    embeddings_body = validated(
        EmbeddingsBody,
        {
            "model": served_model_name(services, body.model),
            "input": body.input,
            "truncate": body.truncate is not False,
            "dimensions": body.dimensions,
        },
    )
    encoded_inputs = await encode_inputs(
        request,
        embeddings_body,
        lambda: vector_inputs(services, embeddings_body, ("dense",), normalize=embeddings_body.normalizes),
    )

    def vectors() -> Iterator[Parts]:
        for response in encoded_inputs.responses:
            yield iter([encode(nested_list(response.embeddings))])

    members = {
        "model": body.model,
        "total_duration": round((time.perf_counter() - record.received_at) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": encoded_inputs.usage["prompt_tokens"],
    }
    return JsonResponse(
        await collect_parts(with_members(members, embeddings=array(vectors())), services.encoding_turns)
    )


@router.get("/api/tags", response_class=Response, responses=responses(401, 503))
async def ollama_tags(request: Request) -> Response:
    """List the served model and its adapters, in Ollama's format."""
    services = Services.of(request)
    return json_response(
        {"models": model_entries(services, [services.model_name, *services.worker.adapters])}
    )


@router.get("/api/ps", response_class=Response, responses=responses(401, 503))
async def ollama_ps(request: Request) -> Response:
    """Do the same as `/api/tags`, because all served models are loaded."""
    return await ollama_tags(request)


@router.get("/api/version", response_class=Response, responses=responses(401, 503))
async def ollama_version(request: Request) -> Response:
    """Return the version of Penstock."""
    return json_response({"version": __version__})


@router.post("/api/show", **route_options(OllamaShowBody, "The description of the model.", streams=False))
async def ollama_show(request: Request) -> Response:
    """Describe a model, in Ollama's format."""
    services = Services.of(request)
    raw = await request.json()
    body = await run_in_pool(request, lambda: checked_body(services, OllamaShowBody, raw))
    name = served_model_name(services, body.model or body.name or services.model_name)
    requested_adapter(services, name)
    parsers, config = services.parsers, services.pipeline_config.model.huggingface_config
    is_text = services.task is PipelineTask.TEXT_GENERATION
    capabilities = ["completion"] if is_text else ["embedding"]
    capabilities += ["vision"] if services.tokenizer.reads_images else []
    capabilities += ["tools"] if is_text and parsers.tool_format_name is not None else []
    capabilities += ["thinking"] if is_text and parsers.reasoning_format_name is not None else []
    family = config.model_type
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": services.tokenizer.chat_template_source or "",
            "details": _details(services),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": services.worker.info.max_length,
            },
            "capabilities": capabilities,
        }
    )


async def _answer_chat(
    request: Request, body: OllamaBody, conversation: Conversation, *, is_chat: bool
) -> Response:
    record_logged_fields(conversation.body, RequestRecord.of(request), conversation.context)
    return await _answer(request, body, conversation.job(Services.of(request)), is_chat=is_chat)


async def _answer(request: Request, body: OllamaBody, job: GenerationJob, *, is_chat: bool) -> Response:
    services, record = Services.of(request), RequestRecord.of(request)
    builder = OllamaBuilder(body.model, job, record, is_chat=is_chat, hides_thinking=body.think is False)
    run = GenerationRun(services, record, job)
    return await answer_request(request, services, run, builder, stream=body.streams)


def model_entries(services: Services, names: Iterable[str]) -> list[dict[str, object]]:
    """Return the entry of each model or adapter in Ollama's format."""
    return [
        {
            "name": name,
            "model": name,
            "modified_at": current_time(),
            "size": 0,
            "digest": sha256(name.encode()).hexdigest(),
            "details": _details(services),
        }
        for name in names
    ]


def _details(services: Services) -> dict[str, object]:
    family = services.pipeline_config.model.huggingface_config.model_type
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": services.pipeline_config.model.quantization_encoding or "",
    }


def _load_response(body: OllamaBody, **members: object) -> Response:
    """Return the response to a request without input. Clients send such requests to load a model."""
    return json_response(
        {"model": body.model, "created_at": current_time(), **members, "done": True, "done_reason": "load"}
    )


def _new_id() -> str:
    return f"chatcmpl-{uuid4().hex}"
