"""How many log probabilities an answer may have."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.pipelines.core import TextContext
from penstock.serve.api.schemas import GenerationBody
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services


def num_best(body: GenerationBody, top: int | None) -> int:
    """Return how many best tokens the worker computes in each place; 0 computes no log probabilities.

    Args:
        body: may ask for those of the prompt.
        top: best tokens shown beside each generated token; None shows no log probabilities of these.
    """
    asked = [max(1, one) for one in (top, body.prompt_logprobs) if one is not None]
    return max(asked, default=0)


def num_prompt_logprobs(
    body: GenerationBody, contexts: Sequence[TextContext], *, echoed: int | None = None
) -> int:
    """Return how many log probabilities of prompts an answer has.

    Args:
        body: may ask for ``prompt_logprobs``.
        contexts: those whose prompts are shown.
        echoed: best tokens shown beside each echoed token of the prompt; None echoes without them.
    """
    rows = sum(len(context.prompt_tokens) for context in contexts)
    return sum(rows * (top + 1) for top in (body.prompt_logprobs, echoed) if top is not None)


def without_echo(context: TextContext, *, scored: bool) -> TextContext:
    """Return a context that does not score its prompt: another choice of the same prompt does.

    Args:
        context: one that has not begun.
        scored: whether its generated tokens have log probabilities.
    """
    kept = context.log_probabilities if scored else None
    return msgspec.structs.replace(context, log_probabilities_echo=False, log_probabilities=kept)


def with_bounded_output(
    services: Services, context: TextContext, num_choices: int, *, top: int, prompt_rows: int = 0
) -> TextContext:
    """Return the context with a maximum length whose log probabilities fit into one answer.

    Used where the request has no output limit of its own. The output then ends with ``length``. A context for
    which not even one token fits is returned as it is, and `check_num_logprobs` refuses it.

    Args:
        services: its configuration has the limit.
        context: the context of each choice.
        num_choices: choices of the answer.
        top: best tokens shown beside each generated token.
        prompt_rows: log probabilities of the prompt that are part of the answer.
    """
    room = (services.config.max_logprobs_per_request - prompt_rows) // (num_choices * (top + 1))
    length = len(context.prompt_tokens) + room
    if room < 1 or length >= context.max_length:
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
    """Refuse a request whose answer could have too many log probabilities. Nothing has run yet.

    Args:
        services: its configuration has the limit.
        contexts: one a choice; each may generate up to its maximum length.
        top: best tokens shown beside each generated token; None shows no log probabilities of these.
        prompt_rows: log probabilities of prompts that are part of the answer, all prompts together.
        param: the field that asks for the most of them.

    Raises:
        RequestProblem: 400 with the numbers.
    """
    most = services.config.max_logprobs_per_request
    lengths = [context.max_length - len(context.prompt_tokens) for context in contexts]
    count = prompt_rows + (0 if top is None else sum(lengths) * (top + 1))
    if count <= most:
        return
    parts = []
    if top is not None:
        parts.append(f"{len(lengths)} x {max(lengths)} tokens x {top + 1}")
    if prompt_rows:
        parts.append(f"{prompt_rows} of the prompt")
    raise RequestProblem(
        400,
        f"the answer could have {count} log probabilities ({', '.join(parts)}), "
        f"but this server sends at most {most} in one answer: lower n, max_tokens or {param}, "
        "shorten the prompt, or raise --max-logprobs-per-request",
        param=param,
    )
