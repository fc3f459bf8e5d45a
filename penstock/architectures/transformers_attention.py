"""Penstock's attention over the paged KV cache, as an attention function of the transformers library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penstock.errors import UnsupportedFeatureError
from penstock.kernels import StepInputs
from penstock.kv_cache import KVCacheSpec, KVGroup

ATTENTION_NAME = "penstock_paged"
"""The name under which transformers finds the attention function."""
STEP_ARGUMENT = "penstock_step"
"""The keyword argument of a forward that transformers passes to the attention function."""


@dataclass(frozen=True, slots=True)
class ModuleStep:
    """The inputs of a step, passed to all attention layers of a transformers module."""

    step: StepInputs
    spec: KVCacheSpec
    calls: list[int] = field(default_factory=list)
    """The indices of the layers that have called `paged_attention` in this step."""

    def layer_group(self, layer: int) -> KVGroup:
        """Return the group of the cache that contains a layer."""
        return self.spec.groups[self.spec.group_of_layer[layer]]


def register() -> None:
    """Register `paged_attention` with transformers, without a mask function.

    The KV cache determines the visible keys, so the transformers library does not need to build a mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*args: object, **kwargs: object) -> None:
    return None


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:  # [1, T, H, D]
    """Store the keys and values of a step in the KV cache and return the attention output and None.

    The attention layers of a transformers module call this function. Without a KV cache, the rows of a
    sequence attend only to themselves and to earlier rows of the same step.

    Raises:
        UnsupportedFeatureError: the layer requests an attention that does not match the KV cache, or the
            module does not pass `STEP_ARGUMENT` to its layers.
    """
    module_step = options.pop(STEP_ARGUMENT, None)
    if not isinstance(module_step, ModuleStep):
        raise UnsupportedFeatureError(
            type(module).__name__, "its forward does not pass keyword arguments to the attention layers"
        )
    layer = _layer_index(module, module_step.spec)
    group = module_step.layer_group(layer)
    _check_call(module, group, key, value, attention_mask, options)
    module_step.calls.append(layer)
    step = module_step.step
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
    if step.kv is None:
        window = None if group.window is None else group.window - 1
        out = step.ops.encoder_attention(
            q, k, v, step.row_offsets, scale=scale, window=window, is_causal=True
        )
    else:
        kv = step.kv.layer(layer)
        step.ops.store_kv(k, v, kv)
        out = step.ops.attention(
            q,
            kv,
            step.row_offsets,
            step.kv.lengths,
            scale=scale,
            soft_cap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
    return out[None], None


def _layer_index(module: nn.Module, spec: KVCacheSpec) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < spec.num_layers:
        raise UnsupportedFeatureError(
            type(module).__name__,
            f"its layer_idx is {layer!r}, but the KV cache has {spec.num_layers} layers",
        )
    return layer


_SUPPORTED_OPTIONS = {
    "softcap",
    "s_aux",
    "sliding_window",
    "is_causal",
    "position_ids",
    "use_cache",
    "cache_position",
}
"""Options that `paged_attention` applies or checks, or that the KV cache implements."""


def _check_call(
    module: nn.Module,
    group: KVGroup,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: Mapping[str, object],
) -> None:
    """Refuse shapes and windows that do not match the layer's group of the KV cache.

    Also refuse masks, attention that is not causal, and tensors in unknown options.
    """
    name = type(module).__name__
    expected = (group.kv_heads, group.head_dim)
    for part, tensor in (("keys", key), ("values", value)):
        shape = (tensor.shape[1], tensor.shape[3])
        if shape != expected:
            raise UnsupportedFeatureError(
                name, f"its {part} have [heads, size] {shape}, but the KV cache has {expected}"
            )
    window = options.get("sliding_window")
    if (
        isinstance(window, int)
        and window
        and window != group.window
        and not (group.window is None and window >= _NO_WINDOW)
    ):
        raise UnsupportedFeatureError(
            name, f"its window is {window}, but the window of the KV cache is {group.window}"
        )
    if attention_mask is not None:
        raise UnsupportedFeatureError(name, "it creates an attention mask")
    is_causal = options.get("is_causal")
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise UnsupportedFeatureError(name, "its attention is not causal")
    unknown = [
        option
        for option, value in options.items()
        if option not in _SUPPORTED_OPTIONS and isinstance(value, Tensor)
    ]
    if unknown:
        raise UnsupportedFeatureError(name, f"its attention needs {', '.join(sorted(unknown))}")


_NO_WINDOW = 1 << 30
"""A window of at least this number of keys counts as no window."""
