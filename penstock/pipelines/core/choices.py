"""Contexts for several choices of one prompt. The server uses this module, so it loads no torch."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from penstock.pipelines.core import TextContext
from penstock.pipelines.core.randomness import splitmix64
from penstock.plain_numbers import checked_integer


def choice_contexts(context: TextContext, n: int) -> list[TextContext]:
    """Return ``n`` contexts that generate independent answers to the prompt of ``context``.

    If the contexts are submitted together, the full blocks of the prompt are computed once: choices 1 to
    ``n - 1`` wait until choice 0 has stored its blocks in the prefix cache. Each context computes the whole
    prompt if the prefix cache is disabled or ``log_probabilities_echo`` is set. Choice ``i`` has the request
    id ``{request_id}-{i}``. Choice 0 has the seed of ``context``, so that it equals the answer of ``n=1``.
    Later choices have the seed ``splitmix64(seed, i)``. For ``n=1`` the list contains ``context`` itself.

    Args:
        context: a context that has not started.
        n: the number of choices.

    Raises:
        InputError: ``n`` is not an integer, or is less than 1.
    """
    n = checked_integer("n", n, minimum=1)
    assert not context.is_assigned_to_cache, f"{context.request_id} has started"
    assert not len(context.generated_tokens), f"{context.request_id} has started"
    return [context] if n == 1 else [_choice_context(context, i) for i in range(n)]


def _choice_context(context: TextContext, i: int) -> TextContext:
    params = context.sampling_params
    seed = splitmix64(params.seed, i) if i > 0 else params.seed
    choice = msgspec.structs.replace(
        context, request_id=f"{context.request_id}-{i}", sampling_params=replace(params, seed=seed)
    )
    # Mutable state must not be shared between the choices.
    choice.token_hash_overrides = dict(context.token_hash_overrides)
    choice._log_probabilities_data = {}
    return choice
