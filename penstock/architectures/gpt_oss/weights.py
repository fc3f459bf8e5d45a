"""Reads the experts of a gpt-oss checkpoint. Rows of gate and up matrix alternate.

Plain floats of all experts are one tensor ``[N, in, out]``. Quantized formats have one tensor ``[out, in]``
per expert, ``<name>.<expert>.weight``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels import PackedExperts
from penstock.nn import Loader


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
    for tensor in (f"{name}.gate_up_proj", f"{name}.down_proj"):
        load.source.release(tensor)
        for i in range(experts):
            load.source.release(f"{tensor}.{i}.weight")
    return packed


def _matrices(
    load: Loader, name: str, experts: int, out_features: int, in_features: int
) -> Callable[[int], Tensor]:
    """Return a function from an expert's number to its matrix ``[out, in]``."""
    if f"{name}.0.weight" in load.source:
        return lambda expert: load.source.tensor(f"{name}.{expert}.weight", (out_features, in_features))
    floats = load.source.tensor(name, (experts, in_features, out_features))
    return lambda expert: floats[expert].T


def _deinterleave(rows: Tensor) -> Tensor:
    """Return the gate rows, then the up rows, of a matrix in which they alternate."""
    return torch.cat([rows[0::2], rows[1::2]])
