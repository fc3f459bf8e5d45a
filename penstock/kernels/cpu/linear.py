"""Linear layers and adapters with C++ kernels. Weights are packed in panels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.dtype import DType
from penstock.host.memory import PrefaultedMemory
from penstock.kernels.activations import Activation
from penstock.kernels.cpu.library import Kernels
from penstock.kernels.cpu.memory import SliceMemory, WeightMemory
from penstock.kernels.cpu.packing import (
    ENCODING_CODES,
    pack_panels,
    pack_rows,
    panels_size,
    quantizes_activations,
)
from penstock.kernels.encodings import encoding_named
from penstock.kernels.encodings._sizes import PANEL
from penstock.kernels.inputs import LoRAInputs
from penstock.kernels.lazy_weight import LazyWeight
from penstock.kernels.linear import Layout, LinearSlice, PackedLinear, make_packed_linear, weight_shape
from penstock.kernels.reference import ReferenceOps

_logger = logging.getLogger(__name__)

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Codes, in csrc, of the activation types that the kernels support."""

ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
"""Codes of the activation functions in csrc/elementwise.inl."""

LONG_KERNEL_MULTIPLICATIONS = 1 << 27
"""A kernel call with more multiplications than this takes milliseconds, so it releases the GIL."""


_MAX_SLICE_BYTES = 2 << 20
"""Maximum bytes of a packed slice of a weight whose packing is deferred, unless one panel is larger.

`CpuLinear` packs and multiplies one slice at a time. A slice fits in the cache of a core.
"""


def _from_panels(packed: PackedLinear) -> Mapping[str, Tensor]:
    """Return the tensors of a packed weight in rows, as `LinearEncoding.pack` returns them."""
    panels = encoding_named(packed.encoding).panels
    assert panels is not None, f"{packed.encoding} weights have no panels"
    return panels.from_panels(packed.tensors, packed.out_features, packed.in_features)


PANELS = Layout("panels", _from_panels)
"""The panel layout, which `LinearEncoding.panels` defines for each encoding."""


class CpuLinear(ReferenceOps):
    """Linear layers and adapters, for float32 and bfloat16 activations.

    Args:
        kernels: the kernels of one instruction set.
    """

    name = "cpu"
    layout = PANELS

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._weight_memory = WeightMemory()
        self._slice_memory = SliceMemory(_MAX_SLICE_BYTES)
        self._logged_fallbacks: set[tuple[str, str]] = set()

    def pack_into(self, memory: PrefaultedMemory) -> None:
        self._weight_memory = WeightMemory(memory)

    def pack_linear(
        self,
        weight: Tensor | Sequence[Tensor],
        encoding: str,
        *,
        bias: Tensor | None = None,
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        if encoding not in ENCODING_CODES:
            self._report_fallback("pack_linear", {f"encoding {encoding}": False})
            return super().pack_linear(weight, encoding, bias=bias, slices=slices)
        parts = [weight] if isinstance(weight, Tensor) else weight
        return make_packed_linear(
            self._pack(parts, encoding), weight_shape(parts), encoding, bias, slices, self.layout
        )

    def pack_quantized(
        self,
        rows: Mapping[str, Tensor],
        encoding: str,
        *,
        bias: Tensor | None = None,
        slices: Sequence[LinearSlice] = (),
        order: Tensor | None = None,
    ) -> PackedLinear:
        if encoding not in ENCODING_CODES or encoding_named(encoding).is_float:
            self._report_fallback("pack_quantized", {f"encoding {encoding}": False})
            return super().pack_quantized(rows, encoding, bias=bias, slices=slices, order=order)
        with torch.no_grad():
            tensors = pack_rows(self._kernels, self._weight_memory, encoding, rows)
        shape = weight_shape([rows["weight"]])
        return make_packed_linear(tensors, shape, encoding, bias, slices, self.layout, order)

    def _can_defer(self, encoding: str, parts: Sequence[Tensor]) -> bool:
        return encoding in ENCODING_CODES

    def _pack(
        self,
        parts: Sequence[Tensor],
        encoding: str,
        importance: Tensor | None = None,
    ) -> dict[str, Tensor]:
        with torch.no_grad():
            return pack_panels(self._kernels, self._weight_memory, encoding, parts, importance=importance)

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        bias = packed.bias
        if not _is_supported(x, packed):
            self._report_fallback(
                "linear",
                {
                    f"{packed.encoding} weights with {x.dtype} activations": supports_dtype(
                        packed.encoding, x.dtype
                    ),
                    f"weights in layout {packed.layout.name}": packed.layout == PANELS,
                    f"{packed.encoding} weights with permuted inputs": supports_order(packed),
                    "rows that are not contiguous": x.stride(1) == 1,
                    "a bias of another type": bias is None or bias.dtype == x.dtype,
                },
            )
            return super().linear(x, packed, lora=lora)
        y = self._product(x, packed, None)
        return y if lora is None else self._add_lora(y, x, packed, lora)

    def activated_linear(
        self, x: Tensor, packed: PackedLinear, activation: Activation, *, lora: LoRAInputs | None = None
    ) -> Tensor:
        if not _is_supported(x, packed):
            return super().activated_linear(x, packed, activation, lora=lora)
        if lora is None or lora.for_slices(layer_slice.name for layer_slice in packed.slices) is None:
            return self._product(x, packed, activation)
        y = self._add_lora(self._product(x, packed, None), x, packed, lora)
        function, address = ACTIVATION_CODES[activation], y.data_ptr()
        self._kernels.apply_function(
            DTYPE_CODES[y.dtype], function, address, address, *y.shape, y.stride(0), 0.0, 0.0
        )
        return y

    def _product(self, x: Tensor, packed: PackedLinear, activation: Activation | None) -> Tensor:
        """Return ``x [T, in]`` times the weight, plus the bias, without adapters.

        The activation is applied to the result if it is not None.
        """
        assert x.shape[1] == packed.in_features, "x has another number of columns than the layer has inputs"
        y = self._empty((x.shape[0], packed.out_features), x.dtype)
        tensors = packed.tensors
        if isinstance(tensors, LazyWeight) and tensors.parts:
            self._multiply_parts(y, x, tensors.parts, packed.bias, activation)
        else:
            self._multiply(y, x, packed.encoding, tensors, packed.bias, packed.order, activation)
        return y

    def _multiply(
        self,
        y: Tensor,
        x: Tensor,
        encoding: str,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None,
        order: Tensor | None = None,
        activation: Activation | None = None,
    ) -> None:
        """Write ``x [T, in]`` times a weight in panels, with bias and activation, to ``y [T, out]``.

        The rows of x and y may be strided.
        """
        rows, in_features = x.shape
        out_features, scales = y.shape[1], tensors.get("scales")
        is_long = rows * in_features * out_features > LONG_KERNEL_MULTIPLICATIONS
        (self._kernels.long_linear if is_long else self._kernels.linear)(
            ENCODING_CODES[encoding],
            DTYPE_CODES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            tensors["panels"].data_ptr(),
            0 if scales is None else scales.data_ptr(),
            0 if order is None else order.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            rows,
            out_features,
            in_features,
            0 if activation is None else 1 + ACTIVATION_CODES[activation],
        )

    def _multiply_parts(
        self,
        y: Tensor,
        x: Tensor,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        activation: Activation | None,
    ) -> None:
        """Write ``x [T, in]`` times an unpacked float weight, with bias and activation, to ``y [T, out]``.

        Packs and multiplies one slice of the weight at a time, so that the slice stays in the cache.
        ``parts`` are the parts of the weight along its outputs, in order.
        """
        encoding = DType.from_torch(x.dtype).value
        slice_rows = max(_MAX_SLICE_BYTES // panels_size(encoding, PANEL, x.shape[1]), 1) * PANEL
        start = 0
        for part in parts:
            for rows in torch.split(part, slice_rows):
                end = start + len(rows)
                tensors = pack_panels(self._kernels, self._slice_memory, encoding, [rows])
                slice_bias = None if bias is None else bias[start:end]
                self._multiply(y[:, start:end], x, encoding, tensors, slice_bias, activation=activation)
                start = end

    def _add_lora(self, y: Tensor, x: Tensor, packed: PackedLinear, lora: LoRAInputs) -> Tensor:
        adapted_slices = [layer_slice for layer_slice in packed.slices if layer_slice.name in lora.matrices]
        if not adapted_slices or not len(x):
            return y
        dtype_code, rows = DTYPE_CODES.get(x.dtype), lora.rows
        fits = dtype_code is not None and x.stride(1) == y.stride(1) == 1 and y.dtype == x.dtype
        fits = fits and rows.dtype == torch.int64 and rows.is_contiguous()
        if not fits or not all(
            _supports_matrices(*lora.matrices[layer_slice.name], x.dtype) for layer_slice in adapted_slices
        ):
            self._report_fallback("linear with adapters", {f"{x.dtype} or strided adapters": False})
            return super()._add_lora(y, x, packed, lora)
        assert len(rows) == len(x)
        num_slots, table_rows, multiplications = len(lora.matrices[adapted_slices[0].name][0]), [], 0
        for layer_slice in adapted_slices:
            (down, up), ranks = lora.matrices[layer_slice.name], lora.ranks.get(layer_slice.name)
            assert len(down) == num_slots, "slices of a layer have different numbers of adapter slots"
            max_rank, width = down.shape[1], layer_slice.stop - layer_slice.start
            addresses = down.data_ptr(), up.data_ptr(), 0 if ranks is None else ranks.data_ptr()
            table_rows.append((*addresses, max_rank, layer_slice.start, width))
            multiplications += len(x) * max_rank * (x.shape[1] + width)
        table = self._keep_alive(torch.tensor(table_rows, dtype=torch.int64))
        (self._kernels.long_lora if multiplications > LONG_KERNEL_MULTIPLICATIONS else self._kernels.lora)(
            dtype_code,
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            rows.data_ptr(),
            table.data_ptr(),
            len(x),
            len(table_rows),
            num_slots,
            x.shape[1],
        )
        return y

    def _report_fallback(self, operation: str, conditions: Mapping[str, bool]) -> None:
        """Log once per cause that an operation runs on the slower reference kernels.

        Args:
            operation: name of the operation.
            conditions: descriptions of the arguments, and whether the C++ kernel supports each. The log names
                the unsupported arguments.
        """
        cause = ", ".join(name for name, supported in conditions.items() if not supported)
        if (operation, cause) not in self._logged_fallbacks:
            self._logged_fallbacks.add((operation, cause))
            _logger.warning(
                "%s runs on the reference kernels, which are slower: the C++ kernels do not support %s",
                operation,
                cause,
            )

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor for a result of an operation."""
        return torch.empty(shape, dtype=dtype)

    def _scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor for intermediate values of an operation."""
        return self._empty(shape, dtype)

    def _keep_alive(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, a constant operand of a kernel.

        Compiled steps override this method to keep a reference, so that the operand is not freed.
        """
        return tensor


def _is_supported(x: Tensor, packed: PackedLinear) -> bool:
    """Return whether a kernel supports the activations ``x`` with the weight and the bias of ``packed``."""
    bias = packed.bias
    fits = packed.layout == PANELS and x.stride(1) == 1 and (bias is None or bias.dtype == x.dtype)
    return (
        fits
        and supports_order(packed)
        and x.dtype in DTYPE_CODES
        and supports_dtype(packed.encoding, x.dtype)
    )


def supports_dtype(encoding: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel supports activations of type ``dtype`` with weights in this encoding.

    For encodings with quantized activations, the caller must check that the type is in `DTYPE_CODES`.
    """
    return quantizes_activations(encoding) or _compute_dtype(encoding) == dtype


def supports_order(packed: PackedLinear) -> bool:
    """Return whether the kernel can permute the activations as the weight requires.

    Only kernels that quantize activations in groups can permute them.
    """
    if packed.order is None:
        return True
    return quantizes_activations(packed.encoding) and encoding_named(packed.encoding).group_size is not None


def _compute_dtype(encoding: str) -> torch.dtype:
    """Return the type of the activations that are multiplied by weights in this encoding."""
    return encoding_named(encoding).compute_dtype.to_torch()


def _supports_matrices(down: Tensor, up: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the LoRA kernel supports the matrices ``down [n, R, in]`` and ``up [n, out, R]``.

    ``up`` must be a view of a contiguous tensor ``[n, R, out]``.
    """
    return down.dtype == up.dtype == dtype and down.is_contiguous() and up.transpose(1, 2).is_contiguous()
