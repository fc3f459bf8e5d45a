"""Normalization of rows: `RMSNorm` and `LayerNorm`, also over heads that are divided among ranks.

Sources: Zhang and Sennrich 2019 (arXiv:1910.07467) and Ba et al. 2016 (arXiv:1607.06450).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.distributed import Part
from penstock.errors import ConfigError
from penstock.kernels import StepInputs
from penstock.kernels.collectives import Collectives


class Norm(Protocol):
    """A normalization layer."""

    @property
    def weight(self) -> Tensor:
        """The scale ``[E]``. Norms of queries and keys can have a scale for each head, ``[H, D]``."""
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
    """Scales each row to a root mean square of 1, then multiplies it by ``weight [E]``."""

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
    """Shifts and scales each row to mean 0 and variance 1, then computes ``row * weight [E] + bias [E]``."""

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

    def normalize_sum(self, x: Tensor, residual: Tensor, step: StepInputs) -> Tensor:
        """Return ``norm(x + residual)``. The sum is not rounded to the type of the activations."""
        return step.ops.layer_norm_of_sum(x, residual, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class GatheredNorm:
    """A norm over all heads of queries or keys, if the heads are divided among ranks.

    The norm needs a mean over all heads, so the columns of all ranks are gathered. If several ranks have
    copies of the same heads, the gathered rows contain each head equally often, so the mean does not change.
    """

    norm: Norm  # applied to the gathered rows
    ranks: Collectives
    widths: tuple[int, ...]  # number of columns of each rank
    part: Part  # columns of this rank in the gathered rows

    @property
    def weight(self) -> Tensor:
        """The weights of all gathered columns."""
        return self.norm.weight

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        gathered = self.norm(step.ops.all_gather(x, self.ranks, self.widths), step)
        return gathered[:, self.part.start : self.part.stop]

    def add(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``."""
        total = x if residual is None else step.ops.add(x, residual)
        return self(total, step), total


def select_weights(norm: Norm, parts: Sequence[Part]) -> Norm:
    """Return a copy of a norm with the weights and biases of ``parts`` only, concatenated.

    Raises:
        ConfigError: the norm is neither an `RMSNorm` nor a `LayerNorm`.
    """

    def select(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[part.start : part.stop] for part in parts])

    if isinstance(norm, RMSNorm):
        return RMSNorm(select(norm.weight), norm.eps)
    if isinstance(norm, LayerNorm):
        return LayerNorm(select(norm.weight), select(norm.bias), norm.eps)
    raise ConfigError(
        "tensor_parallel_size",
        f"{type(norm).__name__} of heads cannot be divided among ranks: remove this setting",
    )
