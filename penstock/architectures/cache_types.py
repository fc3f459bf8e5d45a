"""The element type of a model's KV cache, and the cache scales that a checkpoint stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from penstock.dtype import DType
from penstock.kernels import encoding_named
from penstock.weights.cache_scales import read_cache_scales

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.distributed import Shard
    from penstock.kv_cache import KVCacheSpec


def kv_dtype(pipeline_config: PipelineConfig) -> DType:
    """Return the element type of the KV cache: the configured type, else the type of the activations."""
    configured = pipeline_config.kv_cache.dtype
    if configured == "fp8":
        return DType.float8_e4m3fn
    return DType(configured) if configured else encoding_named(pipeline_config.model.encoding).compute_dtype


def with_stored_scales(spec: KVCacheSpec, pipeline_config: PipelineConfig) -> KVCacheSpec:
    """Return ``spec`` with fixed scales in each float8 E4M3 group whose layers all have stored scales.

    Returns ``spec`` itself if no group has the type float8 E4M3.
    """
    if all(group.dtype is not DType.float8_e4m3fn for group in spec.groups):
        return spec
    return spec.with_fixed_scales(pipeline_config.model.opened_checkpoint.cache_scales)


def fixed_scales(
    pipeline_config: PipelineConfig, spec: KVCacheSpec, shard: Shard
) -> dict[int, Tensor] | None:
    """Return a map from layer to ``[2, K]``: the stored scales of keys and values of a rank's K kv heads.

    Args:
        pipeline_config: the configuration with the checkpoint.
        spec: the KV cache of the whole model, with the kv heads of all ranks.
        shard: the rank.

    Returns:
        None if no layer has fixed scales.

    Raises:
        WeightsError: a scale has an unsupported type or a wrong size, or is not a positive number.
    """
    spec = with_stored_scales(spec, pipeline_config)
    num_kv_heads = {
        layer: group.kv_heads for group in spec.groups if group.has_fixed_scales for layer in group.layers
    }
    if not num_kv_heads:
        return None
    stored_scales = read_cache_scales(pipeline_config.model.opened_checkpoint.cache_scales, num_kv_heads)
    rank_heads = {layer: shard.kv_heads(count) for layer, count in num_kv_heads.items()}
    return {
        layer: scales[:, rank_heads[layer].start : rank_heads[layer].stop]
        for layer, scales in stored_scales.items()
    }
