"""The gated feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import Activation, StepInputs
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(activation(gate(x)) * up(x))``, gate and up fused into one product."""

    gate_up: Linear
    down: Linear
    activation: Activation

    @classmethod
    def load(
        cls,
        load: Loader,
        name: str,
        hidden: int,
        inner: int,
        activation: Activation,
        *,
        bias: bool = False,
        fused: bool = False,
    ) -> GatedMLP:
        """Reads ``gate_proj``, ``up_proj`` and ``down_proj`` under ``name``.

        ``fused``: the checkpoint has the first two as one, ``gate_up_proj``.
        """
        parts = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
        return cls(
            load.fused(name, parts, hidden, bias=bias),
            load.linear(f"{name}.down_proj", hidden, inner, bias=bias),
            activation,
        )

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        return self.down(step.ops.gated_activation(self.gate_up(x, step), self.activation), step)
