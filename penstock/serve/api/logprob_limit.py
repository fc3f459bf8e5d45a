"""The limit on the number of log probabilities in one response."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.pipelines.core import TextContext
from penstock.serve.api.schemas import GenerationBody
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services


def num_best(body: GenerationBody, top: int | None) -> int:
    """Return the number of top tokens that the worker computes per position; 0 for no log probabilities.

    Args:
        body: the request, which may ask for ``prompt_logprobs``.
        top: number of top tokens per generated token; None without log probabilities of generated tokens.
    """
    counts = [max(1, num_top) for num_top in (top, body.prompt_logprobs) if num_top is not None]
    return max(counts, default=0)


def num_prompt_logprobs(
    body: GenerationBody, contexts: Sequence[TextContext], *, echoed: int | None = None
) -> int:
    """Return the number of prompt log probabilities in a response.

    Args:
        body: the request, which may ask for ``prompt_logprobs``.
        contexts: the contexts of the request.
        echoed: number of top tokens per echoed prompt token; None if the echo has no log probabilities.
    """
    rows = sum(len(context.prompt_tokens) for context in contexts)
    return sum(rows * (top + 1) for top in (body.prompt_logprobs, echoed) if top is not None)


def without_echo(context: TextContext, *, has_logprobs: bool) -> TextContext:
    """Return a copy of a context that does not score its prompt. Another choice scores the same prompt.

    Args:
        context: a context that has not started.
        has_logprobs: whether its generated tokens have log probabilities.
    """
    log_probabilities = context.log_probabilities if has_logprobs else None
    return msgspec.structs.replace(context, log_probabilities_echo=False, log_probabilities=log_probabilities)


def with_bounded_output(
    services: Services, context: TextContext, num_choices: int, *, top: int, prompt_rows: int = 0
) -> TextContext:
    """Return a copy with a maximum length at which the log probabilities fit into one response.

    Used if the request has no output limit. The output then ends with ``length``. If not even one token fits,
    the context is returned unchanged, and `check_num_logprobs` refuses it.

    Args:
        services: its configuration has the limit.
        context: the context of each choice.
        num_choices: the number of choices.
        top: number of top tokens per generated token.
        prompt_rows: number of log probabilities of the prompt in the response.
    """
    max_tokens = (services.config.max_logprobs_per_request - prompt_rows) // (num_choices * (top + 1))
    length = len(context.prompt_tokens) + max_tokens
    if max_tokens < 1 or length >= context.max_length:
        return context
    return msgspec.structs.replace(context, max_length=length)


def check_num_logprobs(
    services: Services,
    contexts: Sequence[TextContext],
    *,
    top: int | None,
    prompt_rows: int = 0,
    param: str,
) -> None:
    """Raise if the response could have more log probabilities than ``--max-logprobs-per-request``.

    Args:
        services: its configuration has the limit.
        contexts: one per choice; each may generate up to its maximum length.
        top: number of top tokens per generated token; None if the response has no log
            probabilities of generated tokens.
        prompt_rows: number of log probabilities of all prompts in the response.
        param: the field that the error names.

    Raises:
        RequestProblem: 400 with the numbers.
    """
    limit = services.config.max_logprobs_per_request
    lengths = [context.max_length - len(context.prompt_tokens) for context in contexts]
    count = prompt_rows + (0 if top is None else sum(lengths) * (top + 1))
    if count <= limit:
        return
    parts = []
    if top is not None:
        parts.append(f"{len(lengths)} x {max(lengths)} tokens x {top + 1}")
    if prompt_rows:
        parts.append(f"{prompt_rows} of the prompt")
    raise RequestProblem(
        400,
        f"the answer could have {count} log probabilities ({', '.join(parts)}), "
        f"but this server sends at most {limit} in one answer: lower n, max_tokens or {param}, "
        "shorten the prompt, or raise --max-logprobs-per-request",
        param=param,
    )
