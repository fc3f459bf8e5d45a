"""Default sizes of batches and steps, and the KV cache blocks that sequences need."""

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


def wanted_batch_size(pipeline_config: PipelineConfig) -> int:
    """Return ``max_batch_size``, or the back end's default, at most the tokens of a step."""
    if pipeline_config.max_batch_size is not None:
        return pipeline_config.max_batch_size
    size = default_sizes(pipeline_config).max_batch_size
    if pipeline_config.model.pipeline_task is PipelineTask.EMBEDDINGS_GENERATION:
        size = max(size, _EMBEDDINGS_BATCH_SIZE)
    return min(size, wanted_step_size(pipeline_config))


def wanted_step_size(pipeline_config: PipelineConfig) -> int:
    """Return ``max_batch_input_tokens``, or the back end's default, at least ``max_batch_size``."""
    if pipeline_config.max_batch_input_tokens is not None:
        return pipeline_config.max_batch_input_tokens
    return max(default_sizes(pipeline_config).step_tokens, pipeline_config.max_batch_size or 0)


def wanted_block_size(pipeline_config: PipelineConfig) -> int:
    """Return ``kv_cache_block_size``, or the back end's default."""
    return pipeline_config.kv_cache.block_size or default_sizes(pipeline_config).block_size


def default_sizes(pipeline_config: PipelineConfig) -> DefaultSizes:
    """Return the sizes that the configured back end prefers on the configured device.

    Raises:
        ConfigError: the configured back end does not exist or does not run on the device.
    """
    model = pipeline_config.model
    return backend.BACKENDS.default_sizes(model.devices[0].device_type, model.kernels)


MAX_DRAFT_ROWS = 256
"""Planned drafts per step over all sequences; each has a row of logits."""


def wanted_logit_rows(pipeline_config: PipelineConfig) -> int:
    """Return the planned rows of logits per step: one per sequence and one per draft."""
    batch_size = wanted_batch_size(pipeline_config)
    return batch_size + min(batch_size * pipeline_config.speculative.max_drafts, MAX_DRAFT_ROWS)


class BlockDemand:
    """The number of KV cache blocks that sequences need in each group, and their size.

    All numbers grow with the length and the batch size, so that a binary search finds the largest that fits.
    In a group with a sliding window the number does not grow beyond the window: earlier blocks are freed.
    """

    def __init__(self, pipeline_config: PipelineConfig, spec: KVCacheSpec) -> None:
        self._block_size = wanted_block_size(pipeline_config)
        self._groups = spec.groups
        self._bytes_per_block = spec.bytes_per_block(self._block_size)
        self._num_steps = max(pipeline_config.max_num_steps or 1, 1 + pipeline_config.speculative.max_drafts)
        chunks = pipeline_config.enable_chunked_prefill
        self._chunk_size = max(wanted_step_size(pipeline_config), spec.max_span) if chunks else None

    def size(self, num_blocks: tuple[int, ...]) -> int:
        """Return the bytes of a cache with these numbers of blocks per group."""
        return sum(count * size for count, size in zip(num_blocks, self._bytes_per_block, strict=True))

    def minimum(self, length: int, batch_size: int) -> tuple[int, ...]:
        """Return the minimum number of blocks of each group, including the null block.

        It is the larger of the blocks of one whole sequence and one block per sequence of the batch.
        """
        return tuple(max(self._of_sequence(group, length), batch_size) + 1 for group in self._groups)

    def fill(self, length: int, batch_size: int, budget: int) -> tuple[int, ...]:
        """Return the largest numbers of blocks that fit into ``budget`` bytes.

        All groups get the same number, but no group gets more than it can use.
        """
        lowest = self.minimum(length, batch_size)
        highest = [self._of_batch(group, length, batch_size) + 1 for group in self._groups]

        def blocks(count: int) -> tuple[int, ...]:
            return tuple(min(max(low, count), high) for low, high in zip(lowest, highest, strict=True))

        return blocks(largest(max(highest), lambda count: self.size(blocks(count)) <= budget))

    def _of_sequence(self, group: KVGroup, length: int) -> int:
        """Return the number of blocks of a sequence of ``length`` tokens while a chunk of it is computed."""
        rows = None if self._chunk_size is None else self._chunk_size + self._num_steps - 1
        return group.max_blocks(length, self._block_size, rows)

    def _of_batch(self, group: KVGroup, length: int, batch_size: int) -> int:
        """Return the number of blocks of a batch.

        The sequences of a step share its token budget, so not all of them compute a full chunk.
        """
        unshared = batch_size * self._of_sequence(group, length)
        if self._chunk_size is None:
            return unshared
        decoding = group.max_blocks(length, self._block_size, self._num_steps)
        return min(unshared, batch_size * (decoding + 1) + -(-self._chunk_size // self._block_size))


def largest(upper: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``upper`` that fits, or 0. If a number fits, smaller ones fit too."""
    return bisect_right(range(1, upper + 1), False, key=lambda count: not fits(count))
