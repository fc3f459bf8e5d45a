"""The experts of a mixture-of-experts layer, computed by one call of a C++ kernel.

The kernel finds the weights of the experts through a table of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.kernels.cpu.library import Kernels
from penstock.kernels.cpu.linear import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    LONG_KERNEL_MULTIPLICATIONS,
    PANELS,
    CpuLinear,
    supports_dtype,
    supports_order,
)
from penstock.kernels.cpu.packing import ENCODING_CODES
from penstock.kernels.experts import ClampedSwiGLU, PackedExperts
from penstock.kernels.inputs import LoRAInputs
from penstock.kernels.linear import PackedLinear
from penstock.kernels.ops import Gating

_CLAMPED_SWIGLU = 5  # code of clamped SwiGLU in csrc/experts.inl; the codes 0 to 4 are `ACTIVATION_CODES`


@dataclass(frozen=True, slots=True)
class _AddressTable:
    """Addresses of the weights of N experts whose layers have equal encodings, shapes and bias types."""

    addresses: Tensor  # [N, 2, 4] int64: panels, scales, order and bias of gate_up and down; 0 for none
    gate_up: PackedLinear  # of the first expert
    down: PackedLinear  # of the first expert
    slice_names: frozenset[str]  # `PackedExperts.slice_names`


class CpuExperts(CpuLinear):
    """Experts with C++ kernels, for float32 and bfloat16 activations.

    Calls that the kernel does not support, such as calls with adapters on experts, use the base class.

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
        table, dtype_code, (row_stride, column_stride) = (
            self._get_table(packed),
            DTYPE_CODES.get(x.dtype),
            x.stride(),
        )
        types_fit = topk_weights.dtype == torch.float32 and topk_ids.dtype == torch.int64
        layout_fits = column_stride == topk_weights.stride(1) == topk_ids.stride(1) == 1
        layout_fits = layout_fits and topk_ids.shape[1] > 0
        has_adapters = (
            lora is not None and table is not None and not table.slice_names.isdisjoint(lora.matrices)
        )
        if table is None or dtype_code is None or has_adapters or not (types_fit and layout_fits):
            self._report_fallback(
                "experts",
                {
                    "experts that differ, or their layout or input order": table is not None,
                    f"{x.dtype} activations": dtype_code is not None,
                    "adapters on experts": not has_adapters,
                    "weights or ids of this type": types_fit,
                    "this memory layout, or no selected experts": layout_fits,
                },
            )
            return super().experts(x, packed, topk_weights, topk_ids, gating, lora=lora)
        gate_up, down = table.gate_up, table.down
        if not (_is_supported(gate_up, x.dtype) and _is_supported(down, x.dtype)):
            weights = f"{gate_up.encoding} and {down.encoding} weights, or their biases,"
            self._report_fallback("experts", {f"{weights} with {x.dtype} activations": False})
            return super().experts(x, packed, topk_weights, topk_ids, gating, lora=lora)
        (rows, hidden), top_k, inner = x.shape, topk_ids.shape[1], down.in_features
        expected_sizes = (gate_up.in_features, len(topk_weights), len(topk_ids))
        assert (hidden, rows, rows) == expected_sizes, "x, topk_weights or topk_ids has the wrong size"
        gating_code, alpha, limit = _gating_arguments(gating)
        out = self._empty(x.shape, x.dtype)
        is_long = 3 * rows * top_k * hidden * inner > LONG_KERNEL_MULTIPLICATIONS
        bad_index = (self._kernels.long_experts if is_long else self._kernels.experts)(
            dtype_code,
            gating_code,
            x.data_ptr(),
            row_stride,
            topk_ids.data_ptr(),
            topk_ids.stride(0),
            topk_weights.data_ptr(),
            topk_weights.stride(0),
            self._keep_alive(table.addresses).data_ptr(),
            out.data_ptr(),
            rows,
            top_k,
            len(packed.down),
            ENCODING_CODES[gate_up.encoding],
            ENCODING_CODES[down.encoding],
            hidden,
            inner,
            packed.first_id,
            int(packed.is_part),
            alpha,
            limit,
        )
        if bad_index != -1:
            invalid_id = int(topk_ids.flatten()[bad_index])
            raise IndexError(f"expert id {invalid_id} is not in 0..{len(packed.down) - 1}")
        return out

    def _get_table(self, packed: PackedExperts) -> _AddressTable | None:
        """Return the table of ``packed``; None if the kernel does not support its experts."""
        if packed not in self._tables:
            self._tables[packed] = _build_table(packed)
        return self._tables[packed]


def _build_table(packed: PackedExperts) -> _AddressTable | None:
    """Return the table of ``packed``; None if the kernel does not support its experts.

    The kernel requires layers in panels, with an input order that it supports. All experts must have equal
    encodings, shapes and bias types, and the shapes of gate_up and down must match.
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
    """Return the code of a gating in csrc/experts.inl, and alpha and limit of clamped SwiGLU (else 0)."""
    if isinstance(gating, ClampedSwiGLU):
        return _CLAMPED_SWIGLU, gating.alpha, gating.limit
    return ACTIVATION_CODES[gating], 0.0, 0.0


def _are_uniform(linears: Sequence[PackedLinear]) -> bool:
    """Return whether all layers are in panels with an input order that kernels support, and in one format."""
    fit = all(linear.layout == PANELS and supports_order(linear) for linear in linears)
    return fit and len({_format(linear) for linear in linears}) == 1


def _format(linear: PackedLinear) -> tuple[str, int, int, torch.dtype | None]:
    """Return the encoding, the number of inputs and outputs, and the bias type of a layer."""
    bias_dtype = None if linear.bias is None else linear.bias.dtype
    return linear.encoding, linear.in_features, linear.out_features, bias_dtype


def _tensor_addresses(linear: PackedLinear) -> list[int]:
    """Return the addresses of the panels, scales, order and bias of a layer; 0 for a missing tensor."""
    tensors = (linear.tensors["panels"], linear.tensors.get("scales"), linear.order, linear.bias)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _is_supported(linear: PackedLinear, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports a layer with activations of type ``dtype``.

    The bias must have the same type.
    """
    return supports_dtype(linear.encoding, dtype) and (linear.bias is None or linear.bias.dtype == dtype)
