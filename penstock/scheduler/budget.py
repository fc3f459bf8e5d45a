"""Divides the token budget of a step among decoding contexts and prompts.

max_batch_input_tokens
|<- decode rows, one each ->|<- prompts in order, the last one cut ->|<- unused, less than a chunk ->|
"""

from __future__ import annotations

from typing import TypeVar

from penstock.errors import ConfigError, InputError
from penstock.kv_cache.interface import KVCache
from penstock.pipelines.core import InputContext
from penstock.scheduler.batch import Batch, splittable_rows

ContextT = TypeVar("ContextT", bound=InputContext)


def check_limits(**limits: int) -> None:
    """Check the scheduler's limits.

    Raises:
        ConfigError: a limit is below 1.
    """
    for name, value in limits.items():
        if value < 1:
            raise ConfigError(name, f"must be at least 1, was {value}")


def decode_rows(num_remaining_tokens: int, num_unused_tokens: int, num_later_contexts: int) -> int:
    """Return how many tokens of a decoding context a step computes.

    The number is 1, or more if a grammar has appended tokens that have no KV yet.

    Args:
        num_remaining_tokens: tokens that the context must compute.
        num_unused_tokens: unused tokens of the budget.
        num_later_contexts: number of later decoding contexts in the step. Each of them computes at least one
            token.
    """
    return min(num_remaining_tokens, num_unused_tokens - num_later_contexts)


def prompt_rows(
    num_remaining_tokens: int, num_unused_tokens: int, min_chunk_size: int, *, may_cut: bool
) -> int:
    """Return how many tokens of a prompt a step computes: all remaining tokens, a chunk, or 0.

    Args:
        num_remaining_tokens: tokens of the prompt that are not computed yet.
        num_unused_tokens: unused tokens of the budget.
        min_chunk_size: size of the smallest chunk.
        may_cut: whether the prompt may be cut into chunks.
    """
    if num_remaining_tokens <= num_unused_tokens:
        return num_remaining_tokens
    return num_unused_tokens if may_cut and num_unused_tokens >= min_chunk_size else 0


def smallest_chunk(min_chunk_size: int, max_batch_input_tokens: int, max_batch_size: int) -> int:
    """Return the size of the smallest chunk of a prompt.

    The size is at most the budget that remains when all other contexts of a full batch decode. Every step can
    therefore compute a chunk of a running prompt.
    """
    return min(min_chunk_size, max_batch_input_tokens - (max_batch_size - 1))


class PromptBudget:
    """Decides how many tokens of a prompt a step computes.

    Args:
        max_tokens: maximum number of tokens of a step.
        min_chunk_size: the smallest chunk of a prompt.
        may_cut: whether prompts are cut into chunks. If not, only preempted contexts with more tokens than
            ``max_tokens`` are cut.
        whole_prompts: whether no context is ever cut. A prompt with more than ``max_tokens`` tokens then runs
            alone in a step.
    """

    def __init__(
        self, max_tokens: int, min_chunk_size: int, *, may_cut: bool, whole_prompts: bool = False
    ) -> None:
        self.max_tokens = max_tokens
        self._min_chunk_size = min_chunk_size
        self._may_cut = may_cut and not whole_prompts
        self._whole_prompts = whole_prompts

    def min_chunk_size_for(self, context: InputContext) -> int | None:
        """Return the minimum chunk size of a context's prompt; None if the prompt is not cut."""
        exceeds_budget = context.end_idx > self.max_tokens
        may_cut = self._may_cut or (exceeds_budget and not self._whole_prompts)
        return self._min_chunk_size if may_cut else None

    def rows(self, context: ContextT, num_remaining_tokens: int, batch: Batch[ContextT]) -> int:
        """Return how many of a prompt's remaining tokens a step computes; 0 if the prompt must wait."""
        if self._whole_prompts and not batch.entries:
            return num_remaining_tokens
        may_cut = self.min_chunk_size_for(context) is not None
        rows = prompt_rows(
            num_remaining_tokens, batch.num_unused_tokens, self._min_chunk_size, may_cut=may_cut
        )
        if not 0 < rows < num_remaining_tokens:
            return rows
        has_prompts = any(not entry.is_decoding for entry in batch.entries.values())
        return splittable_rows(context, rows, may_grow=not has_prompts)

    def check_fits_alone(self, context: InputContext, kv: KVCache) -> None:
        """Check that a context can run if it is the only running context.

        Raises:
            InputError: the context can never run.
        """
        check_fits_alone(
            context,
            kv,
            max_tokens=context.current_length if self._whole_prompts else self.max_tokens,
            chunk_size=self._min_chunk_size if self._may_cut else None,
        )


def check_fits_alone(context: InputContext, kv: KVCache, *, max_tokens: int, chunk_size: int | None) -> None:
    """Check that a context can run if it is the only running context.

    Args:
        context: the context.
        kv: the cache.
        max_tokens: maximum number of tokens of a step.
        chunk_size: the smallest chunk of a prompt; None if prompts are not cut.

    Raises:
        InputError: the context can never run.
    """
    num_prompt_tokens = context.current_length
    if chunk_size is None and num_prompt_tokens > max_tokens:
        raise InputError(
            f"the prompt has {num_prompt_tokens} tokens, but a step computes at most {max_tokens} and "
            "prompts are not cut: shorten the prompt, raise --max-batch-input-tokens, or allow chunked "
            "prefill"
        )
    max_length = max(num_prompt_tokens, context.max_length or 0)
    if not kv.fits(max_length, chunk_size):
        raise InputError(
            f"prompt and output together may take {max_length} tokens ({num_prompt_tokens} of them the "
            f"prompt), which do not fit the {kv.num_blocks} blocks of the KV cache: request fewer new "
            "tokens, or give the KV cache more memory"
        )
