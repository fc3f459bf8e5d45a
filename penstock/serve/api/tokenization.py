"""The routes ``/tokenize`` and ``/detokenize``, which convert texts to tokens and tokens to texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel

from penstock.pipelines.core import TokenGeneratorRequest
from penstock.serve.api.chat_prompt import raw_messages, template_messages, template_options, template_tools
from penstock.serve.api.conversation import image_fields
from penstock.serve.api.generation import run_in_pool
from penstock.serve.api.models import requested_adapter
from penstock.serve.api.parameters import map_input_errors
from penstock.serve.api.roles import check_roles
from penstock.serve.api.schemas import DetokenizeBody, TokenizeBody
from penstock.serve.api.text_generation import checked_body
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import BODY_ERRORS, request_body, responses
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

T = TypeVar("T")

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    """Maximum total number of tokens of prompt and output."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """The text of each token. None if not requested."""


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    prompt: str


@router.post("/tokenize", openapi_extra=request_body(TokenizeBody), responses=responses(*BODY_ERRORS))
async def tokenize(request: Request) -> TokenizeResponse:
    """Return the tokens of a text, or of messages rendered by the chat template."""
    return await _run(request, _tokenize)


@router.post("/detokenize", openapi_extra=request_body(DetokenizeBody), responses=responses(*BODY_ERRORS))
async def detokenize(request: Request) -> DetokenizeResponse:
    """Return the text of tokens, including special tokens."""
    return await _run(request, _detokenize)


async def _run(request: Request, function: Callable[[Services, object], T]) -> T:
    services = Services.of(request)
    raw = await request.json()
    return await run_in_pool(request, lambda: function(services, raw))


def _tokenize(services: Services, raw: object) -> TokenizeResponse:
    body = checked_body(services, TokenizeBody, raw)
    assert isinstance(raw, dict)
    _check_model(services, body.model)
    tokenizer = services.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise RequestProblem(400, "send either prompt or messages", param="prompt")
    if body.prompt is not None:
        chat_only_fields = {
            "tools",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
        }
        if chat_fields := sorted(
            chat_only_fields & {name for name, value in raw.items() if value is not None}
        ):
            raise RequestProblem(400, f"{chat_fields[0]} requires messages", param=chat_fields[0])
        ids = tokenizer.encode_text(body.prompt, body.add_special_tokens is not False, limited=False).tolist()
    else:
        if body.add_special_tokens:
            raise RequestProblem(
                400,
                "add_special_tokens is only for prompt: the chat template adds special tokens",
                param="add_special_tokens",
            )
        chat_messages = raw_messages(raw)
        messages = template_messages(chat_messages, tokenizer)
        tools = template_tools(raw) or None
        options = template_options(body, tokenizer, can_reason=False)
        images = image_fields(services, chat_messages)
        chat = TokenGeneratorRequest(
            "",
            0,
            services.model_name,
            messages=messages,
            tools=tools,
            chat_template_options=options,
            **images,
        )
        with map_input_errors("messages"):
            check_roles(messages, tokenizer, tools, options)
            ids = tokenizer.encode_request_prompt(chat)[1].tolist()
    texts = (
        [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
        if body.return_token_strs
        else None
    )
    return TokenizeResponse(
        count=len(ids), max_model_len=services.worker.info.max_length, tokens=ids, token_strs=texts
    )


def _detokenize(services: Services, raw: object) -> DetokenizeResponse:
    body = checked_body(services, DetokenizeBody, raw)
    _check_model(services, body.model)
    vocab_size = services.tokenizer.vocab_size
    for index, token in enumerate(body.tokens):
        if token >= vocab_size:
            raise RequestProblem(
                400,
                f"tokens[{index}] is {token}: token ids must be below {vocab_size}",
                param=f"tokens[{index}]",
            )
    return DetokenizeResponse(prompt=services.tokenizer.decode_ids(body.tokens, skip_special_tokens=False))


def _check_model(services: Services, model: str | None) -> None:
    if model is not None:
        requested_adapter(services, model)
