"""Feed-forward layers, plain (`MLP`) and gated (`GatedMLP`; Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import Activation, StepInputs
from penstock.nn.linear import Linear
from penstock.nn.loader import Loader


@dataclass(frozen=True, slots=True)
class MLP:
    """A feed-forward layer: ``down(activation(up(x)))``."""

    up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        return self.down(self.up.activated(x, step, self.activation), step)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """A gated feed-forward layer: ``down(activation(gate(x)) * up(x))``. Gate and up are one fused layer."""

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
        gate_up: Sequence[str] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
    ) -> GatedMLP:
        """Read the layer called ``name``.

        Args:
            load: reads and packs the tensors.
            name: the full name of the layer in the checkpoint.
            hidden: E, the hidden size.
            inner: F, the size of the gate's output.
            activation: the activation function of the gate.
            bias: whether the linear layers have biases.
            gate_up: the names of the gate and the up matrix; one name if the checkpoint stores them as one
                matrix.
            down: the name of the down matrix.
        """
        inner_part = load.inner_part(f"{name}.{down}", inner)
        if len(gate_up) == 1:
            output_sizes = {gate_up[0]: 2 * inner}
            outputs = {gate_up[0]: [inner_part, inner_part.shifted(inner)]}
        else:
            output_sizes, outputs = dict.fromkeys(gate_up, inner), {key: [inner_part] for key in gate_up}
        rank_outputs = {key: load.rank_outputs(parts) for key, parts in outputs.items()}
        inputs = None if load.shard.is_whole else inner_part
        return cls(
            load.fused(name, output_sizes, hidden, bias=bias, outputs=rank_outputs),
            load.linear(f"{name}.{down}", hidden, inner, bias=bias, inputs=inputs),
            activation,
        )

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        return self.down(step.ops.gated_activation(self.gate_up(x, step), self.activation), step)
