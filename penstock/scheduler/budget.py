"""How the tokens of a step are shared out, as pure functions.

max_batch_input_tokens
|<- decode rows, one each ->|<- prompts in order, the last one cut ->|<- unused: less than a chunk ->|
"""

from __future__ import annotations


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
