"""`CudaOps`: the operations in Triton. Operations without a program run as torch operations on the device."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.kernels.cuda.attention import FLOATS
from penstock.kernels.cuda.availability import is_interpreted
from penstock.kernels.cuda.convolution import CudaConvolution
from penstock.kernels.cuda.interpreter import correct_bfloat16
from penstock.kernels.cuda.launch import divide_up, has_contiguous_rows, launch, power_of_two
from penstock.kernels.cuda.linear import CudaLinear
from penstock.kernels.cuda.products import multiply_encoded, multiply_floats
from penstock.kernels.cuda.programs.products import combine_experts
from penstock.kernels.cuda.weight_tables import Groups, WeightTables
from penstock.kernels.experts import ClampedSwiGLU, PackedExperts
from penstock.kernels.inputs import LoRAInputs
from penstock.kernels.linear import PackedLinear
from penstock.kernels.ops import Gating

_MAX_TILE_COLUMNS = 1024
"""Maximum number of columns per tile of the program `combine_experts`."""


class CudaOps(CudaConvolution, CudaLinear):
    """The operations with Triton programs, for float32, bfloat16 and float16 activations."""

    def __init__(self) -> None:
        if is_interpreted():
            correct_bfloat16()
        self._expert_tables: WeakKeyDictionary[PackedExperts, tuple[WeightTables, WeightTables]] = (
            WeakKeyDictionary()
        )

    @property
    def description(self) -> str:
        return f"{self.name} interpreter" if is_interpreted() else self.name

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
        if lora is not None and lora.for_slices(packed.slice_names()) is None:
            lora = None
        weights = self._get_weights(packed)
        is_supported = x.dtype in FLOATS and has_contiguous_rows(x) and len(x) > 0 and not packed.is_part
        if weights is None or lora is not None or not is_supported:
            return super().experts(x, packed, topk_weights, topk_ids, gating, lora=lora)
        num_rows, num_choices = topk_ids.shape
        pairs = Groups.of(topk_ids.flatten(), len(packed.down))  # pair t * num_choices + j belongs to row t
        row_groups = Groups(pairs.rows // num_choices, pairs.starts, pairs.num_groups)
        positions = torch.arange(num_rows * num_choices, device=x.device)
        y = self._multiply_grouped(x, weights[0], row_groups)  # [T * k, 2F], in the order of the experts
        if isinstance(gating, ClampedSwiGLU):
            y = self.clamped_swiglu(y, gating)
        else:
            y = self.gated_activation(y, gating)
        y = self._multiply_grouped(y, weights[1], Groups(positions, pairs.starts, pairs.num_groups))
        pair_positions = torch.empty_like(pairs.rows)
        pair_positions[pairs.rows] = positions
        pair_positions, order = pair_positions.view(num_rows, num_choices).sort(-1)  # ascending expert ids
        row_weights = topk_weights.gather(1, order)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        tile_columns = min(_MAX_TILE_COLUMNS, power_of_two(x.shape[1]))
        grid = (num_rows, divide_up(x.shape[1], tile_columns))
        launch(
            combine_experts,
            grid,
            out,
            y,
            row_weights,
            pair_positions,
            x.shape[1],
            TOP=num_choices,
            WIDTH=tile_columns,
        )
        return out

    def _add_pairs(self, total: Tensor, rows: Tensor, values: Tensor, counts: Sequence[int]) -> None:
        # On a GPU, one call of `index_add_` adds the values of a row in any order. Each call here has only
        # the values of one expert, whose rows are distinct, so that the order of additions is fixed.
        row_parts, value_parts = rows.split_with_sizes(counts), values.split_with_sizes(counts)
        for expert_rows, expert_values in zip(row_parts, value_parts, strict=True):
            total.index_add_(0, expert_rows, expert_values)

    def _multiply_grouped(self, x: Tensor, weights: WeightTables, groups: Groups) -> Tensor:
        if weights.encoding.is_float:
            return multiply_floats(x, weights, groups, is_deterministic=self.is_deterministic)
        return multiply_encoded(x, weights, groups, is_deterministic=self.is_deterministic)

    def _get_weights(self, packed: PackedExperts) -> tuple[WeightTables, WeightTables] | None:
        """Return the weights of the gate_up and down layers; None unless programs support both."""
        if packed not in self._expert_tables:
            gate_up, down = (_make_grouped_weights(linears) for linears in (packed.gate_up, packed.down))
            if gate_up is None or down is None:
                return None
            self._expert_tables[packed] = gate_up, down
        return self._expert_tables[packed]


def _make_grouped_weights(linears: tuple[PackedLinear, ...]) -> WeightTables | None:
    """Return the weights with a table of addresses, even for one expert; None if no program supports them."""
    return WeightTables.of(linears if len(linears) > 1 else linears * 2)
