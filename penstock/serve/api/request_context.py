"""Builds the contexts of a text generation request: one context for each choice of each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import msgspec

from penstock.pipelines.core import (
    TextContext,
    TokenGeneratorRequest,
    TokenGeneratorRequestMessage,
    TokenGeneratorRequestTool,
)
from penstock.pipelines.core.choices import choice_contexts
from penstock.serve.api.images import ImageFields
from penstock.serve.api.logprob_limit import num_top_logprobs, without_prompt_logprobs
from penstock.serve.api.parameters import map_input_errors, sampling_params
from penstock.serve.api.schemas import GenerationBody
from penstock.serve.services import Services
from penstock.text.tokenizer import TextTokenizer


class PromptFields(ImageFields, total=False):
    """The fields of a `TokenGeneratorRequest` from which the prompt is built."""

    prompt: str | Sequence[int]
    messages: list[TokenGeneratorRequestMessage]
    tools: list[TokenGeneratorRequestTool] | None
    chat_template_options: dict[str, object]


def request_context(
    services: Services,
    body: GenerationBody,
    request_id: str,
    *,
    index: int = 0,
    param: str,
    adapter: str | None,
    num_top: int | None,
    has_prompt_logprobs: bool,
    default_max_tokens: int | None = None,
    **prompt: Unpack[PromptFields],
) -> TextContext:
    """Return the context of one prompt of a request.

    If the request has no seed, each call chooses a new random seed.

    Args:
        services: the objects that routes use.
        body: the request.
        request_id: the id of the context.
        index: the index of the prompt in the request.
        param: the request field of the prompt, for error messages.
        adapter: the name of the adapter; None for the model itself.
        num_top: number of top tokens per generated token; None if the response has no log
            probabilities of generated tokens.
        has_prompt_logprobs: whether log probabilities of the prompt are computed.
        default_max_tokens: the output limit of a request without ``max_tokens``; None for the limit of the
            model.
        **prompt: either ``prompt``, or ``messages``, ``tools``, ``chat_template_options`` and the images.

    Raises:
        RequestProblem: 400; the message names the invalid field.
    """
    tokenizer = services.tokenizer
    request = TokenGeneratorRequest(
        request_id,
        index,
        body.model,
        logprobs=num_top_logprobs(body, num_top),
        echo=has_prompt_logprobs,
        sampling_params=sampling_params(
            body, services.pipeline_config, tokenizer=tokenizer, default_max_tokens=default_max_tokens
        ),
        adapter=adapter,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        **prompt,
    )
    with map_input_errors(param):
        return build_context(tokenizer, request, body.truncate_prompt_tokens)


def contexts_for_choices(
    context: TextContext, body: GenerationBody, *, has_logprobs: bool
) -> list[TextContext]:
    """Return the contexts of the ``n`` choices of one prompt.

    If the response is not streamed, only the first choice computes the log probabilities of the prompt.

    Args:
        context: the context of the prompt.
        body: the request.
        has_logprobs: whether the response has log probabilities of generated tokens.
    """
    first_context, *other_contexts = choice_contexts(context, body.n or 1)
    if not body.stream:
        other_contexts = [
            without_prompt_logprobs(other_context, has_logprobs=has_logprobs)
            for other_context in other_contexts
        ]
    return [first_context, *other_contexts]


def build_context(
    tokenizer: TextTokenizer, request: TokenGeneratorRequest, max_prompt_tokens: int | None
) -> TextContext:
    """Return the context of a request with the prompt truncated to its last `max_prompt_tokens` tokens.

    If at least two tokens are kept, a BOS token stays at the beginning of a truncated prompt. The context
    has no token sequences for stop strings, because `ChoiceDecoder` matches stop strings in the text.

    Args:
        tokenizer: the tokenizer of the model.
        request: a request with a prompt or messages.
        max_prompt_tokens: number of prompt tokens to keep, including the BOS token. None keeps all. -1 keeps
            the tokenizer's maximum length minus the output limit (minus 1 without an output limit), but at
            least one token. If the tokenizer has no maximum length, -1 keeps all.

    Raises:
        InputError: see `TextTokenizer.build_context`.
    """
    if max_prompt_tokens is None:
        return tokenizer.build_context(request, stops_as_tokens=False)
    text, token_ids = tokenizer.encode_request_prompt(request)
    tokens: list[int] = token_ids.tolist()
    if max_prompt_tokens == -1:
        max_new_tokens = request.sampling_params.max_new_tokens
        num_reserved = 1 if max_new_tokens is None else max_new_tokens
        max_length = len(tokens) + num_reserved if tokenizer.max_length is None else tokenizer.max_length
        max_prompt_tokens = max(1, max_length - num_reserved)
    if len(tokens) > max_prompt_tokens:
        if max_prompt_tokens > 1 and tokens[0] == _bos_id(tokenizer):
            tokens = [tokens[0], *tokens[1 - max_prompt_tokens :]]
        else:
            tokens = tokens[len(tokens) - max_prompt_tokens :]
        is_chat = request.messages is not None
        text = tokenizer.decode_ids(tokens, skip_special_tokens=False) if is_chat else None
    token_request = replace(request, prompt=tokens, messages=None, tools=None, chat_template_options=None)
    context = tokenizer.build_context(token_request, stops_as_tokens=False)
    return context if text is None else msgspec.structs.replace(context, prompt=text)


def _bos_id(tokenizer: TextTokenizer) -> int | None:
    text = tokenizer.special_tokens.get("bos_token")
    return None if text is None else tokenizer.backend.token_to_id(text)
