"""Distribution of a step's token budget, as pure functions.

max_batch_input_tokens
|<- decode rows, one each ->|<- prompts in order, the last one cut ->|<- unused, less than a chunk ->|
"""

from __future__ import annotations

from penstock.errors import InputError
from penstock.kv_cache.interface import KVCache
from penstock.pipelines.core import InputContext


def decode_rows(num_remaining: int, num_left: int, num_behind: int) -> int:
    """Return the number of rows of a decoding context: one, or more after the grammar forced tokens.

    Args:
        num_remaining: tokens that the context must compute.
        num_left: unused tokens of the budget.
        num_behind: later decoding contexts. Each needs at least one row.
    """
    return min(num_remaining, num_left - num_behind)


def prompt_rows(num_remaining: int, num_left: int, min_chunk_size: int, *, may_cut: bool) -> int:
    """Return the number of rows of a prompt in this step: the whole rest, a chunk, or 0."""
    if num_remaining <= num_left:
        return num_remaining
    return num_left if may_cut and num_left >= min_chunk_size else 0


def smallest_chunk(min_chunk_size: int, max_batch_input_tokens: int, max_batch_size: int) -> int:
    """Return the size of the smallest chunk of a prompt.

    It is at most the budget that remains when all other contexts of a full batch decode. So a prompt that is
    being computed advances in every step.
    """
    return min(min_chunk_size, max_batch_input_tokens - (max_batch_size - 1))


def refuse_what_never_fits(
    context: InputContext, kv: KVCache, *, max_tokens: int, chunk_size: int | None
) -> None:
    """Check that a context can run if it is the only one.

    Args:
        context: the context.
        kv: the cache.
        max_tokens: most tokens of a step.
        chunk_size: the smallest chunk of a prompt; None if prompts are not cut.

    Raises:
        InputError: the context can never run.
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
