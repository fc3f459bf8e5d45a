"""Scales of an 8-bit float KV cache, stored per layer in quantized checkpoints.

A key is the cached number times ``k_scale``, and a value is the cached number times ``v_scale``. A scale is
one number, or one number for each kv head. The tensor names of the key scale are ``self_attn.k_scale``
(compressed-tensors, transformers), ``self_attn.attn.k_scale``, ``self_attn.k_proj.k_scale`` (ModelOpt) and
``self_attn.k_proj.output_scale`` (early compressed-tensors). ``self_attn.kv_scale`` is the scale of both keys
and values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from math import isfinite, prod
from typing import TYPE_CHECKING

from penstock.errors import WeightsError
from penstock.weights.formats import Headers, quantization_section
from penstock.weights.safetensors import TensorHeader, read_tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor

CacheScales = Mapping[int, tuple[TensorHeader, TensorHeader]]
"""Layer index -> the headers of the key scale and the value scale."""

_NAME = re.compile(
    r"(?P<path>.*\blayers)\.(?P<layer>\d+)\.\w+\."
    r"(?:(?:attn\.|[kv]_proj\.)?(?P<side>k|v)_scale|(?P<proj>k|v)_proj\.output_scale|(?P<both>kv)_scale)"
)
_OTHER_MODELS = ("vision", "visual", "audio")  # parts of the names of encoders, whose KV is not cached
_logger = logging.getLogger(__name__)


def find_cache_scales(config: Mapping[str, object], stored: Headers) -> CacheScales:
    """Return the scales that a checkpoint stores for a KV cache of 8-bit floats; empty if it has none.

    If ``kv_cache_scheme`` describes another cache, such as 8-bit integers or dynamic scales, the scales are
    ignored. If a layer has only the key or only the value scale, all scales are ignored with a warning.
    """
    scheme = quantization_section(config).get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (
        scheme.get("num_bits", 8) != 8
        or scheme.get("type", "float") != "float"
        or scheme.get("dynamic")
        or not scheme.get("symmetric", True)
    ):
        return {}
    scale_headers: dict[tuple[int, str], TensorHeader] = {}
    for name, header in stored.items():
        match = _NAME.fullmatch(name)
        if match is not None and not any(part in match["path"] for part in _OTHER_MODELS):
            for side in match["side"] or match["proj"] or match["both"]:
                scale_headers[int(match["layer"]), side] = header
    layers = {layer for layer, _ in scale_headers}
    incomplete_layers = [
        layer for layer in sorted(layers) if not {(layer, "k"), (layer, "v")} <= scale_headers.keys()
    ]
    if incomplete_layers:
        _logger.warning(
            "the stored scales of the KV cache are not used: layers %s lack the key or the value scale",
            incomplete_layers,
        )
        return {}
    return {layer: (scale_headers[layer, "k"], scale_headers[layer, "v"]) for layer in sorted(layers)}


def read_cache_scales(scales: CacheScales, num_kv_heads: Mapping[int, int]) -> dict[int, Tensor]:
    """Return the scales of each layer: ``[2, K]`` float32, of the keys and the values of each kv head.

    Args:
        scales: the headers of the scales.
        num_kv_heads: layer index -> K, for the layers to read; ``scales`` must have each of these layers.

    Raises:
        WeightsError: a scale is not a float tensor of 1 or K elements, or is not finite and positive.
    """
    import torch

    return {
        layer: torch.stack([_read_scales(header, layer_kv_heads) for header in scales[layer]])
        for layer, layer_kv_heads in num_kv_heads.items()
    }


def _read_scales(header: TensorHeader, num_kv_heads: int) -> Tensor:  # [K]
    import torch

    num_scales, dtype = prod(header.shape), header.dtype
    if dtype is None or not dtype.is_float() or num_scales not in (1, num_kv_heads):
        raise WeightsError(
            header.file,
            f"{header.stored_name} is {header.type_name} {list(header.shape)}: the scale of a KV cache has "
            f"one float, or one for each of {num_kv_heads} kv heads",
        )
    values = torch.frombuffer(bytearray(read_tensor_bytes(header)), dtype=dtype.to_torch()).float()
    invalid_values = [value for value in values.tolist() if not (isfinite(value) and value > 0)]
    if invalid_values:
        raise WeightsError(
            header.file,
            f"{header.stored_name} is {invalid_values[0]}: a scale must be positive. With a kv_cache_dtype "
            "other than fp8 the scales are not read",
        )
    return values.expand(num_kv_heads)
