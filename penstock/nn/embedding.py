"""Token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import StepInputs


@dataclass(frozen=True, slots=True)
class Embedding:
    """``tokens [T] -> [T, E]``. Given embeddings (images, audio) replace the rows of their tokens."""

    table: Tensor  # [V, E]
    scale: float = 1.0  # applied to rows of the table; given embeddings are already scaled

    def __call__(
        self,
        tokens: Tensor,  # [T]
        step: StepInputs,
        given: tuple[Tensor, Tensor] | None = None,  # rows [P], values [P, E]
    ) -> Tensor:
        x = step.ops.embedding(tokens, self.table)
        if self.scale != 1:
            x = step.ops.scale(x, self.scale)
        return x if given is None else step.ops.put_rows(x, *given)
