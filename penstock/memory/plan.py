"""`plan_memory`: chooses the maximum length, the batch size, the step size and the size of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config import PipelineConfig, upper_bounded_default
from penstock.errors import InsufficientMemoryError
from penstock.memory.demand import (
    BlockDemand,
    largest_fitting,
    requested_batch_size,
    requested_block_size,
    requested_step_tokens,
)
from penstock.memory.refusals import format_bytes, refuse_cache, refuse_model

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.kv_cache.spec import KVCacheSpec

MIN_STEP_TOKENS = 512
"""Number of tokens of the smallest step that uses a CPU fully.

The planner chooses a smaller step only if it is configured, or if the model does not fit into memory
otherwise.
"""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The lengths, batch sizes and memory sizes of a pipeline. Memory sizes are in bytes."""

    max_length: int
    """The maximum length of a sequence, prompt and output together, in tokens."""
    max_batch_size: int
    max_batch_input_tokens: int
    """The maximum number of tokens of a step: the requested number, or less if the KV cache needs the memory.
    """
    num_blocks: tuple[int, ...]
    """The number of blocks of each group of the KV cache, including the null block; empty without a cache."""
    block_size: int
    weights_size: int
    activation_size: int
    kv_cache_size: int
    available_memory: int
    """The memory that the KV cache and the parts of `static_size` may use together."""
    model_max_length: int
    """The configured maximum length, or that of the model, in tokens. Memory can reduce `max_length`."""
    adapters_size: int = 0
    """The size of the device slots for LoRA adapters."""
    encoder_size: int = 0
    """The size of the activations of the image encoder."""
    encoder_cache_size: int = 0
    """The size of the cache of encoded images."""

    @property
    def num_cache_tokens(self) -> int:
        """The number of tokens that fit into the KV cache, over all sequences."""
        # All groups without a sliding window have the same number of blocks. Groups with a window have at
        # most this number.
        return (max(self.num_blocks) - 1) * self.block_size if self.num_blocks else 0

    @property
    def static_size(self) -> int:
        """The size of everything except the KV cache."""
        images = self.encoder_size + self.encoder_cache_size
        return self.weights_size + self.adapters_size + self.activation_size + images

    @property
    def is_shortened(self) -> bool:
        """Whether the maximum length was reduced to fit into memory."""
        return self.max_length < self.model_max_length

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the plan as pairs of name and text."""
        used_memory = self.static_size + self.kv_cache_size
        free_memory = self.available_memory - used_memory
        shortened_text = f", shortened from {self.model_max_length:,} to fit" if self.is_shortened else ""
        step_text = f"for steps of {self.max_batch_input_tokens:,} tokens"
        adapter_rows = [("adapters", format_bytes(self.adapters_size))] if self.adapters_size else []
        image_rows = []
        if self.encoder_size:
            cache_text = f"{format_bytes(self.encoder_cache_size)} for encoded images"
            image_rows = [("images", f"{format_bytes(self.encoder_size)} for the encoder, {cache_text}")]
        return [
            ("weights", format_bytes(self.weights_size)),
            *adapter_rows,
            ("activations", f"{format_bytes(self.activation_size)} {step_text}"),
            *image_rows,
            ("KV cache", f"{format_bytes(self.kv_cache_size)} for {self.num_cache_tokens:,} tokens"),
            ("free", f"{format_bytes(free_memory)} of {format_bytes(self.available_memory)}"),
            ("max length", f"{self.max_length:,} tokens{shortened_text}"),
            ("max batch size", f"{self.max_batch_size:,} requests"),
        ]

    def table(self) -> Table:
        """Return `rows` as a table for a terminal."""
        from rich.table import Table

        table = Table("memory plan", "", show_edge=False)
        for row in self.rows():
            table.add_row(*row)
        return table


def plan_memory(
    pipeline_config: PipelineConfig,
    spec: KVCacheSpec | None,
    *,
    model_max_length: int,
    weights_size: int,
    activation_size: int,
    free_memory: int,
    adapters_size: int = 0,
    min_step_tokens: int = 0,
    encoder_size: int = 0,
    encoder_cache_size: int = 0,
) -> MemoryPlan:
    """Return the maximum length, the batch size, the step size and the size of the KV cache.

    The paged KV cache must have room for one sequence of the maximum length, and for one block of each
    sequence of a batch. If this cache does not fit, the planner reduces the batch size, then the step size
    down to `MIN_STEP_TOKENS`, then the length, and last the step size again. It does not reduce a configured
    batch size or length. It reduces the step size, which makes the activations smaller, only with chunked
    prefill. Without a configured ``kv_cache_memory``, all remaining memory is used for more blocks, up to the
    number that a full batch of sequences of the maximum length needs.

    Args:
        pipeline_config: can set ``max_length``, ``max_batch_size``, ``max_batch_input_tokens`` and
            ``kv_cache_memory``.
        spec: the KV cache of the model; None for a model without one.
        model_max_length: the longest sequence that the model supports, in tokens.
        weights_size: see `estimate_weights_size`.
        activation_size: see `estimate_activation_memory`, for steps of ``max_batch_input_tokens``.
        free_memory: free memory of all devices before loading.
        adapters_size: see `estimate_adapters_size`.
        min_step_tokens: minimum number of tokens of the largest step, because an input of this length cannot
            be split. A smaller step size saves no memory.
        encoder_size: size of the activations of the image encoder.
        encoder_cache_size: size of the cache of encoded images.

    Raises:
        InsufficientMemoryError: the model does not fit, even with the smallest values of the settings that
            are not configured.
        ConfigError: ``max_length`` exceeds ``model_max_length``.
    """

    max_step_tokens = max(requested_step_tokens(pipeline_config), min_step_tokens)

    def plan(step_size: int) -> MemoryPlan:
        return _plan(
            replace(pipeline_config, max_batch_input_tokens=step_size),
            spec,
            model_max_length,
            weights_size,
            activation_size * max(step_size, min_step_tokens) // max_step_tokens,
            free_memory,
            adapters_size,
            encoder_size,
            encoder_cache_size,
        )

    *larger_steps, smallest_step = _step_sizes(
        pipeline_config, activation_size, max(MIN_STEP_TOKENS, min_step_tokens)
    )
    for step_size in larger_steps:
        with suppress(InsufficientMemoryError):
            candidate = plan(step_size)
            if not candidate.is_shortened:
                return candidate
    *smaller_steps, minimum_step = _step_sizes(pipeline_config, activation_size, max(1, min_step_tokens))
    for step_size in (smallest_step, *smaller_steps):
        with suppress(InsufficientMemoryError):
            return plan(step_size)
    return plan(minimum_step)


def estimate_kv_cache_size(
    pipeline_config: PipelineConfig,
    spec: KVCacheSpec | None,
    *,
    model_max_length: int,
    available_cache_memory: int,
) -> int:
    """Return the size in bytes of the KV cache, at most ``available_cache_memory``; 0 without a cache.

    Raises:
        InsufficientMemoryError: the smallest cache that the configuration permits does not fit.
    """
    if spec is None:
        return 0
    _, batch_size, num_blocks = _plan_cache(pipeline_config, spec, model_max_length, available_cache_memory)
    return BlockDemand(pipeline_config, spec).cache_size(num_blocks, batch_size)


def _step_sizes(pipeline_config: PipelineConfig, activation_size: int, min_size: int) -> Iterator[int]:
    """Yield the requested step size; with chunked prefill, also its repeated halves down to ``min_size``."""
    size = requested_step_tokens(pipeline_config)
    yield size
    while pipeline_config.enable_chunked_prefill and activation_size and size >= 2 * min_size:
        size //= 2
        yield size


def _plan(
    pipeline_config: PipelineConfig,
    spec: KVCacheSpec | None,
    model_max_length: int,
    weights_size: int,
    activation_size: int,
    free_memory: int,
    adapters_size: int,
    encoder_size: int,
    encoder_cache_size: int,
) -> MemoryPlan:
    images_size = encoder_size + encoder_cache_size
    static_size = weights_size + adapters_size + activation_size + images_size
    kv_config = pipeline_config.kv_cache
    available = int(free_memory * kv_config.device_memory_utilization)
    if kv_config.memory is not None:
        available = min(static_size + kv_config.memory, free_memory)
    if static_size + (kv_config.memory or 0) > available:
        refuse_model(
            pipeline_config,
            weights_size,
            activation_size,
            available,
            free_memory,
            adapters_size,
            images_size,
        )
    requested_length = upper_bounded_default(model_max_length, pipeline_config.model.max_length)
    max_length, max_batch_size = requested_length, requested_batch_size(pipeline_config)
    num_blocks: tuple[int, ...] = ()
    kv_cache_size = 0
    if spec is not None:
        max_length, max_batch_size, num_blocks = _plan_cache(
            pipeline_config, spec, model_max_length, available - static_size
        )
        kv_cache_size = BlockDemand(pipeline_config, spec).cache_size(num_blocks, max_batch_size)
    return MemoryPlan(
        max_length=max_length,
        max_batch_size=max_batch_size,
        max_batch_input_tokens=requested_step_tokens(pipeline_config),
        num_blocks=num_blocks,
        block_size=requested_block_size(pipeline_config),
        weights_size=weights_size,
        activation_size=activation_size,
        kv_cache_size=kv_cache_size,
        available_memory=available,
        model_max_length=requested_length,
        adapters_size=adapters_size,
        encoder_size=encoder_size,
        encoder_cache_size=encoder_cache_size,
    )


def _plan_cache(
    pipeline_config: PipelineConfig, spec: KVCacheSpec, model_max_length: int, budget: int
) -> tuple[int, int, tuple[int, ...]]:
    """Return the maximum length, the batch size and the blocks per group for a cache of ``budget`` bytes.

    Values that are not configured are reduced until the cache fits.

    Raises:
        InsufficientMemoryError: no permitted values fit.
    """
    demand = BlockDemand(pipeline_config, spec)
    fixed_length, fixed_batch = pipeline_config.model.max_length, pipeline_config.max_batch_size
    length = upper_bounded_default(model_max_length, fixed_length)
    batch_size = requested_batch_size(pipeline_config)

    def fits(length: int, batch_size: int) -> bool:
        return demand.cache_size(demand.min_blocks(length, batch_size), batch_size) <= budget

    def max_fitting_length(batch_size: int) -> int:
        return largest_fitting(length, lambda candidate: fits(candidate, batch_size))

    def max_fitting_batch(length: int) -> int:
        return largest_fitting(batch_size, lambda candidate: fits(length, candidate))

    chosen_length = fixed_length or max_fitting_length(fixed_batch or 1) or 1
    chosen_batch = fixed_batch or max_fitting_batch(chosen_length) or 1
    if not fits(chosen_length, chosen_batch):
        suggested_length = max_fitting_length(1) if fixed_length else 1
        refuse_cache(
            pipeline_config,
            needed=demand.cache_size(demand.min_blocks(chosen_length, chosen_batch), chosen_batch),
            available=budget,
            suggested_length=suggested_length,
            suggested_batch_size=max_fitting_batch(suggested_length or 1),
        )
    return chosen_length, chosen_batch, demand.fit_budget(chosen_length, chosen_batch, budget)
