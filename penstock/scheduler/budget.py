"""How the tokens of a step are shared out, as pure functions.

max_batch_input_tokens
|<- decode rows, one each ->|<- prompts in order, the last one cut ->|<- unused: less than a chunk ->|
"""

from __future__ import annotations

from penstock.errors import InputError
from penstock.kv_cache.interface import KVCache
from penstock.pipelines.core import InputContext


def decode_rows(num_remaining: int, num_left: int, num_behind: int) -> int:
    """The rows of a context that generates: all it has to compute, which is one but after a jump ahead.

    Args:
        num_remaining: tokens that it has to compute.
        num_left: tokens that are left of the budget.
        num_behind: contexts which generate too and have yet to get their row, one at least for each.
    """
    return min(num_remaining, num_left - num_behind)


def prompt_rows(num_remaining: int, num_left: int, min_chunk_size: int, *, may_cut: bool) -> int:
    """The rows of a prompt: all that is left of it, or a chunk not too small, or none in this step."""
    if num_remaining <= num_left:
        return num_remaining
    return num_left if may_cut and num_left >= min_chunk_size else 0


def smallest_chunk(min_chunk_size: int, max_batch_input_tokens: int, max_batch_size: int) -> int:
    """The smallest chunk that a prompt is cut to.

    As asked for, but no more than is left when all others in a full batch generate: a prompt that is being
    computed moves on in every step.
    """
    return min(min_chunk_size, max_batch_input_tokens - (max_batch_size - 1))


def refuse_what_never_fits(
    context: InputContext, kv: KVCache, *, max_tokens: int, chunk_size: int | None
) -> None:
    """Checks that a context could run if it were the only one.

    Args:
        context: the context.
        kv: the cache.
        max_tokens: tokens that a step computes at most.
        chunk_size: the smallest chunk of a prompt; None where prompts are not cut.

    Raises:
        InputError: it could not.
    """
    length = context.current_length
    if chunk_size is None and length > max_tokens:
        raise InputError(
            f"the prompt has {length} tokens, but a step computes at most {max_tokens} and prompts "
            "are not cut: shorten the prompt, raise --max-batch-input-tokens, or allow chunked prefill"
        )
    longest = max(length, context.max_length or 0)
    if not kv.fits(longest, chunk_size):
        raise InputError(
            f"prompt and output together may take {longest} tokens ({length} of them the prompt), which "
            f"do not fit the {kv.num_blocks} blocks of the KV cache: ask for fewer new tokens, "
            "or give the KV cache more memory"
        )
