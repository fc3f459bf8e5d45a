"""The routes ``/v1/messages`` and ``/v1/messages/count_tokens`` of Anthropic's API."""

from __future__ import annotations

from uuid import uuid4

from fastapi import APIRouter, Request, Response

from penstock.serve.api.conversation import Conversation
from penstock.serve.api.generation import GenerationRun, run_in_pool
from penstock.serve.api.json_parts import json_response
from penstock.serve.api.messages.message_builder import MessageBuilder
from penstock.serve.api.messages.message_input import chat_request
from penstock.serve.api.messages.message_schema import CountTokensBody, MessagesBody
from penstock.serve.api.text_generation import answer_request, checked_body, record_logged_fields
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import route_options
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["messages"])


@router.post("/v1/messages", **route_options(MessagesBody, "The message, or its events with `stream`."))
async def create_message(request: Request) -> Response:
    """Generate the next message of a conversation. Request and response have Anthropic's format."""
    services, record = Services.of(request), RequestRecord.of(request)
    raw = await request.json()
    message_id = f"msg_{uuid4().hex}"

    def prepare() -> tuple[MessagesBody, Conversation]:
        body = checked_body(services, MessagesBody, raw)
        return body, _conversation(services, body, message_id)

    body, conversation = await run_in_pool(request, prepare)
    record_logged_fields(conversation.body, record, conversation.context)
    job = conversation.job(services)
    builder = MessageBuilder(body, message_id, job)
    run = GenerationRun(services, record, job)
    return await answer_request(request, services, run, builder, stream=bool(body.stream))


@router.post(
    "/v1/messages/count_tokens", **route_options(CountTokensBody, "The number of tokens.", streams=False)
)
async def count_message_tokens(request: Request) -> Response:
    """Return the number of prompt tokens of a request without running the model."""
    services = Services.of(request)
    raw: object = await request.json()

    def count() -> int:
        body = checked_body(services, CountTokensBody, raw)
        return len(_conversation(services, body, "count").context.prompt_tokens)

    usage = {"input_tokens": await run_in_pool(request, count)}
    return json_response(usage)


def _conversation(services: Services, body: CountTokensBody, request_id: str) -> Conversation:
    translation, warnings = chat_request(services, body)
    services.warn_once(warnings)
    return translation.conversation(services, request_id)
