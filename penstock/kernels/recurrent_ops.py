"""`RecurrentOps`: the operations of linear attention, whose state has the same size for every length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias

from torch import Tensor

from penstock.kernels.inputs import LayerState
from penstock.kernels.operations import CFunction, operation

GateFunction: TypeAlias = Literal["sigmoid", "silu"]
"""The function that `RecurrentOps.apply_gate` applies to a gate."""

NORM_EPS = 1e-6
"""Added to the squared norm of queries and keys in `RecurrentOps.gated_delta_rule`."""


NUM_SAVES = 2
"""Number of states that a step can save for each sequence, see `StateInputs.saves`."""


class RecurrentOps(ABC):
    """The convolution and the recurrence of linear attention, and output gates.

    A sequence whose first row is at position 0 begins with a state of zeros, whatever its slot contains. The
    result of a row depends only on the state and on the rows before it, not on the chunks of a prompt. The
    convolution and the recurrence also write the states that `StateInputs.saves` requests.
    """

    @operation(weights=["weight"], functions={"short_convolution": CFunction("q 8P 4q")})
    @abstractmethod
    def short_convolution(
        self,
        x: Tensor,  # [T, C]
        weight: Tensor,  # [W + 1, C] float32
        state: LayerState,
        row_offsets: Tensor,  # [B + 1] int32
        lengths: Tensor,  # [B] int32
    ) -> Tensor:  # [T, C]
        """Return the SiLU of the causal depthwise convolution of each sequence, and update ``state.inputs``.

        Row t of a sequence is ``silu(sum(weight[j] * x[t - W + j] for j in range(W + 1)))``, computed in
        float32. ``state.inputs`` has the W rows before this step. ``lengths`` are the lengths of the
        sequences, including the rows of this step.
        """

    @operation(weights=["decay"], functions={"gated_delta_rule": CFunction("q 9P 8q", can_be_long=True)})
    @abstractmethod
    def gated_delta_rule(
        self,
        qkv: Tensor,  # [T, 2 K D + H F]: queries [K, D], keys [K, D], values [H, F]
        gates: Tensor,  # [T, 2 H]: logits of the update rate, then inputs of the decay
        decay: Tensor,  # [2, H] float32: rate and bias
        state: LayerState,
        row_offsets: Tensor,  # [B + 1] int32
        lengths: Tensor,  # [B] int32
    ) -> Tensor:  # [T, H, F]
        """Return the output of the gated delta rule and update ``state.recurrent`` (arXiv:2412.06464).

        For each row and value head h, with the query q and the key k of key head ``h // (H / K)``::

            q = q / sqrt(|q|^2 + NORM_EPS) / sqrt(D)
            k = k / sqrt(|k|^2 + NORM_EPS)
            S = exp(-decay[0, h] * softplus(gates[H + h] + decay[1, h])) S
            S = S + k outer (sigmoid(gates[h]) (v - k S))
            output = q S

        S ``[D, F]`` is the state of the head. Computed in float32, returned in the type of ``qkv``.
        """

    @operation(functions={"apply_gate": CFunction("2q 3P 7q")})
    @abstractmethod
    def apply_gate(
        self,
        x: Tensor,  # [T, H, D]
        gate: Tensor,  # [T, H, D]
        function: GateFunction,
    ) -> Tensor:  # [T, H, D]
        """Return ``x * function(gate)``, computed in float32, returned in x's type."""
