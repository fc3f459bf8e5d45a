"""Requested sizes of batches and steps, and `BlockDemand`: the KV cache blocks that sequences need."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.kernels import backend
from penstock.pipelines.core import PipelineTask

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.kernels import DefaultSizes
    from penstock.kv_cache.spec import KVCacheSpec, KVGroup


_EMBEDDINGS_BATCH_SIZE = 256
"""Minimum default batch size for embeddings, so that short inputs fill the token budget of a step."""


def requested_batch_size(pipeline_config: PipelineConfig) -> int:
    """Return ``max_batch_size``, or its default.

    The default is that of the back end, for embeddings at least `_EMBEDDINGS_BATCH_SIZE`. It does not exceed
    `requested_step_tokens`, because each request needs at least one token of a step.
    """
    if pipeline_config.max_batch_size is not None:
        return pipeline_config.max_batch_size
    size = default_sizes(pipeline_config).max_batch_size
    if pipeline_config.model.pipeline_task is PipelineTask.EMBEDDINGS_GENERATION:
        size = max(size, _EMBEDDINGS_BATCH_SIZE)
    return min(size, requested_step_tokens(pipeline_config))


def requested_step_tokens(pipeline_config: PipelineConfig) -> int:
    """Return ``max_batch_input_tokens``, or its default.

    The default is the larger of the back end's default and the configured ``max_batch_size``.
    """
    if pipeline_config.max_batch_input_tokens is not None:
        return pipeline_config.max_batch_input_tokens
    return max(default_sizes(pipeline_config).step_tokens, pipeline_config.max_batch_size or 0)


def requested_block_size(pipeline_config: PipelineConfig) -> int:
    """Return ``kv_cache_block_size``, or the default of the back end."""
    return pipeline_config.kv_cache.block_size or default_sizes(pipeline_config).block_size


def default_sizes(pipeline_config: PipelineConfig) -> DefaultSizes:
    """Return the default sizes of the configured back end on the configured device.

    Raises:
        ConfigError: the configured back end does not exist or does not run on the device.
    """
    model = pipeline_config.model
    return backend.BACKENDS.default_sizes(model.devices[0].device_type, model.kernels)


MAX_DRAFT_ROWS = 256
"""Maximum number of draft tokens in a step for which memory is planned. Each draft token needs a row of
logits.
"""


def max_logit_rows(pipeline_config: PipelineConfig) -> int:
    """Return the number of rows of logits to plan memory for.

    A step has one row per sequence, and one row for each of at most `MAX_DRAFT_ROWS` draft tokens.
    """
    batch_size = requested_batch_size(pipeline_config)
    return batch_size + min(batch_size * pipeline_config.speculative.max_drafts, MAX_DRAFT_ROWS)


class BlockDemand:
    """Computes how many KV cache blocks sequences need in each group of layers, and their size in bytes.

    The numbers of blocks never decrease when the length or the batch size increases, so that a binary search
    finds the largest length and batch size that fit. In a group with a sliding window, the window limits the
    number of blocks of a sequence, because blocks before the window are freed.
    """

    def __init__(self, pipeline_config: PipelineConfig, spec: KVCacheSpec) -> None:
        self._block_size = requested_block_size(pipeline_config)
        self._groups = spec.groups
        # With prefix caching there is one saved state for each sequence, see `KVCacheManager`.
        num_states = 2 if pipeline_config.kv_cache.enable_prefix_caching else 1
        self._state_size = 0 if spec.states is None else num_states * spec.states.num_bytes
        self._bytes_per_block = spec.bytes_per_block(self._block_size)
        self._decode_tokens = max(
            pipeline_config.max_num_steps or 1, 1 + pipeline_config.speculative.max_drafts
        )
        self._chunk_size = (
            max(requested_step_tokens(pipeline_config), spec.max_bidirectional_tokens)
            if pipeline_config.enable_chunked_prefill
            else None
        )

    def cache_size(self, num_blocks: tuple[int, ...], batch_size: int) -> int:
        """Return the size in bytes of a cache with ``num_blocks[i]`` blocks of group i.

        If the model has recurrent states, the cache has one for each sequence of the batch, and with prefix
        caching the same number of saved states.
        """
        blocks = sum(count * size for count, size in zip(num_blocks, self._bytes_per_block, strict=True))
        return blocks + batch_size * self._state_size

    def min_blocks(self, length: int, batch_size: int) -> tuple[int, ...]:
        """Return the minimum number of blocks of each group, including the null block.

        A group needs the blocks of one whole sequence, and at least one block for each sequence of the batch.
        """
        return tuple(max(self._sequence_blocks(group, length), batch_size) + 1 for group in self._groups)

    def fit_budget(self, length: int, batch_size: int, budget: int) -> tuple[int, ...]:
        """Return the largest number of blocks of each group with which the cache fits into ``budget`` bytes.

        All groups get the same number, except that no group gets more than a full batch needs, and none gets
        fewer than `min_blocks`. These minimums may exceed the budget.
        """
        min_blocks = self.min_blocks(length, batch_size)
        max_blocks = [self._batch_blocks(group, length, batch_size) + 1 for group in self._groups]

        def blocks(count: int) -> tuple[int, ...]:
            return tuple(min(max(low, count), high) for low, high in zip(min_blocks, max_blocks, strict=True))

        def fits(count: int) -> bool:
            return self.cache_size(blocks(count), batch_size) <= budget

        return blocks(largest_fitting(max(max_blocks), fits))

    def _sequence_blocks(self, group: KVGroup, length: int) -> int:
        """Return the maximum number of blocks that a sequence of ``length`` tokens holds at once."""
        chunk_size = None if self._chunk_size is None else self._chunk_size + self._decode_tokens - 1
        return group.max_blocks(length, self._block_size, chunk_size)

    def _batch_blocks(self, group: KVGroup, length: int, batch_size: int) -> int:
        """Return the maximum number of blocks that a full batch holds at once.

        With chunked prefill, all sequences of a step together compute at most one chunk, so that most of them
        need only the blocks of decode steps.
        """
        full_chunk_blocks = batch_size * self._sequence_blocks(group, length)
        if self._chunk_size is None:
            return full_chunk_blocks
        decode_blocks = group.max_blocks(length, self._block_size, self._decode_tokens)
        return min(
            full_chunk_blocks, batch_size * (decode_blocks + 1) + -(-self._chunk_size // self._block_size)
        )


def largest_fitting(upper: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to ``upper`` that fits; 0 if none fits.

    If a number fits, all smaller numbers must also fit.
    """
    return bisect_right(range(1, upper + 1), False, key=lambda count: not fits(count))
