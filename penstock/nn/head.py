"""The output head, which maps the last hidden states to logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.nn.linear import Linear


@dataclass(frozen=True, slots=True)
class Head:
    """The output head, ``x [R, E] -> [R, V]``: a linear layer, a scale and a soft cap.

    With a soft cap, logits become ``soft_cap * tanh(logits / soft_cap)``.
    """

    linear: Linear
    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        logits = self.linear(x, step)
        if self.scale != 1:
            logits = step.ops.scale(logits, self.scale)
        return logits if self.soft_cap is None else step.ops.soft_cap(logits, self.soft_cap)
