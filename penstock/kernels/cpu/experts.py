"""Experts of mixture-of-experts layers, in one kernel call.

The kernel reads the weights of all experts through a table of their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.kernels.cpu.library import Kernels
from penstock.kernels.cpu.linear import (
    ACTIVATIONS,
    LONG,
    PANELS,
    TYPES,
    CpuLinear,
    supports_dtype,
    supports_order,
)
from penstock.kernels.cpu.packing import ENCODINGS
from penstock.kernels.experts import ClampedSwiGLU, PackedExperts
from penstock.kernels.inputs import LoRAInputs
from penstock.kernels.linear import PackedLinear
from penstock.kernels.ops import Gating

_CLAMPED_SWIGLU = 5  # number of this gating in csrc, after those of `ACTIVATIONS`


@dataclass(frozen=True, slots=True)
class _AddressTable:
    """Addresses of the weights of N experts that have the same encoding and shape."""

    addresses: Tensor  # [N, 2, 4] int64: panels, scales, order and bias of gate_up and down; 0 for none
    gate_up: PackedLinear  # of the first expert; all experts have its encoding and shape
    down: PackedLinear
    names: frozenset[str]  # checkpoint names of all layers


class CpuExperts(CpuLinear):
    """Experts with C++ kernels, for float32 and bfloat16 activations without adapters on experts.

    Other calls use the inherited method.

    Args:
        kernels: the kernels of one instruction set.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._tables: WeakKeyDictionary[PackedExperts, _AddressTable | None] = WeakKeyDictionary()

    def experts(
        self,
        x: Tensor,
        packed: PackedExperts,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gating: Gating,
        *,
        lora: LoRAInputs | None = None,
    ) -> Tensor:
        table, kind, (row_stride, stride) = self._get_table(packed), TYPES.get(x.dtype), x.stride()
        types_fit = topk_weights.dtype == torch.float32 and topk_ids.dtype == torch.int64
        rows_fit = stride == topk_weights.stride(1) == topk_ids.stride(1) == 1 and topk_ids.shape[1] > 0
        has_adapters = lora is not None and table is not None and not table.names.isdisjoint(lora.matrices)
        if table is None or kind is None or has_adapters or not (types_fit and rows_fit):
            self._fall_back(
                "experts",
                {
                    "experts that differ in encoding, layout or shape": table is not None,
                    f"{x.dtype} activations": kind is not None,
                    "adapters on experts": not has_adapters,
                    "this routing type or memory layout": types_fit and rows_fit,
                },
            )
            return super().experts(x, packed, topk_weights, topk_ids, gating, lora=lora)
        gate_up, down = table.gate_up, table.down
        if not (_is_supported(gate_up, x.dtype) and _is_supported(down, x.dtype)):
            self._fall_back("experts", {f"{gate_up.encoding} weights with {x.dtype} activations": False})
            return super().experts(x, packed, topk_weights, topk_ids, gating, lora=lora)
        (rows, hidden), top, inner = x.shape, topk_ids.shape[1], down.in_features
        assert (hidden, rows, rows) == (gate_up.in_features, len(topk_weights), len(topk_ids)), "other sizes"
        gate, alpha, limit = _gating_arguments(gating)
        out = self._empty(x.shape, x.dtype)
        is_long = 3 * rows * top * hidden * inner > LONG
        bad_index = (self._kernels.long_experts if is_long else self._kernels.experts)(
            kind,
            gate,
            x.data_ptr(),
            row_stride,
            topk_ids.data_ptr(),
            topk_ids.stride(0),
            topk_weights.data_ptr(),
            topk_weights.stride(0),
            self._keep_alive(table.addresses).data_ptr(),
            out.data_ptr(),
            rows,
            top,
            len(packed.down),
            ENCODINGS[gate_up.encoding],
            ENCODINGS[down.encoding],
            hidden,
            inner,
            packed.first,
            int(packed.is_part),
            alpha,
            limit,
        )
        if bad_index != -1:
            raise IndexError(f"expert {int(topk_ids.flatten()[bad_index])} of {len(packed.down)}")
        return out

    def _get_table(self, packed: PackedExperts) -> _AddressTable | None:
        """Return the table of experts, built on first use; None if the kernel does not support them."""
        if packed not in self._tables:
            self._tables[packed] = _build_table(packed)
        return self._tables[packed]


def _build_table(packed: PackedExperts) -> _AddressTable | None:
    """Return the table of experts.

    Returns None if a layer is not in panels, if the experts differ in encoding or shape, or if the shapes of
    gate_up and down do not match.
    """
    if not (_are_uniform(packed.gate_up) and _are_uniform(packed.down)):
        return None
    gate_up, down = packed.gate_up[0], packed.down[0]
    if gate_up.out_features != 2 * down.in_features or gate_up.in_features != down.out_features:
        return None
    pairs = zip(packed.gate_up, packed.down, strict=True)
    addresses = torch.tensor(
        [[_tensor_addresses(linear) for linear in pair] for pair in pairs], dtype=torch.int64
    )
    return _AddressTable(addresses, gate_up, down, frozenset(packed.slice_names()))


def _gating_arguments(gating: Gating) -> tuple[int, float, float]:
    """Return the number of a gating in csrc, and its parameters alpha and limit."""
    if isinstance(gating, ClampedSwiGLU):
        return _CLAMPED_SWIGLU, gating.alpha, gating.limit
    return ACTIVATIONS[gating], 0.0, 0.0


def _are_uniform(linears: Sequence[PackedLinear]) -> bool:
    """Return whether all layers are in panels, in a supported order, and equal in `_properties`."""
    fit = all(linear.layout == PANELS and supports_order(linear) for linear in linears)
    return fit and len({_properties(linear) for linear in linears}) == 1


def _properties(linear: PackedLinear) -> tuple[str, int, int, torch.dtype | None]:
    """Return encoding, inputs, outputs and bias type."""
    bias = None if linear.bias is None else linear.bias.dtype
    return linear.encoding, linear.in_features, linear.out_features, bias


def _tensor_addresses(linear: PackedLinear) -> list[int]:
    """Return the addresses of the panels, scales, order and bias of a layer; 0 for a missing tensor."""
    tensors = (linear.tensors["panels"], linear.tensors.get("scales"), linear.order, linear.bias)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _is_supported(linear: PackedLinear, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports activations of this type, and the bias has the same type."""
    return supports_dtype(linear.encoding, dtype) and (linear.bias is None or linear.bias.dtype == dtype)
