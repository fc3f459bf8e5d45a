"""Limits the number of log probabilities in one response (``--max-logprobs-per-request``)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.pipelines.core import TextContext
from penstock.serve.api.schemas import GenerationBody
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services


def num_top_logprobs(body: GenerationBody, num_top: int | None) -> int:
    """Return the number of top tokens that the worker computes per position.

    The number is at least 1 if the response has log probabilities, otherwise 0.

    Args:
        body: the request. Its ``prompt_logprobs`` is the number of top tokens per prompt token, or None.
        num_top: number of top tokens per generated token; None if the response has no log probabilities of
            generated tokens.
    """
    counts = [max(1, count) for count in (num_top, body.prompt_logprobs) if count is not None]
    return max(counts, default=0)


def num_prompt_logprobs(
    body: GenerationBody, contexts: Sequence[TextContext], *, num_echo_top: int | None = None
) -> int:
    """Return the largest possible number of prompt log probabilities in a response.

    Args:
        body: the request. Its ``prompt_logprobs`` is the number of top tokens per prompt token, or None.
        contexts: the contexts of the request.
        num_echo_top: number of top tokens per echoed prompt token; None if the response has no log
            probabilities of an echo.
    """
    num_tokens = sum(len(context.prompt_tokens) for context in contexts)
    return sum(
        num_tokens * (count + 1) for count in (body.prompt_logprobs, num_echo_top) if count is not None
    )


def without_prompt_logprobs(context: TextContext, *, has_logprobs: bool) -> TextContext:
    """Return a copy of a context without log probabilities of the prompt.

    The first choice of a prompt computes these log probabilities. The other choices use the copy.

    Args:
        context: a context that has not started.
        has_logprobs: whether the generated tokens of the copy have log probabilities.
    """
    log_probabilities = context.log_probabilities if has_logprobs else None
    return msgspec.structs.replace(context, log_probabilities_echo=False, log_probabilities=log_probabilities)


def with_bounded_output(
    services: Services, context: TextContext, num_choices: int, *, num_top: int, prompt_logprob_count: int = 0
) -> TextContext:
    """Return a copy of a context whose maximum length keeps the log probabilities within the limit.

    Used for chats without an output limit. Output that reaches the maximum length has the finish reason
    ``length``. The context is returned unchanged if its maximum length is low enough already, or if the limit
    allows no output token. In the second case, `check_num_logprobs` raises an error.

    Args:
        services: its configuration has the limit.
        context: the context of the request.
        num_choices: the number of choices.
        num_top: number of top tokens per generated token.
        prompt_logprob_count: number of log probabilities of the prompt in the response.
    """
    max_tokens = (services.config.max_logprobs_per_request - prompt_logprob_count) // (
        num_choices * (num_top + 1)
    )
    length = len(context.prompt_tokens) + max_tokens
    if max_tokens < 1 or length >= context.max_length:
        return context
    return msgspec.structs.replace(context, max_length=length)


def check_num_logprobs(
    services: Services,
    contexts: Sequence[TextContext],
    *,
    num_top: int | None,
    prompt_logprob_count: int = 0,
    param: str,
) -> None:
    """Raise if the response could have more log probabilities than ``--max-logprobs-per-request``.

    Args:
        services: its configuration has the limit.
        contexts: one context per choice. Each context may generate up to its maximum length.
        num_top: number of top tokens per generated token; None if the response has no log
            probabilities of generated tokens.
        prompt_logprob_count: number of log probabilities of all prompts in the response.
        param: the field that the error names.

    Raises:
        RequestProblem: 400; the message has the largest possible number and the limit.
    """
    limit = services.config.max_logprobs_per_request
    max_output_lengths = [context.max_length - len(context.prompt_tokens) for context in contexts]
    max_count = prompt_logprob_count + (0 if num_top is None else sum(max_output_lengths) * (num_top + 1))
    if max_count <= limit:
        return
    terms = []
    if num_top is not None:
        terms.append(
            f"{len(max_output_lengths)} choice(s) x {max(max_output_lengths)} tokens x {num_top + 1}"
        )
    if prompt_logprob_count:
        terms.append(f"{prompt_logprob_count} of the prompt")
    raise RequestProblem(
        400,
        f"the response could have {max_count} log probabilities ({' + '.join(terms)}), "
        f"but this server sends at most {limit} in one response: lower n, max_tokens or {param}, "
        "shorten the prompt, or raise --max-logprobs-per-request",
        param=param,
    )
