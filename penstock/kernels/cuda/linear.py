"""Linear layers: cuBLAS for floats, Triton for quantized encodings and adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cuda.attention import FLOATS
from penstock.kernels.cuda.launch import divide_up, has_contiguous_rows, launch, power_of_two, row_stride
from penstock.kernels.cuda.products import multiply_encoded, multiply_floats, multiply_row
from penstock.kernels.cuda.programs.products import multiply_floats as floats_program
from penstock.kernels.cuda.recurrent import CudaRecurrent
from penstock.kernels.cuda.weight_tables import Groups, WeightTables
from penstock.kernels.encodings import encoding_named
from penstock.kernels.inputs import LoRAInputs
from penstock.kernels.linear import LinearSlice, PackedLinear, make_packed_linear, pack_linear, pack_quantized
from penstock.kernels.nibbles import NIBBLES, fits_nibbles, to_nibbles


class CudaLinear(CudaRecurrent):
    """Linear layers and adapters.

    By default, cuBLAS multiplies floats. It chooses its kernels by the number of rows, and a Triton program
    replaces it for a single row. After `require_determinism`, Triton programs multiply floats for any number
    of rows, and the result of a row does not depend on the number of rows.
    """

    def require_determinism(self) -> None:
        self.is_deterministic = True

    def pack_linear(
        self,
        weight: Tensor | Sequence[Tensor],
        encoding: str,
        *,
        bias: Tensor | None = None,
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        return packed_for_gpu(pack_linear(weight, encoding, bias=bias, slices=slices))

    def pack_quantized(
        self,
        rows: Mapping[str, Tensor],
        encoding: str,
        *,
        bias: Tensor | None = None,
        slices: Sequence[LinearSlice] = (),
        order: Tensor | None = None,
    ) -> PackedLinear:
        return packed_for_gpu(pack_quantized(rows, encoding, bias=bias, slices=slices, order=order))

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        y = self._multiply(x, packed)
        return y if lora is None else self._add_lora(y, x, packed, lora)

    def _multiply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Return the product plus the bias, without adapters."""
        encoding = encoding_named(packed.encoding)
        if encoding.is_float and not self.is_deterministic:
            weight, bias = packed.tensors["weight"], packed.bias
            if (
                len(x) == 1
                and x.dim() == 2
                and x.dtype in FLOATS
                and has_contiguous_rows(x)
                and weight.is_contiguous()
            ):
                return multiply_row(x, packed)
            weight = weight.to(x.dtype)
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        if x.dtype not in FLOATS or not has_contiguous_rows(x):
            return super().linear(x, packed)
        weights = WeightTables.of([packed])
        if weights is None:
            return super().linear(x, packed)
        if packed.order is not None:
            x = x.index_select(1, packed.order)
        if encoding.is_float:
            return multiply_floats(x, weights, None, is_deterministic=True)
        return multiply_encoded(x, weights, None, is_deterministic=self.is_deterministic)

    def _add_lora(self, y: Tensor, x: Tensor, packed: PackedLinear, lora: LoRAInputs) -> Tensor:
        """Return y after adding the product of each row with its adapter.

        The device sorts rows by adapter.
        """
        adapted_slices = [layer_slice for layer_slice in packed.slices if layer_slice.name in lora.matrices]
        if not adapted_slices:
            return y
        is_supported = x.dtype in FLOATS and has_contiguous_rows(x, y)
        if not is_supported or any(
            matrix.dtype not in FLOATS
            for layer_slice in adapted_slices
            for matrix in lora.matrices[layer_slice.name]
        ):
            return super()._add_lora(y, x, packed, lora)
        num_adapters = lora.matrices[adapted_slices[0].name][0].shape[0]
        groups = Groups.of(lora.rows, num_adapters)
        for layer_slice in adapted_slices:
            down, up = lora.matrices[layer_slice.name]  # [n, R, in], [n, out, R]
            ranks = lora.ranks.get(layer_slice.name)
            ranks = ranks if ranks is None else ranks.to(x.device, non_blocking=True)
            delta = torch.empty((len(x), down.shape[1]), dtype=torch.float32, device=x.device)
            _multiply_adapters(delta, x, down, groups, ranks, gathers=True)
            _multiply_adapters(
                y[:, layer_slice.start : layer_slice.stop], delta, up, groups, ranks, gathers=False
            )
        return y


def packed_for_gpu(packed: PackedLinear) -> PackedLinear:
    """Return the layer in the layout `NIBBLES` if its encoding supports it, else the unchanged layer."""
    encoding = encoding_named(packed.encoding)
    if not fits_nibbles(encoding):
        return packed
    shape = (packed.out_features, packed.in_features)
    tensors = to_nibbles(packed.tensors, encoding)
    return make_packed_linear(
        tensors, shape, packed.encoding, packed.bias, packed.slices, NIBBLES, packed.order
    )


def _multiply_adapters(
    out: Tensor, x: Tensor, matrices: Tensor, groups: Groups, ranks: Tensor | None, *, gathers: bool
) -> None:
    """Multiply each row by the matrix of its adapter.

    Args:
        out: with ``gathers``, the result ``[T, R]``, sorted by adapter. Otherwise ``[T, out]``, to which the
            product is added.
        x: ``[T, in]`` with ``gathers``, else ``[T, R]``, sorted by adapter.
        matrices: ``[n, R, in]`` with ``gathers``, else ``[n, out, R]``.
        groups: the rows of each adapter.
        ranks: the rank of each adapter ``[n]``; None if all adapters have rank R.
        gathers: whether this is the first of the two products, the one with A.
    """
    num_outputs, num_inputs = matrices.shape[1:]
    tile_rows, tile_outputs = 16, 32
    grid = (len(x) // tile_rows + groups.num_groups, divide_up(num_outputs, tile_outputs))
    limited_dimension = "" if ranks is None else ("out" if gathers else "in")
    launch(
        floats_program, grid, out, x, matrices, matrices, matrices, matrices, groups.rows,
        groups.starts, groups.starts if ranks is None else ranks, len(x), groups.num_groups, num_outputs,
        num_inputs, row_stride(x), row_stride(out), *matrices.stride()[1:], matrices.stride(0), M=tile_rows,
        N=tile_outputs,
        INPUTS=max(16, min(power_of_two(num_inputs), 64)), GROUPS=True, POINTERS=False, GATHERS=gathers,
        SCATTERS=not gathers, ADDS=not gathers, LIMITS=limited_dimension, HAS_BIAS=False, TO_FLOAT32=True,
    )  # fmt: skip
