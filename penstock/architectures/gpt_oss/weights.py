"""The experts of a gpt-oss checkpoint: gates and ups lie in turns, all experts' in one tensor.

A tensor is plain floats ``[N, in, out]``, or MXFP4: ``_blocks [N, out, in / 32, 16]`` and ``_scales
[N, out, in / 32]``.
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
    """Reads N ``experts`` of E ``hidden`` and F ``inner`` under ``name``, one at a time."""
    gate_up = _matrices(load, f"{name}.gate_up_proj", experts, 2 * inner, hidden)
    down = _matrices(load, f"{name}.down_proj", experts, hidden, inner)
    gate_up_bias = load.source.tensor(f"{name}.gate_up_proj_bias", (experts, 2 * inner))
    down_bias = load.source.tensor(f"{name}.down_proj_bias", (experts, hidden))
    # No parts are named: no checkpoint and no adapter has names for one expert's matrices.
    packed = PackedExperts(
        tuple(
            load.pack(_in_halves(gate_up(i)), {}, bias=_in_halves(gate_up_bias[i]), is_expert=True).packed
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
    """Expert -> its matrix ``[out, in]``."""
    if f"{name}_blocks" not in load.source:
        floats = load.source.tensor(name, (experts, in_features, out_features))
        return lambda expert: floats[expert].T
    if in_features % BLOCK:
        raise ConfigError(
            "quantization_config", f"MXFP4 needs a multiple of {BLOCK} inputs, and {name} has {in_features}"
        )
    assert isinstance(load.source, Weights), "only safetensors files hold blocks"
    groups = in_features // BLOCK
    blocks = load.source.bytes_tensor(f"{name}_blocks", (experts, out_features, groups, BLOCK // 2))
    scales = load.source.bytes_tensor(f"{name}_scales", (experts, out_features, groups))
    return lambda expert: dequantized(blocks[expert], scales[expert])


def _in_halves(rows: Tensor) -> Tensor:
    """Rows that are a gate's, an up's, a gate's and so on, as all gates' and then all ups'."""
    return torch.cat([rows[0::2], rows[1::2]])
