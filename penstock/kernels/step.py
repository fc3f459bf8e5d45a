"""`StepInputs`: the inputs of a step that all layers of a model share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.inputs import KVCacheInputs, LoRAInputs, SequenceBlocks
from penstock.kernels.ops import Ops
from penstock.kernels.spans import ImageSpans


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs that all layers of a model share in one step.

    A forward pass reads no other state of the step.
    """

    ops: Ops
    positions: Tensor  # [T] int64
    row_offsets: Tensor  # [B + 1] int32: sequence b has the rows row_offsets[b]:row_offsets[b + 1]
    kv: KVCacheInputs | None = None
    lora: LoRAInputs | None = None
    text_lengths: Tensor | None = None
    """[T] int64: the text length of each row, for rotary embeddings that depend on the text length; see
    `penstock.architectures.decoder`."""
    spans: ImageSpans | None = None
    """The images whose tokens attend to each other in both directions; see `Ops.attention`. None if the step
    has no such images."""
    blocks: SequenceBlocks | None = None
    """The result of `Ops.sequence_blocks`, for attention without a KV cache."""
