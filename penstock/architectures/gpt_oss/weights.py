"""Reads the experts of a gpt-oss checkpoint.

One tensor holds the matrices of all experts. Rows of gate and up matrix alternate. A tensor is plain floats
``[N, in, out]``, or MXFP4: ``_blocks [N, out, in / 32, 16]`` and ``_scales [N, out, in / 32]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import PackedExperts
from penstock.nn import Loader
from penstock.weights import Weights
from penstock.weights.mxfp4 import BLOCK, dequantized


def load_experts(load: Loader, name: str, experts: int, hidden: int, inner: int) -> PackedExperts:
    """Read N ``experts`` of E ``hidden`` and F ``inner`` with the common name ``name``, one at a time."""
    gate_up = _matrices(load, f"{name}.gate_up_proj", experts, 2 * inner, hidden)
    down = _matrices(load, f"{name}.down_proj", experts, hidden, inner)
    gate_up_bias = load.source.tensor(f"{name}.gate_up_proj_bias", (experts, 2 * inner))
    down_bias = load.source.tensor(f"{name}.down_proj_bias", (experts, hidden))
    # The parts have no names: checkpoints and adapters have no names for the matrices of one expert.
    packed = PackedExperts(
        tuple(
            load.pack(
                _deinterleave(gate_up(i)), {}, bias=_deinterleave(gate_up_bias[i]), is_expert=True
            ).packed
            for i in range(experts)
        ),
        tuple(load.pack(down(i), {}, bias=down_bias[i], is_expert=True).packed for i in range(experts)),
    )
    for tensor in ("gate_up_proj", "down_proj"):
        for part in ("", "_blocks", "_scales"):
            load.source.release(f"{name}.{tensor}{part}")
    return packed


def _matrices(
    load: Loader, name: str, experts: int, out_features: int, in_features: int
) -> Callable[[int], Tensor]:
    """Return a function from an expert's number to its matrix ``[out, in]``."""
    if f"{name}_blocks" not in load.source:
        floats = load.source.tensor(name, (experts, in_features, out_features))
        return lambda expert: floats[expert].T
    if in_features % BLOCK:
        raise ConfigError(
            "quantization_config", f"MXFP4 needs a multiple of {BLOCK} inputs, and {name} has {in_features}"
        )
    assert isinstance(load.source, Weights), "only safetensors files hold MXFP4 blocks"
    groups = in_features // BLOCK
    blocks = load.source.bytes_tensor(f"{name}_blocks", (experts, out_features, groups, BLOCK // 2))
    scales = load.source.bytes_tensor(f"{name}_scales", (experts, out_features, groups))
    return lambda expert: dequantized(blocks[expert], scales[expert])


def _deinterleave(rows: Tensor) -> Tensor:
    """Return the gate rows, then the up rows, of a matrix in which they alternate."""
    return torch.cat([rows[0::2], rows[1::2]])
