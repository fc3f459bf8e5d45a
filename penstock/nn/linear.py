"""A linear layer, or several with the same input fused into one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import PackedLinear, StepInputs


@dataclass(frozen=True, slots=True)
class Linear:
    """``x [T, in] -> [T, out]``."""

    packed: PackedLinear

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        return step.ops.linear(x, self.packed, lora=step.lora)
