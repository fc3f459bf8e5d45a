"""What one forward passes from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.inputs import KVCacheInputs, LoRAInputs
from penstock.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all layers share in one step. Passed down the model: a forward reads no global state."""

    ops: Ops
    positions: Tensor  # [T] int64
    row_offsets: Tensor  # [B + 1] int32: sequence b owns rows row_offsets[b]:row_offsets[b + 1]
    kv: KVCacheInputs | None = None
    lora: LoRAInputs | None = None
    text_lengths: Tensor | None = None
    """[T] int64: the text length that rotary embeddings which change with it use for each row, see
    `penstock.architectures.decoder`."""
