"""``/v1/chat/completions``, and ``/v1/chat/completions/render``, which returns only the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response

from penstock.pipelines.core import Grammar, TextContext
from penstock.serve.api.chat_prompt import (
    ToolUse,
    check_template_shows,
    template_messages,
    template_options,
    tool_use,
)
from penstock.serve.api.chat_response import ChatResponse
from penstock.serve.api.choice_decoder import ChoiceDecoder
from penstock.serve.api.generation import GenerationJob, check_choices, in_pool
from penstock.serve.api.json_parts import Parts
from penstock.serve.api.logprob_limit import check_num_logprobs, num_prompt_logprobs, with_bounded_output
from penstock.serve.api.models import adapter_named
from penstock.serve.api.output_format import check_enabled, check_tools, checked_grammar, output_grammar
from penstock.serve.api.parameters import map_input_errors, output_limit
from penstock.serve.api.request_context import contexts_of_choices, request_context
from penstock.serve.api.roles import check_roles
from penstock.serve.api.schemas import ChatBody
from penstock.serve.api.text_generation import answer_request, checked_body, envelope_of, note
from penstock.serve.api.token_scores import ChatScores, prompt_parts
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import body_of, generated
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    openapi_extra=body_of(ChatBody),
    responses=generated("The answer; with `stream`, in chunks."),
)
async def create_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation."""
    services, record = Services.of(request), RequestRecord.of(request)
    raw = await request.json()
    chat = await in_pool(request, lambda: _Chat.of(services, raw))
    note(chat.body, record, chat.context)
    body, job = chat.body, chat.job(services)
    response = ChatResponse(
        envelope_of(services, chat.context.request_id, body),
        scores=ChatScores(services.fragments_for(body), body.top_logprobs or 0) if body.logprobs else None,
        prompt_scores=_prompt_scores(services, chat, job),
        prompt_token_ids=chat.context.prompt_tokens.tolist() if body.return_token_ids else None,
        include_usage=body.includes_usage,
        reasoning_fields=() if body.include_reasoning is False else _reasoning_fields(services),
    )
    return await answer_request(request, services, body, job, response)


@router.post(
    "/v1/chat/completions/render",
    response_class=Response,
    openapi_extra=body_of(ChatBody),
    responses=generated("The prompt's text and token ids.", streams=False),
)
async def render_chat_completion(request: Request) -> Response:
    """Return the prompt of a conversation without running the model.

    The same checks apply as for the conversation itself.
    """
    services = Services.of(request)
    raw = await request.json()
    chat = await in_pool(request, lambda: _Chat.of(services, raw))
    ids = chat.context.prompt_tokens.tolist()
    prompt = {
        "object": "chat.completion.prompt",
        "model": chat.body.model,
        "prompt": chat.context.prompt,
        "prompt_token_ids": ids,
        "count": len(ids),
        "max_model_len": services.worker.info.max_length,
    }
    return Response(msgspec.json.encode(prompt), media_type="application/json")


@dataclass(frozen=True)
class _Chat:
    """A validated request and the context of its prompt."""

    body: ChatBody
    use: ToolUse
    context: TextContext
    opens_reasoning: bool
    """Whether the prompt ends inside a reasoning block."""

    @classmethod
    def of(cls, services: Services, raw: Any) -> _Chat:
        """Validate a body, render its messages and encode them. Slow: call it in the pool.

        Raises:
            RequestProblem: 400 that names the field.
            UnknownModelError: the server has no model or adapter of that name.
        """
        body = checked_body(services, ChatBody, raw)
        check_choices(services, 1, body.n or 1)
        use = tool_use(body, raw)
        check_template_shows(use.tools, services.tokenizer)
        parsers, tokenizer = services.parsers, services.tokenizer
        messages = template_messages(raw["messages"], tokenizer)
        options = template_options(body, tokenizer, can_reason=parsers.reasoning_format is not None)
        with map_input_errors("messages"):
            check_roles(messages, tokenizer, use.tools or None, options)
        top = (body.top_logprobs or 0) if body.logprobs else None
        context = request_context(
            services,
            body,
            f"chatcmpl-{uuid4().hex}",
            param="messages",
            adapter=adapter_named(services, body.model),
            top=top,
            echo=body.prompt_logprobs is not None,
            messages=messages,
            tools=use.tools or None,
            chat_template_options=options,
        )
        prompt_rows = num_prompt_logprobs(body, [context])
        if top is not None and output_limit(body) is None:
            context = with_bounded_output(services, context, body.n or 1, top=top, prompt_rows=prompt_rows)
        check_num_logprobs(
            services,
            [context] * (body.n or 1),
            top=top,
            prompt_rows=prompt_rows,
            param="top_logprobs" if body.logprobs else "prompt_logprobs",
        )
        opens = parsers.prompt_opens_reasoning(str(context.prompt), _prefill(body))
        grammar = _grammar(services, body, use, opens)
        if grammar is not None:
            context = msgspec.structs.replace(context, grammar=grammar)
        return cls(body, use, context, opens)

    def job(self, services: Services) -> GenerationJob:
        """Return a context and a decoder for each choice."""
        parsers = services.parsers
        parallel = self.body.parallel_tool_calls is not False
        contexts = contexts_of_choices(self.context, self.body, scored=bool(self.body.logprobs))
        choices = [
            ChoiceDecoder(
                context,
                services.tokenizer,
                parser=parsers.new(
                    tools=self.use.tools,
                    tool_choice=self.use.choice,
                    in_reasoning=self.opens_reasoning,
                    parallel=parallel,
                    shows_special_tokens=self.body.shows_special_tokens,
                    bare_in_text=self.context.grammar is None,
                ),
                skip_special_tokens=parsers.skip_special_tokens and not self.body.shows_special_tokens,
                token_by_token=parsers.reasoning_format is not None or not parallel,
                at_once=not self.body.stream,
                keeps_stop=bool(self.body.include_stop_str_in_output),
            )
            for context in contexts
        ]
        return GenerationJob(contexts, choices, self.body.n or 1)


def _prompt_scores(services: Services, chat: _Chat, job: GenerationJob) -> Callable[[], Parts] | None:
    """Return a function that encodes ``prompt_logprobs`` after generation; None if they are not requested."""
    top = chat.body.prompt_logprobs
    if top is None:
        return None
    return lambda: prompt_parts(
        services.fragments_for(chat.body),
        chat.context.prompt_tokens.tolist(),
        job.choices[0].prompt_scores,
        top,
        chat.context.log_probabilities or 0,
    )


def _reasoning_fields(services: Services) -> tuple[str, ...]:
    field = services.config.reasoning_field
    return ("reasoning", "reasoning_content") if field == "both" else (field,)


def _prefill(body: ChatBody) -> str:
    """Return the beginning of the output that the request gives as its last message, else ""."""
    last = body.messages[-1]
    if not body.continue_final_message or last.role != "assistant":
        return ""
    content = last.content
    text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
    return text


def _grammar(services: Services, body: ChatBody, use: ToolUse, opens_reasoning: bool) -> Grammar | None:
    """Return the grammar of the output after the reasoning; None if the output is free text.

    Raises:
        RequestProblem: 400 that names the field.
    """
    parsers = services.parsers
    parallel = body.parallel_tool_calls is not False
    asked = output_grammar(services, body)
    if use.is_forced:  # the output is a call, so a format of its text has no effect
        check_enabled(services, body, "tool_choice")
        check_tools(services, body, use.called)
        with map_input_errors("tool_choice"):
            forced = parsers.grammar(
                use.tools, use.choice, parallel=parallel, reasoning=True, in_reasoning=opens_reasoning
            )
        return checked_grammar(services, forced, "tools")
    if asked is None and not use.strict:
        return None
    grammar, param = asked or (None, "tools")
    check_enabled(services, body, param)
    check_tools(services, body, use.strict)
    with map_input_errors(param):
        if grammar is None:
            combined = parsers.strict_grammar(
                use.tools, use.strict, parallel=parallel, in_reasoning=opens_reasoning
            )
        elif use.tools:
            combined = parsers.call_or(
                grammar, use.tools, use.strict, parallel=parallel, in_reasoning=opens_reasoning
            )
        else:
            combined = parsers.after_reasoning(grammar, in_reasoning=opens_reasoning)
    return checked_grammar(services, combined, param)
