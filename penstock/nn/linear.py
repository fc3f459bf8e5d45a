"""`Linear`: a linear layer, or several linear layers with the same input that are fused into one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from penstock.kernels import Activation, PackedLinear, StepInputs
from penstock.kernels.collectives import Collectives


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer, ``x [T, in] -> [T, out]``.

    With tensor parallelism, a rank has some of the outputs (column-parallel) or some of the inputs
    (row-parallel). A row-parallel layer computes partial sums, which are added over the ranks.
    """

    packed: PackedLinear
    sum_over: Collectives | None = field(default=None, kw_only=True)
    """The ranks whose outputs are added; None if this rank has all inputs, or the caller adds the outputs."""
    gather_over: Collectives | None = field(default=None, kw_only=True)
    """The ranks whose outputs are concatenated; None if this rank only needs its own outputs."""
    widths: tuple[int, ...] = field(default=(), kw_only=True)
    """The number of outputs of each rank in `gather_over`."""

    def activated(self, x: Tensor, step: StepInputs, activation: Activation) -> Tensor:
        """Return ``activation(self(x))``."""
        if self.sum_over is not None or self.gather_over is not None:
            return step.ops.activation(self(x, step), activation)
        return step.ops.activated_linear(x, self.packed, activation, lora=step.lora)

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        y = step.ops.linear(x, self.packed, lora=step.lora)
        if self.sum_over is not None:
            return step.ops.all_reduce(y, self.sum_over)
        return y if self.gather_over is None else step.ops.all_gather(y, self.gather_over, self.widths)
