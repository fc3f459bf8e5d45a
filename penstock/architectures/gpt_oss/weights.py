"""Reads the experts of a gpt-oss checkpoint, in which gate and up rows alternate.

Unquantized experts are stored as one tensor ``[N, in, out]``. Quantized experts are stored as one tensor
``[out, in]`` per expert, with the name ``<name>.<expert>.weight``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.distributed import Part
from penstock.kernels import PackedExperts, PackedLinear
from penstock.nn import Loader, find_local_experts


def load_experts(load: Loader, name: str, num_experts: int, hidden: int, inner: int) -> PackedExperts:
    """Read and pack the N = ``num_experts`` experts called ``name``; ``hidden`` is E, ``inner`` is F."""
    gate_up_bias = load.source.tensor(f"{name}.gate_up_proj_bias", (num_experts, 2 * inner))
    down_bias = load.source.tensor(f"{name}.down_proj_bias", (num_experts, hidden))
    if load.shard.is_whole and f"{name}.down_proj.0.weight" in load.source:
        gate_up_bias = torch.cat([gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]], dim=1)
        return PackedExperts(
            _load_stored(load, f"{name}.gate_up_proj", gate_up_bias, hidden, _deinterleave),
            _load_stored(load, f"{name}.down_proj", down_bias, inner),
        )
    gate_up = _matrix_reader(load, f"{name}.gate_up_proj", num_experts, 2 * inner, hidden)
    down = _matrix_reader(load, f"{name}.down_proj", num_experts, hidden, inner)
    local_experts = find_local_experts(load, num_experts, inner, f"{name}.down_proj.0")
    inner_part = local_experts.inner_part or Part(0, inner)
    gate_up_rows = slice(2 * inner_part.start, 2 * inner_part.stop)
    for tensor, shape in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
        for i in local_experts.remote_experts(num_experts):
            if f"{name}.{tensor}.{i}.weight" in load.source:
                load.source.expect(f"{name}.{tensor}.{i}.weight", shape)
    # Exactly one rank adds a down bias: rank 0 if each expert is divided among the ranks, otherwise the rank
    # that has the expert.
    adds_bias = local_experts.inner_part is None or load.shard.rank == 0
    # Packed matrices get no names, because adapters do not apply to single experts.
    packed = local_experts.combine(
        (
            load.pack(
                _deinterleave(gate_up(i)[gate_up_rows]),
                {},
                bias=_deinterleave(gate_up_bias[i][gate_up_rows]),
                is_expert=True,
            )
            for i in local_experts.experts
        ),
        (
            load.pack(
                down(i)[:, inner_part.start : inner_part.stop],
                {},
                bias=down_bias[i] if adds_bias else None,
                is_expert=True,
            )
            for i in local_experts.experts
        ),
    )
    for tensor in (f"{name}.gate_up_proj", f"{name}.down_proj"):
        load.source.release(tensor)
        for i in range(num_experts):
            load.source.release(f"{tensor}.{i}.weight")
    return packed


def _load_stored(
    load: Loader,
    name: str,
    biases: Tensor,  # [N, out]
    in_features: int,
    reorder_rows: Callable[[Tensor], Tensor] | None = None,
) -> tuple[PackedLinear, ...]:
    """Return one linear layer of each expert, packed in the encoding of the checkpoint."""
    num_experts, out_features = biases.shape
    return tuple(
        load.expert(
            f"{name}.{i}", out_features, in_features, bias=biases[i], reorder_rows=reorder_rows
        ).packed
        for i in range(num_experts)
    )


def _matrix_reader(
    load: Loader, name: str, num_experts: int, out_features: int, in_features: int
) -> Callable[[int], Tensor]:
    """Return a function that maps the index of an expert to its matrix ``[out, in]``."""
    if f"{name}.0.weight" in load.source:
        return lambda expert: load.source.tensor(f"{name}.{expert}.weight", (out_features, in_features))
    matrices = load.source.tensor(name, (num_experts, in_features, out_features))
    return lambda expert: matrices[expert].T


def _deinterleave(rows: Tensor) -> Tensor:
    """Return the gate rows followed by the up rows of a matrix with alternating gate and up rows."""
    return torch.cat([rows[0::2], rows[1::2]])
