"""Several answers to one prompt: a context for each. Loads no torch, for the serving side makes them too."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from penstock.pipelines.core import TextContext
from penstock.pipelines.core.randomness import splitmix64
from penstock.plain_numbers import checked_integer


def choice_contexts(context: TextContext, n: int) -> list[TextContext]:
    """``n`` contexts that answer the prompt of ``context``, which has not begun, independently.

    Submitted together they share the computation of the prompt: all but the first wait for its blocks in the
    prefix cache. (Not where prompts are echoed: such contexts read no cache.) Choice ``i`` is named
    ``{request_id}-{i}`` and draws from the seed ``splitmix64(seed, i)``, choice 0 from the seed itself, so
    that it is the answer that ``n=1`` gives. For ``n=1`` the context stays as it is.

    Raises:
        InputError: ``n`` is less than 1.
    """
    n = checked_integer("n", n, minimum=1)
    assert not context.is_assigned_to_cache, f"{context.request_id} has begun"
    assert not len(context.generated_tokens), f"{context.request_id} has begun"
    return [context] if n == 1 else [_choice(context, i) for i in range(n)]


def _choice(context: TextContext, i: int) -> TextContext:
    params = context.sampling_params
    seed = splitmix64(params.seed, i) if i > 0 else params.seed
    choice = msgspec.structs.replace(
        context, request_id=f"{context.request_id}-{i}", sampling_params=replace(params, seed=seed)
    )
    # What a context changes, or may change, is its own.
    choice.token_hash_overrides = dict(context.token_hash_overrides)
    choice._log_probabilities_data = {}
    return choice
