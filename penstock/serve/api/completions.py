"""The route ``/v1/completions``, which continues prompts."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response

from penstock.pipelines.core import TextContext
from penstock.serve.api.choice_decoder import ChoiceDecoder
from penstock.serve.api.completion_response import CompletionResponse, Echo, PromptScoreEncoder
from penstock.serve.api.fill_in_middle import fill_in_end_ids, fill_in_prompt
from penstock.serve.api.generation import GenerationJob, GenerationRun, check_choices, run_in_pool
from penstock.serve.api.logprob_limit import check_num_logprobs, num_prompt_logprobs, num_top_logprobs
from penstock.serve.api.models import requested_adapter
from penstock.serve.api.output_format import check_grammars_enabled, output_grammar
from penstock.serve.api.request_context import contexts_for_choices, request_context
from penstock.serve.api.schemas import CompletionBody
from penstock.serve.api.text_generation import (
    answer_request,
    checked_body,
    make_envelope,
    record_logged_fields,
)
from penstock.serve.api.token_scores import CompletionScores, prompt_parts
from penstock.serve.http.bodies import JsonRoute
from penstock.serve.http.openapi import route_options
from penstock.serve.http.problems import RequestProblem
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services
from penstock.text.detokenizer import prompt_text

router = APIRouter(route_class=JsonRoute, tags=["completions"])


@router.post("/v1/completions", **route_options(CompletionBody, "The completions, in chunks with `stream`."))
async def create_completion(request: Request) -> Response:
    """Generate a continuation of each prompt."""
    services, record = Services.of(request), RequestRecord.of(request)
    raw = await request.json()
    completion = await run_in_pool(request, lambda: CompletionRequest.of(services, raw))
    body, job = completion.body, completion.job
    record_logged_fields(body, record, job.contexts[0])
    response = CompletionResponse(
        make_envelope(services, completion.id, body),
        job.choices,
        prompt_token_ids=(
            [context.prompt_tokens.tolist() for context in job.contexts] if body.return_token_ids else None
        ),
        echoes=completion.echoes,
        n=job.n,
        scores=(
            [
                CompletionScores(
                    services.tokenizer,
                    services.fragments_for(body),
                    body.logprobs,
                    prompt=() if completion.echoes else context.prompt_tokens,
                    skip_special_tokens=not body.shows_special_tokens,
                )
                for context in job.contexts
            ]
            if body.logprobs is not None
            else None
        ),
        encode_prompt_scores=_prompt_score_encoder(services, body),
        include_usage=body.includes_usage,
    )
    run = GenerationRun(services, record, job)
    return await answer_request(
        request, services, run, response, stream=bool(body.stream), with_usage=body.has_continuous_usage
    )


@dataclass(frozen=True)
class CompletionRequest:
    """A validated completion request, its contexts, the decoders of its choices, and its echoed prompts."""

    id: str
    body: CompletionBody
    job: GenerationJob
    echoes: list[Echo] | None

    @classmethod
    def of(cls, services: Services, raw: object) -> CompletionRequest:
        """Validate a request body and encode its prompts. Blocks: call it in a thread pool.

        Raises:
            RequestProblem: 400; the message names the invalid field.
            UnknownModelError: the server has no model or adapter with the requested name.
        """
        body = checked_body(services, CompletionBody, raw)

        adapter = requested_adapter(services, body.model)
        grammar_and_field = output_grammar(services, body)
        if grammar_and_field is not None:
            check_grammars_enabled(services, body, grammar_and_field[1])
        prompts, completion_id = _prompts(body.prompt), f"cmpl-{uuid4().hex}"
        if body.suffix:
            body, prompts = _with_fill_in_prompts(services, body, prompts)
        n = body.n or 1
        check_choices(services, len(prompts), n)
        contexts: list[TextContext] = []
        for index, prompt in enumerate(prompts):
            is_single = len(prompts) == 1
            context = request_context(
                services,
                body,
                completion_id if is_single else f"{completion_id}-{index}",
                index=index,
                param="prompt" if is_single else f"prompt[{index}]",
                adapter=adapter,
                num_top=body.logprobs,
                has_prompt_logprobs=(bool(body.echo) and body.logprobs is not None)
                or body.prompt_logprobs is not None,
                default_max_tokens=services.config.default_max_tokens_completions,
                prompt=prompt,
            )
            if grammar_and_field is not None:
                context = msgspec.structs.replace(context, grammar=grammar_and_field[0])
            contexts += contexts_for_choices(context, body, has_logprobs=body.logprobs is not None)
        check_num_logprobs(
            services,
            contexts,
            num_top=body.logprobs,
            prompt_logprob_count=num_prompt_logprobs(
                body, contexts, num_echo_top=body.logprobs if body.echo else None
            ),
            param="prompt_logprobs" if body.logprobs is None else "logprobs",
        )
        choices = [
            ChoiceDecoder(
                context,
                services.tokenizer,
                skip_special_tokens=not body.shows_special_tokens,
                may_decode_at_end=not body.stream,
                keeps_stop=bool(body.include_stop_str_in_output),
            )
            for context in contexts
        ]
        echoes = [_echo(services, context) for context in contexts] if body.echo else None
        return cls(completion_id, body, GenerationJob(contexts, choices, n), echoes)


def _prompt_score_encoder(services: Services, body: CompletionBody) -> PromptScoreEncoder | None:
    """Return a function that encodes the ``prompt_logprobs`` of a choice, or None if not requested."""
    num_top = body.prompt_logprobs
    if num_top is None:
        return None
    num_computed, fragments = num_top_logprobs(body, body.logprobs), services.fragments_for(body)
    return lambda ids, scores: prompt_parts(fragments, ids, scores, num_top, num_computed)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts as a list.

    Raises:
        RequestProblem: 400; the list is empty.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestProblem(400, "prompt is an empty list", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _with_fill_in_prompts(
    services: Services, body: CompletionBody, prompts: list[str | list[int]]
) -> tuple[CompletionBody, list[str | list[int]]]:
    """Return the body and the prompts of a request with ``suffix``, converted for filling in the middle.

    Each returned prompt contains the prefix and the suffix. Unless ``ignore_eos`` is set, the stop tokens of
    the returned body include the tokens that end the generated middle.

    Raises:
        RequestProblem: 400; ``echo`` is set, a prompt is not a text, or the tokenizer has no
            fill-in-the-middle tokens.
    """
    if body.echo:
        raise RequestProblem(400, "echo is not available with suffix", param="echo")
    if any(not isinstance(prompt, str) for prompt in prompts):
        raise RequestProblem(400, "suffix requires prompts that are texts, not token ids", param="suffix")
    tokenizer = services.tokenizer
    fill_in_prompts: list[str | list[int]] = [
        fill_in_prompt(tokenizer, str(prompt), body.suffix or "", "suffix") for prompt in prompts
    ]
    end_ids = [] if body.ignore_eos else fill_in_end_ids(tokenizer)
    stop_ids = [*(body.stop_token_ids or ()), *end_ids]
    return body.model_copy(update={"stop_token_ids": stop_ids or None}), fill_in_prompts


def _echo(services: Services, context: TextContext) -> Echo:
    ids = context.prompt_tokens.tolist()
    text = context.prompt if isinstance(context.prompt, str) else prompt_text(services.tokenizer, ids)
    return Echo(text, ids)
