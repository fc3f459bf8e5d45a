"""The routes ``/v1/chat/completions`` and ``/v1/chat/completions/render``."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from penstock.serve.api.chat_response import ChatResponse
from penstock.serve.api.conversation import Conversation
from penstock.serve.api.generation import GenerationJob, GenerationRun, run_in_pool
from penstock.serve.api.json_parts import Parts, json_response
from penstock.serve.api.schemas import ChatBody
from penstock.serve.api.text_generation import answer_request, make_envelope, record_logged_fields
from penstock.serve.api.token_scores import ChatScores, prompt_parts
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import route_options
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions", **route_options(ChatBody, "The answer, in chunks with `stream`."))
async def create_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation."""
    services, record = Services.of(request), RequestRecord.of(request)
    raw = await request.json()
    chat = await run_in_pool(request, lambda: Conversation.of(services, raw, f"chatcmpl-{uuid4().hex}"))
    record_logged_fields(chat.body, record, chat.context)
    body, job = chat.body, chat.job(services)
    response = ChatResponse(
        make_envelope(services, chat.context.request_id, body),
        scores=ChatScores(services.fragments_for(body), body.top_logprobs or 0) if body.logprobs else None,
        prompt_scores=_prompt_scores(services, chat, job),
        prompt_token_ids=chat.context.prompt_tokens.tolist() if body.return_token_ids else None,
        include_usage=body.includes_usage,
        reasoning_fields=() if body.include_reasoning is False else _reasoning_fields(services),
    )
    run = GenerationRun(services, record, job)
    return await answer_request(
        request, services, run, response, stream=bool(body.stream), with_usage=body.has_continuous_usage
    )


@router.post(
    "/v1/chat/completions/render",
    **route_options(ChatBody, "The prompt's text and token ids.", streams=False),
)
async def render_chat_completion(request: Request) -> Response:
    """Return the prompt of a conversation without running the model.

    The request is validated like a request to `/v1/chat/completions`.
    """
    services = Services.of(request)
    raw = await request.json()
    chat = await run_in_pool(request, lambda: Conversation.of(services, raw, f"chatcmpl-{uuid4().hex}"))
    ids = chat.context.prompt_tokens.tolist()
    prompt = {
        "object": "chat.completion.prompt",
        "model": chat.body.model,
        "prompt": chat.context.prompt,
        "prompt_token_ids": ids,
        "count": len(ids),
        "max_model_len": services.worker.info.max_length,
    }
    return json_response(prompt)


def _prompt_scores(services: Services, chat: Conversation, job: GenerationJob) -> Callable[[], Parts] | None:
    """Return a function that encodes ``prompt_logprobs`` after the generation, or None if not requested."""
    num_top = chat.body.prompt_logprobs
    if num_top is None:
        return None
    return lambda: prompt_parts(
        services.fragments_for(chat.body),
        chat.context.prompt_tokens.tolist(),
        job.choices[0].prompt_scores,
        num_top,
        chat.context.log_probabilities or 0,
    )


def _reasoning_fields(services: Services) -> tuple[str, ...]:
    """Return the names of the message members that contain the reasoning (``--reasoning-field``)."""
    field = services.config.reasoning_field
    return ("reasoning", "reasoning_content") if field == "both" else (field,)
