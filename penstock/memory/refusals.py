"""Raises the errors of models that do not fit into memory. Messages name sizes and the settings to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from penstock.errors import InsufficientMemoryError

if TYPE_CHECKING:
    from penstock.config import PipelineConfig


def refuse_model(
    pipeline_config: PipelineConfig,
    weights_size: int,
    activation_size: int,
    available: int,
    free_memory: int,
    adapters_size: int,
    images_size: int = 0,
) -> NoReturn:
    """Raise the error that weights, activations, adapters and images exceed the available memory.

    A configured ``kv_cache_memory`` is included in the needed size.
    """
    kv_memory = pipeline_config.kv_cache.memory
    needed = weights_size + adapters_size + activation_size + images_size + (kv_memory or 0)
    sizes_text = f"weights take {format_bytes(weights_size)}, activations {format_bytes(activation_size)}"
    advice = "use a smaller model or a smaller --quantization-encoding, or lower --max-batch-input-tokens"
    if adapters_size:
        sizes_text += f", LoRA adapters {format_bytes(adapters_size)}"
        advice = f"lower --max-loras or --max-lora-rank, {advice}"
    if images_size:
        sizes_text += f", encoded images {format_bytes(images_size)}"
        advice = f"lower --encoder-cache-memory, {advice}"
    if kv_memory is not None:
        sizes_text += f", the KV cache {format_bytes(kv_memory)}"
        advice = f"lower --kv-cache-memory, {advice}"
    if pipeline_config.max_batch_size is not None:
        advice += " or --max-batch-size"
    if kv_memory is None and needed < free_memory:
        advice = f"raise --device-memory-utilization, {advice}"
    raise InsufficientMemoryError(
        f"{sizes_text}, but only {format_bytes(available)} of {format_bytes(free_memory)} free memory can be "
        f"used: {advice}",
        needed=needed,
        available=available,
    )


def refuse_cache(
    pipeline_config: PipelineConfig,
    *,
    needed: int,
    available: int,
    suggested_length: int,
    suggested_batch_size: int,
) -> NoReturn:
    """Raise the error that the KV cache does not fit.

    The message suggests values for those of ``max_length`` and ``max_batch_size`` that are configured. If
    neither is configured, or a suggested value is 0, the message names other settings to change.
    """
    length, batch_size = pipeline_config.model.max_length, pipeline_config.max_batch_size
    configured_values, suggestions = [], []
    if length is not None:
        configured_values.append(f"max_length {length}")
        suggestions.append(f"--max-length {suggested_length}")
    if batch_size is not None:
        configured_values.append(f"max_batch_size {batch_size}")
        suggestions.append(f"--max-batch-size {suggested_batch_size}")
    advice = f"try {' '.join(suggestions)}"
    if not suggestions or not suggested_length or not suggested_batch_size:
        advice = (
            "raise --device-memory-utilization or --kv-cache-memory, lower --max-batch-input-tokens or "
            "--kv-cache-block-size, or use a smaller model or a smaller --quantization-encoding"
        )
    raise InsufficientMemoryError(
        f"the KV cache needs {format_bytes(needed)} for {' and '.join(configured_values) or 'one block'}, "
        f"but only {format_bytes(available)} are left for it: {advice}",
        needed=needed,
        available=available,
    )


def format_bytes(count: int) -> str:
    """Return a size as text: ``1536`` -> ``1.5 KiB``."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
