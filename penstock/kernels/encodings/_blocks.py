"""Weights in blocks, as stored by GGUF files and 4-bit checkpoints.

A weight is ``(scale * number - minimum) * row_scale``. Minima and row scales are optional. Codes have 4, 5 or
6 bits. The number of a code is ``code - offset``, an E2M1 number (mxfp4 and nvfp4), or an entry of a table
(nf4 and fp4).

``weight`` holds the codes, uint8 ``[out, in]``. ``scales`` has one number per ``group_size`` inputs, and
``minima``, if present, one per 32 inputs. In encodings with superblocks of 256 inputs, scales and minima are
small integers. They are multiplied by ``factors`` and ``min_factors``, float16 ``[out, ceil(in / 256)]``.
``row_scales``, if present, are float32 ``[out]``. Products of scales or minima with factors are exact in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.kernels.encodings import LayerRole, LinearEncoding
from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._sizes import GROUP, PANEL, SUPERBLOCK, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.panels import PanelLayout


class BlockEncoding(LinearEncoding):
    """Weights as codes of few bits with the scales of a block format.

    Args:
        name: the name of the encoding.
        kind: the parameters of the encoding.
    """

    compute_dtype = DType.bfloat16
    storage_dtype = DType.uint8
    activation_dtype = DType.int8
    is_internal = True
    block_kind: BlockKind

    def __init__(self, name: str, kind: BlockKind) -> None:
        self.name = name
        self.bits = kind.bits
        self.group_size = kind.scaled_inputs
        self.has_zero_points = kind.table.numbers[0] != 0 if kind.table else not kind.are_floats
        self.block_kind = kind

    @property
    def panels(self) -> PanelLayout:
        from penstock.kernels.block_panels import BlockPanels

        return BlockPanels(self.block_kind)

    @property
    def split_unit(self) -> int:
        return self.block_kind.unit

    def inputs_per_number(self, tensor_name: str) -> int:
        inputs_by_name = {"weight": 1, "scales": self.block_kind.scaled_inputs, "minima": GROUP}
        return inputs_by_name.get(tensor_name, SUPERBLOCK)

    def for_layer(self, role: LayerRole, out_features: int, in_features: int) -> str:
        """Return int8 for the output head, else this encoding."""
        return "int8" if role == "head" else self.name

    def num_bytes(self, out_features: int, in_features: int) -> int:
        kind = self.block_kind
        num_units = round_up(out_features, PANEL) * round_up(in_features, kind.unit) // kind.unit
        row_scale_bytes = 4 * out_features if kind.has_row_scales else 0
        return num_units * (kind.unit // GROUP * kind.group_bytes + kind.factor_bytes) + row_scale_bytes

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """Quantize the weights that share a scale by their range; ``importance`` has no effect."""
        from penstock.kernels.blocks import quantize_blocks

        return quantize_blocks(self.block_kind, weight)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        from penstock.kernels.blocks import unpack_blocks

        return unpack_blocks(self.block_kind, tensors)

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        from penstock.kernels.blocks import multiply_blocks

        return multiply_blocks(self.block_kind, x, tensors, bias)
