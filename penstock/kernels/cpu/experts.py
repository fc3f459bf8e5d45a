"""Experts: one call for all experts that a batch uses; a table holds the addresses of their weights."""

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

_CLAMPED = 5  # in addition to the activations


@dataclass(frozen=True, slots=True)
class _Table:
    """Addresses of the weights of experts that all have the same encoding and shape."""

    addresses: Tensor  # [N, 2, 4] int64: panels, scales, order and bias of gate_up and down; 0 for none
    gate_up: PackedLinear  # of one expert; all have this form
    down: PackedLinear
    names: frozenset[str]  # of all layers, in the checkpoint


class CpuExperts(CpuLinear):
    """Experts without adapters, for float32 and bfloat16 activations.

    Args:
        kernels: the kernels of one instruction set.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._tables: WeakKeyDictionary[PackedExperts, _Table | None] = WeakKeyDictionary()

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
        table, kind, (row_stride, stride) = self._table_of(packed), TYPES.get(x.dtype), x.stride()
        types_fit = topk_weights.dtype == torch.float32 and topk_ids.dtype == torch.int64
        rows_fit = stride == topk_weights.stride(1) == topk_ids.stride(1) == 1 and topk_ids.shape[1] > 0
        adapted = lora is not None and table is not None and not table.names.isdisjoint(lora.matrices)
        if table is None or kind is None or adapted or not (types_fit and rows_fit):
            self._fall_back(
                "experts",
                {
                    "experts that differ in encoding, layout or shape": table is not None,
                    f"{x.dtype} activations": kind is not None,
                    "adapters on experts": not adapted,
                    "this routing type or memory layout": types_fit and rows_fit,
                },
            )
            return super().experts(x, packed, topk_weights, topk_ids, gating, lora=lora)
        gate_up, down = table.gate_up, table.down
        if not (_fits(gate_up, x.dtype) and _fits(down, x.dtype)):
            self._fall_back("experts", {f"{gate_up.encoding} weights with {x.dtype} activations": False})
            return super().experts(x, packed, topk_weights, topk_ids, gating, lora=lora)
        (rows, hidden), top, inner = x.shape, topk_ids.shape[1], down.in_features
        assert (hidden, rows, rows) == (gate_up.in_features, len(topk_weights), len(topk_ids)), "other sizes"
        gate, alpha, limit = _gate_of(gating)
        out = self._empty(x.shape, x.dtype)
        long = 3 * rows * top * hidden * inner > LONG
        bad = (self._kernels.long_experts if long else self._kernels.experts)(
            kind,
            gate,
            x.data_ptr(),
            row_stride,
            topk_ids.data_ptr(),
            topk_ids.stride(0),
            topk_weights.data_ptr(),
            topk_weights.stride(0),
            self._hold(table.addresses).data_ptr(),
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
        if bad != -1:
            raise IndexError(f"expert {int(topk_ids.flatten()[bad])} of {len(packed.down)}")
        return out

    def _table_of(self, packed: PackedExperts) -> _Table | None:
        """Return the table of experts, built on first use; None if the kernel does not support them."""
        if packed not in self._tables:
            self._tables[packed] = _table_of(packed)
        return self._tables[packed]


def _table_of(packed: PackedExperts) -> _Table | None:
    if not (_have_one_form(packed.gate_up) and _have_one_form(packed.down)):
        return None
    gate_up, down = packed.gate_up[0], packed.down[0]
    if gate_up.out_features != 2 * down.in_features or gate_up.in_features != down.out_features:
        return None
    pairs = zip(packed.gate_up, packed.down, strict=True)
    addresses = torch.tensor([[_addresses_of(one) for one in pair] for pair in pairs], dtype=torch.int64)
    return _Table(addresses, gate_up, down, frozenset(packed.slice_names()))


def _gate_of(gating: Gating) -> tuple[int, float, float]:
    """Return the number of a gating in csrc, and its parameters alpha and limit."""
    if isinstance(gating, ClampedSwiGLU):
        return _CLAMPED, gating.alpha, gating.limit
    return ACTIVATIONS[gating], 0.0, 0.0


def _have_one_form(linears: Sequence[PackedLinear]) -> bool:
    """Return whether all linears are in panels and have one encoding, shape and bias type."""
    fit = all(linear.layout == PANELS and supports_order(linear) for linear in linears)
    return fit and len({_form(linear) for linear in linears}) == 1


def _form(linear: PackedLinear) -> tuple[str, int, int, torch.dtype | None]:
    bias = None if linear.bias is None else linear.bias.dtype
    return linear.encoding, linear.in_features, linear.out_features, bias


def _addresses_of(linear: PackedLinear) -> list[int]:
    tensors = (linear.tensors["panels"], linear.tensors.get("scales"), linear.order, linear.bias)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _fits(linear: PackedLinear, dtype: torch.dtype) -> bool:
    """Return whether the kernel multiplies activations of this type, and the bias has this type."""
    return supports_dtype(linear.encoding, dtype) and (linear.bias is None or linear.bias.dtype == dtype)
