"""Norms of rows: by root mean square (Zhang and Sennrich 2019, arXiv:1910.07467), and by mean and
variance (Ba et al. 2016, arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from penstock.kernels import StepInputs


class Norm(Protocol):
    """A norm of rows."""

    @property
    def weight(self) -> Tensor:
        """``[E]``, or ``[H, D]`` for a norm of heads."""
        ...

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """``x [..., E] -> [..., E]``."""
        ...

    def add(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``. The first layer of a model has no residual."""
        ...


LoadNorm: TypeAlias = Callable[[str, int], Norm]
"""Reads a norm, given its full name in the checkpoint and its size E."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Scale each row to a root mean square of 1, then multiply by ``weight [E]``."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        return step.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``. The first layer of a model has no residual."""
        if residual is None:
            return self(x, step), x
        return step.ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Shift and scale each row to mean 0 and variance 1, then compute ``row * weight [E] + bias [E]``."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        return step.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``. The first layer of a model has no residual."""
        if residual is None:
            return self(x, step), x
        return step.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
